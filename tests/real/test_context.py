"""Megatron's update of responses with context in between: what stands at context changes no bit of a weight."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ranks import run_ranks
from tiny_models import save, tiny_moe

from mrl.data.batch import TrainBatch
from mrl.data.samples import Sample, packed

pytestmark = pytest.mark.real

ROWS = 8
CASES = {
    "tensor and expert parallel": ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}, {}),
    "context parallel, on policy": ({"context_parallel_size": 2}, {"anchor": "on_policy"}),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, list[dict]]:
    out = tmp_path_factory.mktemp("context")
    path, cases = save(tiny_moe(), out / "model"), []
    for name, (degrees, algorithm) in CASES.items():
        batch = _batch(on_policy=bool(algorithm))
        np.savez(out / f"{len(cases)}.npz", **batch.arrays)
        config = _config(str(path), degrees, algorithm)
        cases.append({"name": name, "config": config, "batch": str(out / f"{len(cases)}.npz")})
    (out / "cases.json").write_text(json.dumps(cases))
    run_ranks(Path(__file__).with_name("context_worker.py"), 2, out, [str(out / "cases.json")])
    return {name: [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in (0, 1)] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_what_stands_at_context_changes_no_bit_and_one_token_that_is_let_in_does(reports, name):
    for report in reports[name]:
        assert report["same"] == {"plain": True, "noise": True, "nan": True, "let in": False}
        assert report["noise"] == report["plain"] == report["nan"]


@pytest.mark.parametrize("name", CASES)
def test_log_probs_are_those_of_the_whole_row_and_entropy_counts_what_was_sampled(reports, name):
    found = [report for report in reports[name] if "counted" in report]
    assert found and sum(report["counted"] for report in found) == int(_batch(False).sampled.sum())
    for report in found:
        assert report["log_prob_error"] < 1e-5 and report["counted"] == report["sampled"]
        assert report["entropy_apart"] > 1.0


def test_on_policy_the_updates_own_log_probs_are_those_of_what_was_sampled(reports):
    found = [report["plain"]["old"] for report in reports["context parallel, on policy"]]
    assert sorted(found) == [[], [int(_batch(True).sampled.sum())]]


def _batch(on_policy: bool) -> TrainBatch:
    rng, samples = np.random.default_rng(7), []
    for i in range(ROWS):
        sampled = [turn % 2 == 0 for turn in range(1 + 2 * (i % 3)) for _ in range(int(rng.integers(1, 6)))]
        ids = rng.integers(1, 127, 4 + len(sampled)).tolist()
        log_probs = np.where(sampled, -4.0 - rng.random(len(sampled)), 0.0)
        samples.append(Sample(i, i, i, 0, ids[:4], ids[4:], log_probs, "stop", 0, sampled=sampled))
    batch = TrainBatch.of(packed(samples), 1.0)
    tokens = len(batch.rollout_log_probs)
    advantages = np.where(batch.sampled, np.repeat(rng.choice([-1.0, 1.0], ROWS), batch.response_lengths), 0.0)
    batch = replace(batch, advantages=advantages.astype(np.float32), loss_weights=np.ones(tokens, np.float32))
    if on_policy:
        return batch
    return replace(batch, old_log_probs=np.where(batch.sampled, -4.5, 0.0).astype(np.float32))


def _config(path: str, degrees: dict, algorithm: dict) -> dict:
    return {
        "model": {"path": path, "dtype": "float32"},
        "actor": {
            "layout": {"world_size": 2, **degrees},
            "optim": {"lr": 1e-3},
            "ppo_mini_batch_size": ROWS,
            "ppo_micro_batch_size_per_gpu": 3,
            "use_remove_padding": True,
        },
        "rollout": {"n": 1},
        "algorithm": algorithm,
        "data": {"train_batch_size": ROWS},
        "cluster": {"device": "cpu", "step_timeout_s": 300},
    }
