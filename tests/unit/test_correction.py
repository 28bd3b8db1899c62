"""Off-policy correction, the over-long penalty and filter, KL in the reward: worked by hand,
and the named points on the two axes.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from replicas import Replicas, scored_step, stored

from mrl.algo.advantages import soft_overlong_penalty
from mrl.algo.correction import CorrectionParameters, correct, correction_metrics, log_ratios, without_truncated
from mrl.algo.losses import kl_in_reward
from mrl.algo.rows import row_sums
from mrl.algo.spec import CORRECTIONS, LEVELS, MODES
from mrl.config.load import load_config
from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.data.order import DataCursor
from mrl.data.samples import Sample, packed
from mrl.driver.advice import advisers
from mrl.driver.reporting import AdvisedRecord
from mrl.errors import NumericAbort
from mrl.generate.rollouts import Judge, Rollouts
from mrl.record.spec import metric_spec
from mrl.reward.items import RewardResult

TINY = "parallel_configs/tiny-moe/cpu.yaml"
# ratios old / rollout of two responses: 4, 1/2 (product 2, geometric mean sqrt 2) and 8 (with a token left out that
# must not be seen)
RATIOS = np.array([4.0, 0.5, 8.0, np.nan])
MASK, LENGTHS = np.array([True, True, True, False]), np.array([2, 2])


def run(level, mode, low, high):
    rollout = np.array([-1.0, -2.0, -3.0, np.nan])
    return correct(CorrectionParameters(level, mode, low, high), rollout + np.log(RATIOS), rollout, MASK, LENGTHS)


def test_a_second_level_rejects_beside_the_weights():
    rollout = np.array([-1.0, -2.0, -3.0, np.nan])
    weigh = CorrectionParameters("token", "truncate", None, 2.0, reject="geometric", reject_low=0.5, reject_high=1.5)
    found = correct(weigh, rollout + np.log(RATIOS), rollout, MASK, LENGTHS)
    assert found.keep.tolist() == [True, True, False, False]  # sqrt 2 is inside, 8 is not
    np.testing.assert_allclose(found.weights, [2, 0.5, 1, 1])
    metrics = correction_metrics(found.of_rows)
    assert metrics["rollout_corr/rejected_token_share"] == pytest.approx(1 / 3)
    assert metrics["rollout_corr/weight_mean"] == pytest.approx(1.25)


def test_levels_look_at_tokens_products_and_geometric_means():
    old = np.log(RATIOS)
    for level, expected in (
        ("token", [4, 0.5, 8, 1]),
        ("sequence", [2, 2, 8, 1]),
        ("geometric", [2**0.5, 2**0.5, 8, 1]),
    ):
        np.testing.assert_allclose(np.exp(log_ratios(old, np.zeros(4), MASK, LENGTHS, level)), expected)


@pytest.mark.parametrize(
    ("level", "mode", "low", "high", "keep", "weights"),
    [
        ("token", "truncate", None, 2.0, MASK, [2, 0.5, 2, 1]),  # TIS
        ("sequence", "truncate", None, 3.0, MASK, [2, 2, 3, 1]),
        ("geometric", "truncate", None, 3.0, MASK, [2**0.5, 2**0.5, 3, 1]),
        ("token", "truncate", 0.8, 5.0, MASK, [4, 0.5, 5, 1]),  # whose lower bound is told, not imposed
        ("token", "clip", 0.8, 5.0, MASK, [4, 0.8, 5, 1]),
        ("token", "clip", None, 5.0, MASK, [4, 0.5, 5, 1]),
        ("token", "mask", 0.4, 5.0, [True, True, False, False], [4, 0.5, 1, 1]),  # tokens go one by one
        ("token", "icepop", 0.4, 5.0, MASK, [4, 0.5, 0, 1]),  # all stay, and one weighs 0
        ("token", "icepop", 0.6, 5.0, MASK, [4, 0, 0, 1]),
        ("sequence", "icepop", 0.5, 2.1, MASK, [2, 2, 0, 1]),
        ("geometric", "icepop", 0.9, 1.5, MASK, [1, 1, 0, 1]),
        ("token", "mask", 0.6, 5.0, [True, False, False, False], [4, 1, 1, 1]),
        ("sequence", "mask", 0.5, 2.1, [True, True, False, False], [2, 2, 1, 1]),  # MIS: a response stays or goes whole
        ("geometric", "mask", 0.9, 1.5, [True, True, False, False], [1, 1, 1, 1]),  # rejection alone, no weight
        ("geometric", "mask", 0.9, 1.4, [False] * 4, [1, 1, 1, 1]),
    ],
)
def test_modes_mask_clip_and_truncate(level, mode, low, high, keep, weights):
    found = run(level, mode, low, high)
    np.testing.assert_array_equal(found.keep, keep)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-6)
    assert found.weights.dtype == np.float32
    assert all(metric_spec(name) for name in correction_metrics(found.of_rows))


@pytest.mark.parametrize(
    ("level", "mode", "weights"),
    [
        ("token", "mask", {False: [1, 1, 1, 1], True: [4, 0.5, 1, 1]}),
        ("token", "icepop", {False: [1, 1, 0, 1], True: [4, 0.5, 0, 1]}),
        ("geometric", "mask", {False: [1, 1, 1, 1], True: [2**0.5, 2**0.5, 1, 1]}),
    ],
)
def test_a_rejection_weighs_what_is_inside_its_band_or_not(level, mode, weights):
    old = np.array([-1.0, -2.0, -3.0, np.nan])
    for weigh, expected in weights.items():
        found = correct(CorrectionParameters(level, mode, 0.4, 5.0, weigh), old + np.log(RATIOS), old, MASK, LENGTHS)
        np.testing.assert_allclose(found.weights, expected, rtol=1e-6)


def test_shares_of_icepop_count_what_weighs_0_as_rejected():
    """Of three tokens in the denominators one weighs 0: mean (4 + 1/2) / 3, of squares 16.25 / 3."""
    metrics = correction_metrics(run("token", "icepop", 0.4, 5.0).of_rows)
    assert metrics == pytest.approx(
        {
            "rollout_corr/outside_share": 1 / 3, "rollout_corr/rejected_token_share": 1 / 3,
            "rollout_corr/rejected_sequence_share": 1 / 2, "rollout_corr/weight_mean": 1.5,
            "rollout_corr/weight_max": 4.0, "rollout_corr/weight_min": 0.0,
            "rollout_corr/effective_sample_share": 1.5**2 / (16.25 / 3),
        }
    )  # fmt: skip


def test_shares_and_the_effective_sample_size_worked_by_hand():
    """Rejection by token above: one of three tokens and one of two responses go; weights 4 and 1/2 stay: mean 2.25,
    of squares 8.125.
    """
    metrics = correction_metrics(run("token", "mask", 0.4, 5.0).of_rows)
    assert metrics == pytest.approx(
        {
            "rollout_corr/outside_share": 1 / 3, "rollout_corr/rejected_token_share": 1 / 3,
            "rollout_corr/rejected_sequence_share": 1 / 2, "rollout_corr/weight_mean": 2.25,
            "rollout_corr/weight_max": 4.0,
            "rollout_corr/weight_min": 0.5, "rollout_corr/effective_sample_share": 2.25**2 / 8.125,
        }
    )  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_where_both_agree_nothing_is_corrected_and_nothing_is_not_finite(level, mode):
    same, lengths = np.full(5, -1.0), np.array([4, 1, 0])
    parameters, mask = CorrectionParameters(level, mode, None if mode == "truncate" else 0.9, 1.1), np.ones(5, bool)
    found = correct(parameters, same, same, mask, lengths)
    np.testing.assert_array_equal(found.keep, mask)
    assert (found.weights == 1).all()
    apart = correct(parameters, same, same - 1e4, mask, lengths)
    assert np.isfinite(apart.weights).all() and all(map(math.isfinite, correction_metrics(apart.of_rows).values()))
    assert correction_metrics(correct(parameters, same, same, np.zeros(5, bool), lengths).of_rows) == {}


def test_the_published_corrections_are_points_on_the_axes():
    assert {(c.level, c.mode) for c in CORRECTIONS.values()} <= {(level, mode) for level in LEVELS for mode in MODES}
    assert {"TIS", "MIS", "IcePop", "geometric rejection"} <= set(CORRECTIONS)


# --- over-long --------------------------------------------------------------------------------------------------------

BOUNDARIES = [
    (0, 0.0),
    (15, 0.0),
    (16, 0.0),
    (17, -0.25),
    (18, -0.5),
    (19, -0.75),
    (20, -1.0),
    (21, -1.0),
    (1000, -1.0),
]


@pytest.mark.parametrize(("length", "penalty"), BOUNDARIES)
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_penalty_at_every_boundary_length(length, penalty, factor):
    """DAPO's definition with L_max 20 and a buffer of 4: 0 to 16, (16 - L) / 4 from there, -1 beyond 20."""
    assert soft_overlong_penalty(np.array([length]), 20, 4, factor) == pytest.approx([penalty * factor])


@pytest.mark.parametrize(("buffer", "expected"), [(1, [0.0, 0.0, -1.0]), (20, [-0.05, -0.95, -1.0])])
def test_the_narrowest_and_the_widest_buffer(buffer, expected):
    np.testing.assert_allclose(soft_overlong_penalty(np.array([1, 19, 20]), 20, buffer, 1.0), expected)


def sample(length, stop_reason, log_prob=-1.0):
    return Sample(0, 0, 0, 0, (1, 2), (3,) * length, (log_prob,) * length, stop_reason, 0)


def test_the_filter_drops_what_was_cut_off_and_not_what_ended_on_the_last_token():
    mask = without_truncated(np.ones(6, bool), np.array([True, False, True]), np.array([2, 1, 3]))
    np.testing.assert_array_equal(mask, [False, False, True, False, False, False])
    config = load_config(TINY, overrides=["algorithm.overlong_filter=true", "data.max_response_length=4"]).config
    # one token short, full and ended, full and cut, answers that left no room
    lengths, reasons = [3, 4, 4, 1], ["stop", "stop", "length", "context"]
    samples = [sample(n, why) for n, why in zip(lengths, reasons, strict=True)]
    batch, metrics = filtered(config, samples)
    np.testing.assert_array_equal(row_sums(batch.loss_mask, batch.response_lengths), [3, 4, 0, 0])
    np.testing.assert_array_equal(batch.response_lengths, [3, 4, 4, 1])
    assert metrics == {"train/overlong_filtered_share": 0.5}
    assert metric_spec("train/overlong_filtered_share")


def test_the_penalty_counts_all_tokens_that_the_limit_counts():
    """As verl's: five tokens of eight, two of them a tool's answer, and a buffer of the last four."""
    config = load_config(TINY, overrides=["algorithm.overlong_buffer={enable: true, len: 4}"]).config
    rows = packed([replace(sample(5, "stop"), sampled=(True, True, False, False, True))])
    judge = Judge(config.algorithm, config.reward, 8)
    assert judge.rewards(rows, [RewardResult(0, 1.0, {}, "ok")]).tolist() == [0.75]


def filtered(config: RunConfig, samples: list[Sample], gap: float = 0.0) -> tuple[TrainBatch, dict[str, float]]:
    """What two replicas hold after it; rows of the first, then of the second."""
    rows = stored(samples)
    results = [RewardResult(number, float(number), {}, "ok") for number in range(len(samples))]
    step, scored = scored_step(
        actor := Replicas(config, 2, gap), Rollouts(rows, results, np.arange(float(len(samples))), DataCursor(), {})
    )
    of_correction = tuple(f"rollout_corr/{name}" for name in ("outside", "rejected", "weight", "effective"))
    metrics = {name: value for name, value in scored.metrics.items() if name.startswith(("train/", *of_correction))}
    batches = [each.batch.rows(np.flatnonzero(each.own)) for each in actor.batches]
    whole = TrainBatch.joined(batches)
    return whole.rows(np.argsort(np.concatenate([step.cut.own_rows(replica) for replica in (0, 1)]))), metrics


def test_without_settings_nothing_is_touched():
    batch, metrics = filtered(load_config(TINY).config, [sample(2, "length")], gap=0.5)
    assert metrics == {} and batch.loss_weights is None and batch.loss_mask.all()
    np.testing.assert_allclose(batch.old_log_probs, -0.5)


def test_the_anchor_is_the_trainers_or_generations_own():
    batch, _ = filtered(load_config(TINY, overrides=["algorithm.anchor=rollout"]).config, [sample(2, "stop")], gap=0.5)
    np.testing.assert_allclose(batch.old_log_probs, -1.0)


ICEPOP = "algorithm.rollout_correction={level: token, mode: icepop, low: 0.5, high: 5.0}"


@pytest.mark.parametrize("mode", ["mask", "icepop"])
@pytest.mark.parametrize(("weigh", "weight"), [("null", 4.0), ("true", 4.0), ("false", 1.0)])
def test_what_is_inside_the_band_has_the_weight_that_the_configuration_says(mode, weigh, weight):
    correction = f"{{level: token, mode: {mode}, weigh: {weigh}, low: 0.5, high: 5.0}}"
    config = load_config(TINY, overrides=[f"algorithm.rollout_correction={correction}"]).config
    batch, _ = filtered(config, [sample(2, "stop")], gap=math.log(4))
    np.testing.assert_allclose(batch.loss_weights, weight, rtol=1e-6)


@pytest.mark.parametrize("mode", ["mask", "icepop"])
def test_a_step_of_which_nothing_is_left_stops_and_says_what_dropped_it(mode):
    config = load_config(TINY, overrides=[ICEPOP.replace("icepop", mode)]).config
    batch, _ = filtered(config, [sample(2, "stop")], gap=math.log(4))
    np.testing.assert_allclose(batch.loss_weights, 4.0, rtol=1e-6)
    with pytest.raises(NumericAbort, match=r"nothing of the step is left.*rollout_correction rejected every token"):
        filtered(config, [sample(2, "stop")], gap=2.0)


@pytest.mark.parametrize(
    ("overrides", "named", "unnamed"),
    [
        (
            ["algorithm.overlong_filter=true"],
            ["overlong_filter dropped 100% of the responses", "max_response_length"],
            ["rollout_corr"],
        ),
        ([ICEPOP], ["rollout_correction rejected every token", "k3_kl"], ["overlong_filter", "max_response_length"]),
        (["algorithm.overlong_filter=true", ICEPOP], ["dropped 50%", "rejected every token of the rest"], []),
    ],
)
def test_only_what_is_on_is_named_where_nothing_is_left(overrides, named, unnamed):
    config = load_config(TINY, overrides=overrides).config
    last = "stop" if len(overrides) == 2 else "length"
    with pytest.raises(NumericAbort) as caught:
        filtered(config, [sample(2, "length"), sample(2, last)], gap=2.0)
    assert all(text in str(caught.value) for text in named)
    assert not any(text in str(caught.value) for text in unnamed)


# --- KL in the reward -------------------------------------------------------------------------------------------------


def test_kl_in_the_reward_worked_by_hand():
    """A log ratio of log 2: k1 log 2, k2 (log 2)^2 / 2, k3 1/2 + log 2 - 1, each times 0.1."""
    old, ref, log2 = np.array([[math.log(0.5)]]), np.array([[math.log(0.25)]]), math.log(2)
    for kind, value in (
        ("kl", log2),
        ("k2", log2**2 / 2),
        ("low_var_kl", log2 - 0.5),
        ("abs", log2),
        ("k3+", log2 - 0.5),
    ):
        assert kl_in_reward(old, ref, kind)[0, 0] == pytest.approx(value)


# --- the warning ------------------------------------------------------------------------------------------------------


def said(capsys, values, *overrides):
    config = load_config(TINY, overrides=overrides).config
    record = AdvisedRecord(
        SimpleNamespace(write=lambda step, metrics: None),
        advisers(config.algorithm, config.rollout, config.cluster.device, config.updates_per_step),
        SimpleNamespace(done=lambda step: None),
    )
    for step, value in enumerate(values, start=1):
        record.write(step, {"rollout_corr/k3_kl": value})
    return capsys.readouterr().out.splitlines()


def test_a_small_and_steady_mismatch_is_no_matter(capsys):
    assert said(capsys, [1.5e-3] * 20) == []
    assert said(capsys, [1e-9] * 5 + [9e-5] * 5) == []  # many times as much, and still rounding


def test_a_mismatch_above_the_limit_is_told_once_with_what_to_do(capsys):
    (line,) = said(capsys, [1e-3, 0.02, 0.03])
    assert line.startswith("step 2: warning: rollout_corr/k3_kl is 0.02 nats a token, above 0.01")
    assert "algorithm.rollout_correction" in line and "TIS" in line
    (line,) = said(capsys, [0.02], ICEPOP)
    assert "rejected_token_share" in line


def test_a_drift_is_told_against_the_first_steps(capsys):
    (line,) = said(capsys, [1e-3] * 5 + [2e-3, 4e-3, 6e-3])
    assert line.startswith("step 8: ") and "6 times that of the first 5 steps" in line
