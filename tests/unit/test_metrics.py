"""Metrics: what is declared, how parts are reduced, what is read off a batch."""

import ast
import math
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from test_house import the_house

from mrl.algo.rows import moments
from mrl.config.load import load_config
from mrl.data.samples import Sample, SampleRows, packed
from mrl.driver.reporting import time_metrics
from mrl.record.metrics import (
    GeneratingTime,
    PhaseTimer,
    advantage_metrics,
    distribution,
    length_metrics,
    reduce_parts,
    reward_metrics,
    seqlen_metrics,
    speed_metrics,
)
from mrl.record.spec import TABLE, Kind, all_metrics, metric_spec

VERL_NAMES = """
training/global_step training/epoch train/num_gen_batches
critic/score/mean critic/score/max critic/score/min critic/rewards/mean critic/advantages/min critic/returns/max
actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/entropy actor/kl_loss actor/kl_coef
actor/grad_norm actor/lr
response_length/mean response_length/max response_length/min response_length/clip_ratio prompt_length/clip_ratio
global_seqlen/balanced_max
timing_s/gen timing_s/reshard timing_s/reward timing_s/old_log_prob timing_s/ref timing_s/adv timing_s/update_actor
timing_s/save_checkpoint
timing_s/testing timing_s/step timing_per_token_ms/gen timing_per_token_ms/update_actor
perf/total_num_tokens perf/time_per_step perf/throughput perf/max_memory_allocated_gb perf/max_memory_reserved_gb
perf/cpu_memory_used_gb
perf/mfu/actor training/rollout_probs_diff_mean training/rollout_probs_diff_max training/rollout_probs_diff_std
training/rollout_actor_probs_pearson_corr rollout_corr/kl rollout_corr/k3_kl rollout_corr/chi2_token
val-core/openai/gsm8k/reward/mean@1
"""


def test_every_metric_name_that_verl_dashboards_use_is_declared():
    for name in VERL_NAMES.split():
        metric_spec(name)


def test_a_name_is_declared_once_and_no_reading_stands_for_nothing():
    written = re.findall(r"^([^ #].*?): \{", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    declared = {spec.name: spec for spec in all_metrics()}
    assert len(written) == len(set(written))
    families = set(written) - declared.keys()
    for family in families:
        assert family.endswith(("/", "_"))
        assert any(spec.reading for name, spec in declared.items() if name.startswith(family))
    assert all(spec.kind in get_args(Kind) and spec.unit and spec.summary for spec in declared.values())


def test_a_family_lends_its_reading_to_those_that_have_none():
    assert metric_spec("response_length/max").reading == metric_spec("response_length/min").reading != ""
    assert metric_spec("response_length/clip_ratio").reading.startswith("Above 0.1")
    assert metric_spec("prompt_length/max").reading == ""


def test_an_undeclared_name_is_refused_with_the_nearest_ones():
    with pytest.raises(KeyError, match="actor/grad_norm"):
        metric_spec("actor/gradnorm")


def test_every_metric_that_the_code_names_is_declared():
    name = re.compile(
        r"(actor|critic|perf|reshard|reward|rollout_corr|router|timing_s|train|training|val-core)/[a-z0-9_/@]+"
    )
    declared = {spec.name for spec in all_metrics()}
    for nodes in the_house().nodes.values():
        for node in nodes:
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if name.fullmatch(text) and f"{text}/mean" not in declared:  # else the prefix of a distribution
                metric_spec(text)


def test_a_pattern_does_not_cover_its_bare_prefix():
    with pytest.raises(KeyError):
        metric_spec("val-core/")


def test_a_mean_weighs_its_parts():
    # three tokens at mean 2 on one rank, one token at 10 on the other: (3 * 2 + 10) / 4
    assert reduce_parts([{"actor/entropy": (6.0, 3.0)}, {"actor/entropy": (10.0, 1.0)}]) == {"actor/entropy": 4.0}


def test_a_mean_of_nothing_is_left_out():
    assert reduce_parts([{"actor/entropy": (0.0, 0.0)}]) == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("actor/skipped_updates", 6.0),
        ("timing_s/gen", 3.0),
        ("reshard/verified", 1.0),
        ("actor/lr", 2.0),
        ("actor/pg_loss", 2.0),
    ],
)
def test_each_kind_reduces_in_its_own_way(name, expected):
    assert reduce_parts([{name: (1.0, 1)}, {name: (3.0, 1)}, {name: (2.0, 1)}])[name] == expected


def test_parts_of_a_mean_give_the_same_however_they_are_cut():
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=12), rng.integers(1, 9, 12)
    whole = float((values * weights).sum() / weights.sum())
    for cuts in ([4, 8], [1, 2, 11], []):
        pieces = zip(np.split(values, cuts), np.split(weights, cuts), strict=True)
        parts = [{"actor/ppo_kl": (float((v * w).sum()), float(w.sum()))} for v, w in pieces]
        assert reduce_parts(parts)["actor/ppo_kl"] == pytest.approx(whole, rel=1e-12)


def test_a_nan_on_any_rank_is_seen_in_the_extremes():
    parts = [{"training/rollout_probs_diff_max": (math.nan, 1)}, {"training/rollout_probs_diff_max": (0.5, 1)}]
    assert math.isnan(reduce_parts(parts)["training/rollout_probs_diff_max"])
    assert math.isnan(reduce_parts(parts[::-1])["training/rollout_probs_diff_max"])


def test_the_moments_of_the_sequence_ratio_become_its_standard_deviation():
    ratios = [0.5, -0.5, 1.0, -1.0]  # mean 0, second moment 0.625
    parts = [{"actor/log_seq_ratio_mean": (r, 1.0), "actor/log_seq_ratio_square_mean": (r * r, 1.0)} for r in ratios]
    assert reduce_parts(parts) == {
        "actor/log_seq_ratio_mean": 0.0,
        "actor/log_seq_ratio_std": pytest.approx(0.625**0.5),
    }


def test_a_distribution_of_nothing_is_nothing():
    assert distribution("critic/score", []) == {}


def _rows() -> SampleRows:
    """Prompts of 2 and 3 tokens, responses of 3 and 1."""
    made = [Sample(0, 0, i, 0, [1] * p, [1] * r, [0.0] * r, "stop", 0) for i, (p, r) in enumerate([(2, 3), (3, 1)])]
    return packed(made).numbers


def test_lengths_are_read_off_the_rows():
    metrics = length_metrics(_rows(), max_prompt_length=4, max_response_length=3)
    assert metrics["response_length/mean"] == 2.0
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["prompt_length/clip_ratio"] == 0.0


def test_advantages_are_those_of_trained_tokens():
    """Of the first response all three tokens with advantage 1, of the second the first alone, with -3."""
    values, mask = np.array([1.0, 1.0, 1.0, -3.0, 99.0]), np.array([True, True, True, True, False])
    metrics = advantage_metrics(moments(values, mask, np.array([3, 2])))
    assert metrics["critic/advantages/mean"] == 0.0  # (1 + 1 + 1 - 3) / 4
    assert metrics["critic/advantages/max"] == 1.0
    assert metrics["critic/returns/min"] == -3.0
    assert advantage_metrics(moments(values, np.zeros(5, bool), np.array([3, 2]))) == {}


def test_scores_and_rewards_differ_by_the_penalty():
    metrics = reward_metrics(np.array([1.0, 0.0]), np.array([0.5, 0.0]))
    assert (metrics["critic/score/mean"], metrics["critic/rewards/mean"]) == (0.5, 0.25)


def test_generation_time_is_per_response_token_and_update_time_per_token():
    metrics = speed_metrics(_rows(), {"gen": 2.0, "update_actor": 0.9, "step": 3.0}, devices=3)
    assert metrics["timing_per_token_ms/gen"] == 500.0  # 2 s over 4 response tokens
    assert metrics["timing_per_token_ms/update_actor"] == pytest.approx(100.0)  # 0.9 s over all 9
    assert metrics["perf/throughput"] == 1.0  # 9 tokens in 3 s on 3 devices
    assert metrics["perf/total_num_tokens"] == 9.0


def test_a_wait_for_engines_that_work_beside_training_is_no_time_of_generation():
    generating = GeneratingTime()
    for generates, tokens, now in [
        (True, 0, 10.0),
        (True, 3, 12.0),
        (False, 1, 13.0),
        (False, 0, 50.0),
        (True, 0, 60.0),
        (True, 4, 61.0),
    ]:
        generating.note(generates, tokens, now)
    assert generating.metrics() == {"timing_per_token_ms/gen": 500.0}  # 2 + 1 + 1 seconds for 8 tokens
    assert generating.metrics() == {}
    config = load_config("parallel_configs/tiny-moe/cpu.yaml", None, ["trainer.schedule=one_step_off"]).config
    timer = PhaseTimer(iter((0.0, 1.0)).__next__)
    with timer("gen"):
        pass
    said = time_metrics(config.trainer, 2, timer, SimpleNamespace(made=_rows()))
    assert said["timing_s/gen"] == 1.0 and "timing_per_token_ms/gen" not in said


def test_loads_of_data_parallel_ranks_in_order_and_as_trained():
    lengths = np.array([8, 6, 3, 1])
    metrics = seqlen_metrics(lengths, [9, 9])
    assert (metrics["global_seqlen/max"], metrics["global_seqlen/min"], metrics["global_seqlen/minmax_diff"]) == (
        14.0,
        4.0,
        10.0,
    )
    assert (
        metrics["global_seqlen/balanced_max"],
        metrics["global_seqlen/balanced_min"],
        metrics["global_seqlen/mean"],
    ) == (9.0, 9.0, 9.0)


def test_everything_computed_here_is_declared():
    computed = length_metrics(_rows(), 4, 3) | reward_metrics(np.ones(2), np.ones(2)) | seqlen_metrics(np.ones(2), [2])
    computed |= speed_metrics(
        _rows(), dict.fromkeys(("gen", "ref", "old_log_prob", "adv", "update_actor", "step"), 1.0), 1
    )
    for name in computed:
        metric_spec(name)


def test_a_phase_is_timed_also_when_it_raises_and_adds_up():
    ticks = iter([0.0, 1.0, 10.0, 12.5])
    timer = PhaseTimer(clock=lambda: next(ticks))
    with timer("gen"):
        pass
    with pytest.raises(RuntimeError), timer("gen"):
        raise RuntimeError
    assert timer.seconds == {"gen": 3.5}
    assert timer.metrics() == {"timing_s/gen": 3.5}


def test_what_of_a_step_no_phase_counts_is_a_number_too():
    """A step from 0 to 10 with phases from 1 to 4 and from 5 to 9."""
    ticks = iter([0.0, 1.0, 4.0, 5.0, 9.0, 10.0])
    timer = PhaseTimer(clock=lambda: next(ticks))
    with timer("step"):
        for phase in ("gen", "update_actor"):
            with timer(phase):
                pass
    assert timer.metrics()["timing_s/outside"] == 3.0
    phases = {name: value for name, value in timer.metrics().items() if name != "timing_s/step"}
    assert sum(phases.values()) == timer.metrics()["timing_s/step"]


def test_phases_nest():
    ticks = iter([0.0, 1.0, 3.0, 7.0])
    timer = PhaseTimer(clock=lambda: next(ticks))
    with timer("step"), timer("gen"):
        pass
    assert dict(timer.seconds) == {"gen": 2.0, "step": 7.0}


def test_the_record_needs_no_torch(tmp_path):
    code = f"""
import sys
from pathlib import Path
import mrl.record.metrics, mrl.record.run_dir, mrl.record.sinks
mrl.record.sinks.TensorBoardSink(Path({str(tmp_path)!r})).close()
sys.exit("torch" in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
