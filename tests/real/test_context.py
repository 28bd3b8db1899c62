"""Megatron's update of responses with context in between: what stands at context changes no bit of a weight, and a
response that is cut into branches has the gradient of the whole.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ranks import run_ranks
from tiny_models import save, tiny_moe

from mrl.data.batch import TrainBatch
from mrl.data.samples import Sample, Samples, Turn, packed
from mrl.schedule.branches import Branch, as_one_row

pytestmark = pytest.mark.real

ROWS = 8
SPLIT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
# ranks, degrees and the algorithm's settings
CASES = {
    "tensor, pipeline and expert parallel": (4, SPLIT, {}),
    "context parallel, on policy": (2, {"context_parallel_size": 2}, {"anchor": "on_policy"}),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, list[dict]]:
    out = tmp_path_factory.mktemp("context")
    path = save(tiny_moe(), out / "model")
    found = {}
    for number, (name, (ranks, degrees, algorithm)) in enumerate(CASES.items()):
        folder = out / str(number)
        folder.mkdir()
        batch = _batch(on_policy=bool(algorithm))
        np.savez(folder / "batch.npz", **batch.arrays)
        np.savez(folder / "cut.npz", **_cut(batch).arrays)
        config = _config(str(path), {"world_size": ranks, **degrees}, algorithm)
        (folder / "config.json").write_text(json.dumps(config))
        run_ranks(Path(__file__).with_name("context_worker.py"), ranks, folder, [])
        found[name] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return found


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


@pytest.mark.parametrize("name", CASES)
def test_a_response_as_one_sequence_and_cut_into_branches_has_the_same_gradient(reports, name):
    for report in reports[name]:
        for when in ("before an update", "after an update"):
            found = report[when]
            assert found["gradient_norm"] > 1e-3 and found["cut_gradient_error"] < 1e-6, when
            assert found["blind_gradient_error"] > 1e-3, "branches that are taken for one sequence are seen"


@pytest.mark.parametrize("name", CASES)
def test_an_update_by_branches_is_that_by_whole_responses(reports, name):
    """By the norm of what the optimizer stepped by, and by all that the loss says, ratios that are clipped among it."""
    said = ("actor/grad_norm", "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy")
    compared = set()
    for report in reports[name]:
        for whole, cut in zip(report["plain"]["parts"], report["by branches"], strict=True):
            for key in set(said) & whole.keys():
                assert cut[key] == pytest.approx(whole[key], rel=1e-4, abs=1e-6), key
                compared.add(key)
    assert {"actor/grad_norm", "actor/pg_loss"} <= compared


def test_on_policy_the_updates_own_log_probs_are_those_of_what_was_sampled(reports):
    found = [report["plain"]["old"] for report in reports["context parallel, on policy"]]
    assert sorted(found) == [[], [int(_batch(True).sampled.sum())]]


def _cut(batch: TrainBatch) -> TrainBatch:
    """The same trajectories: after each turn but the last the agent goes back, and on behind it with what it heard."""
    rows = [as_one_row(_branches(sample)) for sample in _samples(np.random.default_rng(7))]
    cut = TrainBatch.of(Samples.joined(rows), 1.0)
    assert cut.branch_counts.tolist() == [1 + i % 3 for i in range(ROWS)]
    values = {}
    for name, column in batch.token_values.items():
        if column is not None:
            values[name] = np.zeros(len(cut.sampled), column.dtype)
            values[name][cut.sampled] = column[batch.sampled]
    return replace(cut, **values)


def _branches(sample: Sample) -> list[Branch]:
    sampled = np.array(sample.sampled)
    starts = np.flatnonzero(sampled & ~np.append(False, sampled[:-1]))
    ends = np.flatnonzero(sampled & ~np.append(sampled[1:], False)) + 1
    found = []
    for number, end in enumerate(ends.tolist()):
        part = {name: getattr(sample, name)[:end] for name in ("response_ids", "rollout_log_probs", "sampled")}
        turns = tuple(Turn(start, "stop") for start in starts[: number + 1].tolist())
        found.append(Branch(packed([replace(sample, **part, turns=turns)]), number))
    return found


def _samples(rng: np.random.Generator) -> list[Sample]:
    samples = []
    for i in range(ROWS):
        sampled = [turn % 2 == 0 for turn in range(1 + 2 * (i % 3)) for _ in range(int(rng.integers(1, 6)))]
        ids = rng.integers(1, 127, 4 + len(sampled)).tolist()
        log_probs = np.where(sampled, -4.0 - rng.random(len(sampled)), 0.0)
        samples.append(Sample(i, i, i, 0, ids[:4], ids[4:], log_probs, "stop", 0, sampled=sampled))
    return samples


def _batch(on_policy: bool) -> TrainBatch:
    rng = np.random.default_rng(7)
    batch = TrainBatch.of(packed(_samples(rng)), 1.0)
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
            "layout": degrees,
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
