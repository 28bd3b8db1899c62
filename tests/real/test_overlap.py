"""Gradients that are summed, and weights that are gathered, beside what computes: the same bits as without, over
several micro-batches, mini-batches and updates, and the exchange really is beside.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from padded import collate
from ranks import ROOT, run_ranks
from tiny_models import save, tiny_dense, tiny_moe

from mrl.data.samples import Sample

pytestmark = pytest.mark.real

ROWS, MINI_BATCHES = 16, 2
BUCKET = 20_000  # elements: several buckets of a model this small
OVERLAPS = {
    "at_the_end": {},
    "gradients": {"overlap_grad_reduce": True, "bucket_size": BUCKET},
    "gradients_and_weights": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": BUCKET},
}
STAGES = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# name: model, ranks, layout, transformer's overrides; two replicas each, whose sums do not depend on the buckets
CASES = {
    "moe": (tiny_moe, 2, {}, {}),
    "tied": (tiny_dense, 2, {}, {}),  # embeddings and head are one weight
    "stages": (tiny_moe, 4, STAGES, RECOMPUTED),
}


@pytest.fixture(scope="module", params=["moe", "tied", pytest.param("stages", marks=pytest.mark.long)])
def reports(request, tmp_path_factory) -> list[dict]:
    """What each rank saw, by what is done beside computing."""
    build, ranks, layout, overrides = CASES[request.param]
    out = tmp_path_factory.mktemp("overlap")
    model = save(build(), out / "model")
    np.savez(out / "batch.npz", **_batch())
    configs = {name: _config(model, ranks, layout, overrides, ddp) for name, ddp in OVERLAPS.items()}
    (out / "plan.json").write_text(json.dumps({"batch": str(out / "batch.npz"), "configs": configs}))
    run_ranks(ROOT / "tests/real/overlap_worker.py", ranks, out, [str(out / "plan.json")])
    return [json.loads((out / f"report-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("name", ["gradients", "gradients_and_weights"])
@pytest.mark.parametrize("what", ["log_probs", "weights", "moments", "updates"])
def test_every_bit_is_the_same_as_with_exchanges_at_the_end(reports, name, what):
    assert [report[name][what] for report in reports] == [report["at_the_end"][what] for report in reports]
    assert all(report[name]["updates"] == 2 * MINI_BATCHES for report in reports)


@pytest.mark.parametrize("name", ["gradients", "gradients_and_weights"])
def test_norms_differ_by_the_order_of_their_sums_alone(reports, name):
    """Buckets decide which rank sums which squares; so nothing is clipped here, or every bit would follow."""
    for report in reports:
        assert report[name]["norms"] == pytest.approx(report["at_the_end"]["norms"], rel=1e-6)
    assert len(reports[0][name]["norms"]) in (0, 2 * MINI_BATCHES)  # one rank hands them out, of the last stage
    assert any(report[name]["norms"] for report in reports)


def test_norms_of_replicas_are_those_of_their_own_gradients(reports):
    """Which parameters have at the end of a pass, before two replicas share a sum; over all ranks of a replica."""
    updates = 2 * MINI_BATCHES
    squares = np.zeros((updates, 2))
    for report in reports:
        own = np.reshape(report["at_the_end"]["squares"], (updates, -1)).sum(-1)  # of all chunks of a rank
        squares[:, report["at_the_end"]["replica"]] += own
    (norms,) = [report["at_the_end"]["replica_norms"] for report in reports if report["at_the_end"]["replica_norms"]]
    assert norms == pytest.approx(np.sqrt(squares) / 2, rel=1e-5) and (np.ptp(norms, axis=1) > 1e-3 * norms[0][0]).all()


@pytest.mark.parametrize("name", ["gradients", "gradients_and_weights"])
def test_norms_of_replicas_are_the_same_where_gradients_are_summed_beside_the_backward(reports, name):
    for report in reports:
        alone, beside = (np.array(report[which]["replica_norms"]) for which in ("at_the_end", name))
        assert beside == pytest.approx(alone, rel=1e-5)  # buckets decide the order of float32 sums


def test_gradients_are_under_way_before_the_backward_is_over(reports):
    for report in reports:
        beside, alone = report["gradients"], report["at_the_end"]
        assert set(alone["early"]) == {0}
        assert report["gradients"]["groups"] >= alone["groups"]
        # of the first mini-batch Megatron learns which gradients come; from then on none waits for the end
        chunks = len(beside["early"]) // (2 * MINI_BATCHES)
        assert sum(beside["early"][:chunks]) == 0
        assert {sum(beside["early"][i : i + chunks]) for i in range(chunks, len(beside["early"]), chunks)} == {
            beside["groups"]
        }
    assert reports[0]["gradients"]["groups"] > reports[0]["at_the_end"]["groups"]


def test_weights_are_gathered_by_the_next_forward_and_whole_after_the_last_update(reports):
    for report in reports:
        assert report["gradients_and_weights"]["stale"] == [True] * 2 * MINI_BATCHES
        assert report["gradients"]["stale"] == [False] * 2 * MINI_BATCHES
        assert all(report[name]["whole_after"] for name in OVERLAPS)


def _batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    samples = []
    for i in range(ROWS):
        prompt, response = (tuple(rng.integers(1, 127, n).tolist()) for n in rng.integers(2, 12, 2))
        samples.append(Sample(i, i, i, 0, prompt, response, (0.0,) * len(response), "stop", 0))
    batch = collate(samples, 1.0, 0)
    return batch.arrays | {
        "old_log_probs": np.where(batch.response_mask, -4.0, 0).astype(np.float32),
        "advantages": np.where(batch.response_mask, rng.normal(size=(ROWS, 1)), 0).astype(np.float32),
    }


def _config(model: Path, ranks: int, layout: dict, overrides: dict, ddp: dict) -> dict:
    vanilla = {"loss_mode": "vanilla", "clip_ratio_low": 0.9, "clip_ratio_high": 1e6, "clip_ratio_c": 1e6}
    return {
        "model": {"path": str(model), "dtype": "float32", "override_transformer_config": overrides},
        "actor": {
            "layout": {"world_size": ranks} | layout,
            "optim": {"lr": 1e-2, "clip_grad": 0.0},
            "ppo_mini_batch_size": ROWS // MINI_BATCHES,
            "ppo_micro_batch_size_per_gpu": 2,
            "override_ddp_config": ddp,
        },
        "rollout": {"n": 1},
        "algorithm": {"policy_loss": vanilla},
        "data": {"train_batch_size": ROWS},
        "cluster": {"device": "cpu", "step_timeout_s": 300},
    }
