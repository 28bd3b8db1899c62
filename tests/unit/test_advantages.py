"""Group advantages and the mismatch between generation and training."""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from mrl.algo.advantages import (
    ADVANTAGE_FUNCTIONS,
    WHITENED,
    AdvantageInputs,
    TokenAdvantages,
    response_advantages,
    whitened,
)
from mrl.algo.correction import mismatch_metrics, mismatch_of_rows
from mrl.algo.rows import RowValues, moments, row_sums
from mrl.algo.spec import ADVANTAGES
from mrl.data.row_columns import positions
from mrl.errors import ConfigError, DataError, NumericAbort
from mrl.record.spec import metric_spec


@dataclass(frozen=True)
class Responses:
    """What ranks and driver have of a step's responses."""

    inputs: AdvantageInputs
    mask: np.ndarray  # bool [tokens]: trained
    penalties: np.ndarray | None  # [tokens]


def inputs(scores, groups, by_std=True, lengths=None, mask=None, token_penalties=None, **more) -> Responses:
    """Responses of the given lengths, one token each unless told, all of them trained on."""
    lengths = np.ones(len(scores), int) if lengths is None else np.asarray(lengths)
    sums = None if token_penalties is None else row_sums(token_penalties, lengths)
    given = AdvantageInputs(np.asarray(scores, float), np.asarray(groups), lengths, by_std, penalties=sums, **more)
    return Responses(given, np.ones(lengths.sum(), bool) if mask is None else mask, token_penalties)


def compute_advantages(estimator, responses: Responses) -> np.ndarray:
    """As a step does it: by response, then by token on two replicas that have every other row."""
    lengths = responses.inputs.lengths
    replicas = [np.arange(first, len(lengths), 2) for first in (0, 1)]
    advantages = response_advantages(estimator, responses.inputs)
    if estimator in WHITENED:
        advantages = whitened(advantages, _moments(advantages, responses, replicas))
    out = np.full(int(lengths.sum()), np.nan, np.float32)
    for rows in replicas:
        at = positions(lengths, rows)
        penalties = None if responses.penalties is None else responses.penalties[at]
        out[at] = advantages.rows(rows).of_tokens(lengths[rows], responses.mask[at], penalties)
    return out


def _moments(advantages: TokenAdvantages, responses: Responses, replicas: list[np.ndarray]) -> RowValues:
    lengths, found = responses.inputs.lengths, []
    for rows in replicas:
        at = positions(lengths, rows)
        values = advantages.rows(rows).values(
            lengths[rows], None if responses.penalties is None else responses.penalties[at]
        )
        found.append(moments(values, responses.mask[at], lengths[rows]))
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


def per_response(estimator, scores, groups, by_std=True, **more):
    return ADVANTAGE_FUNCTIONS[estimator](inputs(scores, groups, by_std, **more).inputs)


def mismatch(rollout, actor, lengths):
    return mismatch_metrics(mismatch_of_rows(rollout, actor, lengths))


def grpo(scores, groups, by_std=True):
    return per_response("grpo", scores, groups, by_std)


def test_every_advantage_in_the_table_has_an_implementation():
    assert set(ADVANTAGE_FUNCTIONS) == set(ADVANTAGES)


def test_grpo_worked_by_hand():
    """Scores 1, 0, 0, 1: mean 1/2, unbiased variance 4 x 1/4 / 3 = 1/3."""
    std = math.sqrt(1 / 3)
    expected = np.array([0.5, -0.5, -0.5, 0.5]) / (std + 1e-6)
    np.testing.assert_allclose(grpo(np.array([1.0, 0, 0, 1]), np.zeros(4)), expected, rtol=1e-14)


def test_dr_grpo_subtracts_the_mean_and_divides_by_nothing():
    np.testing.assert_allclose(grpo(np.array([3.0, 1, 2, 6]), np.array([7, 7, 9, 9]), False), [1, -1, -2, 2])


def test_groups_do_not_see_each_other_and_may_be_interleaved():
    rng = np.random.default_rng(0)
    scores, groups = rng.normal(size=12), np.array([5, 2, 5, 9, 2, 9, 5, 2, 9, 5, 2, 9])
    together = grpo(scores, groups)
    for group in (2, 5, 9):
        alone = scores[groups == group]
        np.testing.assert_allclose(
            together[groups == group], (alone - alone.mean()) / (alone.std(ddof=1) + 1e-6), rtol=1e-12
        )


@pytest.mark.parametrize("score", [0.0, 1.0, 0.1, 1e9 + 0.1])
@pytest.mark.parametrize("normalised", [True, False])
def test_equal_scores_give_exactly_zero(score, normalised):
    assert (grpo(np.full(7, score), np.zeros(7), normalised) == 0.0).all()


def test_a_group_of_one_keeps_its_score_as_in_verl():
    np.testing.assert_allclose(grpo(np.array([2.0]), np.array([3])), [2.0 / (1 + 1e-6)], rtol=1e-14)
    np.testing.assert_allclose(grpo(np.array([2.0]), np.array([3]), False), [2.0])


def test_a_responses_advantage_stands_on_its_trained_tokens_only():
    two = inputs([1.0, 0.0], [0, 0], lengths=[2, 2], by_std=False)
    out = compute_advantages("grpo", replace(two, mask=np.array([True, True, True, False])))
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, [0.5, 0.5, -0.5, 0.0])
    with pytest.raises(ConfigError, match="grpo"):
        compute_advantages("nope", two)


def test_rloo_compares_with_the_mean_of_the_others():
    """Scores 3, 1, 2: others' means 1.5, 2.5, 2. A second group 4, 6."""
    np.testing.assert_allclose(per_response("rloo", [3.0, 1, 4, 2, 6], [0, 0, 1, 0, 1]), [1.5, -1.5, -2.0, 0.0, 2.0])


def test_opo_weighs_the_baseline_by_length():
    """Scores 1, 0 of lengths 3, 1: baseline 3/4. Scores 2, 5 of no tokens at all: their plain mean."""
    found = per_response("opo", [1.0, 0, 2, 5], [0, 0, 1, 1], lengths=[3, 1, 0, 0])
    np.testing.assert_allclose(found, [0.25, -0.75, -1.5, 1.5])


def test_pass_at_k_pays_the_best_its_lead_over_the_second():
    """Scores 1, 4, 2 (std sqrt(7/3)) and a tie 3, 3, 0, which pays nobody."""
    scores, groups = [1.0, 4, 2, 3, 3, 0], [0, 0, 0, 1, 1, 1]
    np.testing.assert_allclose(per_response("grpo_passk", scores, groups, by_std=False), [0, 2, 0, 0, 0, 0])
    np.testing.assert_allclose(per_response("grpo_passk", scores, groups)[1], 2 / (math.sqrt(7 / 3) + 1e-6))


def test_reinforce_plus_plus_whitens_over_tokens():
    """Scores 1 and 0 of lengths 3 and 1: four tokens 1, 1, 1, 0 with mean 3/4 and unbiased variance 1/4."""
    found = compute_advantages("reinforce_plus_plus", inputs([1.0, 0.0], [0, 1], lengths=[3, 1]))
    np.testing.assert_allclose(found, [0.5, 0.5, 0.5, -1.5], atol=1e-6)


def test_reinforce_plus_plus_with_kl_in_the_reward_sums_what_is_still_to_come():
    """Score 1, penalties 0.1, 0.2, 0.3: returns 0.4, 0.5, 0.7.

    The second response: 0 - 0.5. Mean 0.275, squares sum 0.7875.
    """
    penalties = np.array([0.1, 0.2, 0.3, 0.5])
    found = compute_advantages(
        "reinforce_plus_plus", inputs([1.0, 0.0], [0, 1], lengths=[3, 1], token_penalties=penalties)
    )
    returns = np.array([0.4, 0.5, 0.7, -0.5])
    std = math.sqrt(((returns - 0.275) ** 2).sum() / 3)
    np.testing.assert_allclose(found, [0.125 / std, 0.225 / std, 0.425 / std, -0.775 / std], rtol=1e-6)


def test_outcome_estimators_take_all_of_a_responses_kl_off_its_score():
    penalties = np.array([0.1, 0.2, 0.5])
    np.testing.assert_allclose(
        per_response("grpo", [1.0, 0.0], [0, 0], by_std=False, lengths=[2, 1], token_penalties=penalties), [0.6, -0.6]
    )


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "grpo_passk", "opo"])
def test_a_rejected_response_keeps_its_penalties_and_its_length_in_the_baseline(estimator):
    """What stays is trained on with the advantage that it has where nothing is rejected."""
    full = inputs([1.0, 0.0, 0.5], [0, 0, 0], lengths=[2, 1, 3], token_penalties=np.full(6, 0.25))
    kept = np.repeat([True, True, False], [2, 1, 3])
    found = compute_advantages(estimator, replace(full, mask=kept))
    np.testing.assert_array_equal(found, np.where(kept, compute_advantages(estimator, full), 0.0))


def test_opo_weighs_a_rejected_response_by_its_generated_length():
    """Scores 1 and 0 of lengths 1 and 3, the second rejected: baseline (1 x 1 + 3 x 0) / 4, so 3/4 for the first."""
    full = inputs([1.0, 0.0], [0, 0], lengths=[1, 3])
    found = compute_advantages("opo", replace(full, mask=np.repeat([True, False], [1, 3])))
    np.testing.assert_allclose(found, [0.75, 0, 0, 0])


def test_a_rejected_token_still_costs_what_comes_before_it():
    """Score 1, penalties 0.1, 0.2, 0.3, the last token rejected: returns 0.4 and 0.5, whitened to -/+ 1/sqrt(2)."""
    full = inputs([1.0], [0], lengths=[3], token_penalties=np.array([0.1, 0.2, 0.3]))
    found = compute_advantages("reinforce_plus_plus", replace(full, mask=np.array([True, True, False])))
    np.testing.assert_allclose(found, [-math.sqrt(0.5), math.sqrt(0.5), 0], rtol=1e-5)
    alone = inputs([0.0, 1.0], [0, 1], lengths=[1, 2], token_penalties=np.array([0.0, 0.0, 1.0]))
    found = compute_advantages("reinforce_plus_plus", replace(alone, mask=np.array([True, True, False])))
    # 1 less the penalty of the rejected token is 0, as the other response has
    np.testing.assert_array_equal(found, 0.0)


def test_the_baseline_form_subtracts_the_group_and_whitens_over_tokens():
    """Centred 1, -1 on lengths 1, 3: tokens 1, -1, -1, -1 with mean -1/2 and unbiased variance 1."""
    found = compute_advantages("reinforce_plus_plus_baseline", inputs([2.0, 0.0], [0, 0], lengths=[1, 3]))
    np.testing.assert_allclose(found, [1.5, -0.5, -0.5, -0.5], atol=1e-6)


def test_gdpo_normalises_each_part_before_they_are_added():
    """Two parts whose sums are alike (1 + 0 and 0 + 1) and would give 0: correctness weighs 2, format 1,
    so they do not.
    """
    parts = {"correct": np.array([1.0, 0.0]), "format": np.array([0.0, 1.0])}
    found = compute_advantages(
        "gdpo", inputs([1.0, 1.0], [0, 0], by_std=False, parts=parts, part_weights={"correct": 2.0})
    )
    # 0.5 and -0.5, unbiased variance 1/2
    np.testing.assert_allclose(found, [1 / math.sqrt(2), -1 / math.sqrt(2)], rtol=1e-6)
    with pytest.raises(DataError, match="gdpo_reward_keys"):
        compute_advantages("gdpo", inputs([1.0], [0]))


def test_gdpo_worked_by_hand_with_groups_lengths_and_stds():
    """Group 0 has correct 1, 0 and group 1 has 3, 1: both +-1/sqrt 2 after their stds 1/sqrt 2 and sqrt 2.

    Format 0, 1 and 2, 2 gives -+1/sqrt 2 and 0, with weight 2: sums -c, +c, +c, -c with c = 1/sqrt 2. Lengths 1, 2, 1,
    2: tokens -c, c, c, c, -c, -c have mean 0 and unbiased variance 6 c^2 / 5 = 3/5, so all are +-sqrt(5/6).
    """
    parts = {"correct": np.array([1.0, 0, 3, 1]), "format": np.array([0.0, 1, 2, 2])}
    given = inputs([9.0] * 4, [0, 0, 1, 1], lengths=[1, 2, 1, 2], parts=parts, part_weights={"format": 2.0})
    value = math.sqrt(5 / 6)
    np.testing.assert_allclose(
        compute_advantages("gdpo", given), [-value, value, value, value, -value, -value], rtol=3e-6
    )


def test_gdpo_of_one_part_is_whitened_grpo():
    rng = np.random.default_rng(0)
    scores, groups = rng.normal(size=12), np.repeat([0, 1, 2], 4)
    found = compute_advantages("gdpo", inputs(scores, groups, parts={"score": scores}))
    plain = grpo(scores, groups)
    np.testing.assert_allclose(found, (plain - plain.mean()) / plain.std(ddof=1), rtol=1e-5, atol=1e-6)


RAGGED = [7, 7, 7, 8, 9, 9]  # a group that lost a response, and a group of one


@pytest.mark.parametrize("estimator", ADVANTAGES)
@pytest.mark.parametrize("scores", [[1.0, 0, 1, 1, 0, 1], [0.0] * 6, [1.0] * 6, [1e9, 1e9, 1e9, -1e9, 0, 0]])
@pytest.mark.parametrize("lengths", [[3, 1, 2, 4, 1, 1], [1, 0, 0, 0, 0, 0], [0] * 6])
def test_no_estimator_gives_a_nan_whatever_the_groups_are(estimator, scores, lengths):
    if estimator == "maxrl":
        scores = np.abs(scores)  # it refuses others
    parts = {"score": np.array(scores)}
    found = compute_advantages(estimator, inputs(scores, RAGGED, lengths=lengths, parts=parts))
    assert found.shape == (sum(lengths),) and np.isfinite(found).all()


@pytest.mark.parametrize("estimator", [name for name in ADVANTAGES if name != "reinforce_plus_plus"])
@pytest.mark.parametrize("score", [0.0, 0.1, 1e9 + 0.1])
def test_groups_of_one_mind_teach_nothing_under_any_group_estimator(estimator, score):
    scores = np.full(6, score)
    assert not compute_advantages(
        estimator, inputs(scores, [0, 0, 0, 1, 1, 1], lengths=[1, 2, 3, 4, 5, 6], parts={"score": scores})
    ).any()


@pytest.mark.parametrize("lengths", [[10, 7, 3], [49, 1, 50]])  # of 100 tokens no mean of these is the value itself
@pytest.mark.parametrize("value", [0.1, -0.7, 1 / 3])
def test_equal_scores_are_whitened_to_exactly_zero_however_their_mean_rounds(value, lengths):
    given = inputs([value] * 3, [0, 1, 2], lengths=lengths)
    assert (compute_advantages("reinforce_plus_plus", given) == 0).all()


def test_a_group_of_one_under_the_whitened_estimators():
    """Scores 1 and 0 of a pair and 2 alone: centred 1/2, -1/2 and 2, as its baseline is 0; mean 2/3,
    squares sum 4.5 - 4/3 = 19/6.
    """
    std = math.sqrt(19 / 12)
    expected = [(0.5 - 2 / 3) / std, (-0.5 - 2 / 3) / std, (2 - 2 / 3) / std]
    np.testing.assert_allclose(
        compute_advantages("reinforce_plus_plus_baseline", inputs([1.0, 0, 2], [0, 0, 1])), expected, rtol=1e-6
    )
    plain = [0.0, -1.0, 1.0]  # scores 1, 0, 2 less their mean, over their std of 1
    np.testing.assert_allclose(
        compute_advantages("reinforce_plus_plus", inputs([1.0, 0, 2], [0, 0, 1])), plain, atol=1e-7
    )


@pytest.mark.parametrize(("estimator", "advantage"), [("rloo", 2.0), ("opo", 2.0), ("grpo_passk", 0.0)])
def test_a_group_of_one_has_no_baseline_and_no_lead(estimator, advantage):
    assert per_response(estimator, [2.0], [0]) == [advantage]


def test_mismatch_worked_by_hand():
    """Probabilities 0.5 against 0.25 and 0.2 against 0.4."""
    metrics = mismatch(np.log([0.5, 0.2]), np.log([0.25, 0.4]), np.array([2]))
    log2 = math.log(2)
    expected = {
        "training/rollout_probs_diff_mean": 0.225,
        "training/rollout_probs_diff_max": 0.25,
        "training/rollout_probs_diff_std": 0.05 / math.sqrt(2),
        "training/rollout_log_probs_abs_diff_mean": log2,
        "training/rollout_log_probs_abs_diff_max": log2,
        "training/rollout_actor_probs_pearson_corr": -1.0,
        "rollout_corr/kl": 0.0,
        "rollout_corr/k3_kl": ((0.5 + log2 - 1) + (2 - log2 - 1)) / 2,
        "rollout_corr/chi2_token": (0.25 + 4) / 2 - 1,
        "rollout_corr/chi2_seq": 0.0,  # the two ratios 1/2 and 2 cancel
        "rollout_corr/training_ppl": 1 / math.sqrt(0.25 * 0.4),
        "rollout_corr/rollout_ppl": 1 / math.sqrt(0.5 * 0.2),
        "rollout_corr/ppl_ratio": 1.0,
        "rollout_corr/log_ppl_diff": 0.0,
        "rollout_corr/log_ppl_abs_diff": 0.0,
    }
    assert metrics == pytest.approx(expected, abs=1e-12)
    assert all(metric_spec(name) for name in metrics)


def test_equal_log_probs_have_no_mismatch():
    log_probs = -np.random.default_rng(0).random(12)
    metrics = mismatch(log_probs, log_probs, np.array([4, 4, 4]))
    assert metrics.pop("training/rollout_actor_probs_pearson_corr") == pytest.approx(1.0)
    assert metrics.pop("rollout_corr/ppl_ratio") == 1.0
    assert metrics.pop("rollout_corr/training_ppl") == metrics.pop("rollout_corr/rollout_ppl") > 1.0
    assert set(metrics.values()) == {0.0}


def test_perplexities_are_means_over_responses_and_empty_ones_do_not_count():
    """One response of ratio 2 in one token, one of ratio 1/2 and 1/2 in two; the third is empty."""
    found = mismatch(np.log([0.4, 0.5, 0.5]), np.log([0.8, 0.25, 0.25]), np.array([1, 2, 0]))
    assert found["rollout_corr/training_ppl"] == pytest.approx((1 / 0.8 + 4) / 2)
    assert found["rollout_corr/rollout_ppl"] == pytest.approx((1 / 0.4 + 2) / 2)
    assert found["rollout_corr/log_ppl_diff"] == pytest.approx((-math.log(2) + math.log(2)) / 2)
    assert found["rollout_corr/log_ppl_abs_diff"] == pytest.approx(math.log(2))
    assert found["rollout_corr/ppl_ratio"] == pytest.approx((0.5 + 2) / 2)
    assert found["rollout_corr/chi2_seq"] == pytest.approx((4 + 1 / 16) / 2 - 1)


def test_one_token_and_no_token_give_finite_answers():
    one, none = np.array([-1.0]), np.zeros(0)
    assert all(math.isfinite(v) for v in mismatch(one, one, np.array([1])).values())
    assert mismatch(none, none, np.array([0])) == {}


def test_a_log_prob_that_is_not_finite_stops_the_run_and_says_where():
    with pytest.raises(NumericAbort, match=r"old_log_probs.*row 3, token 1"):
        mismatch(np.zeros(4), np.array([-1.0, -1.0, -1.0, np.nan]), np.array([2, 0, 2]))


def test_maxrl_is_the_gradient_of_a_likelihood_by_all_outcomes():
    """The mean over all outcomes of N Bernoulli responses is the gradient of sum(pass@k / k), k below N (theorem 2).

    With p = sigmoid(x), d pass@k / dx = k (1 - p)^(k - 1) p (1 - p), and d log P(y) / dx = y - p. The theorem has k up
    to N without a baseline; a group without success, which has no baseline either, takes the last term away.
    """
    for count, p in itertools.product((1, 2, 4, 7), (0.05, 0.3, 0.9)):
        found = 0.0
        for outcome in itertools.product((0.0, 1.0), repeat=count):
            scores = np.array(outcome)
            weight = float(np.prod(np.where(scores == 1, p, 1 - p)))
            made = response_advantages("maxrl", one_group(scores)).per_response
            found += weight * float((made * (scores - p)).mean())
        order = max(count - 1, 1)
        expected = sum((1 - p) ** (k - 1) * p * (1 - p) for k in range(1, order + 1))
        assert found == pytest.approx(expected, rel=1e-12)


def test_maxrl_worked_by_hand():
    """One success of four weighs three times as much as each failure, and a group without any has no advantage."""
    made = response_advantages("maxrl", one_group(np.array([1.0, 0, 0, 0]))).per_response
    assert made.tolist() == [3.0, -1.0, -1.0, -1.0]
    for equal in ([0.0, 0.0], [0.3, 0.3]):
        assert not response_advantages("maxrl", one_group(np.array(equal))).per_response.any()
    with pytest.raises(DataError, match="a score is -1: it needs rewards that are at least 0"):
        response_advantages("maxrl", one_group(np.array([1.0, -1.0])))


def one_group(scores: np.ndarray) -> AdvantageInputs:
    """One group."""
    return AdvantageInputs(scores, np.zeros(len(scores), np.int64), np.full(len(scores), 3))
