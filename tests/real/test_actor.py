"""What the actor promises beside parity: bad gradients change nothing, equal inputs give equal bits,
16-bit weights train.
"""

import json

import numpy as np
import pytest
from padded import collate
from ranks import ROOT, run_ranks
from tiny_models import save, tiny_moe

from mrl.data.samples import Sample

pytestmark = pytest.mark.real

ROWS = 12


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    """What each of two ranks saw, rank 0 first; rank 0 is the one that hands out results."""
    out = tmp_path_factory.mktemp("actor")
    model = save(tiny_moe(), out / "moe")
    np.savez(out / "batch.npz", **_batch())
    plan = {
        "batch": str(out / "batch.npz"),
        "configs": {dtype: _config(str(model), dtype) for dtype in ("float32", "bfloat16")}
        | {"16-bit gradients": _config(str(model), "bfloat16", {"grad_reduce_in_fp32": False})},
    }
    (out / "plan.json").write_text(json.dumps(plan))
    run_ranks(ROOT / "tests/real/actor_worker.py", 2, out, [str(out / "plan.json")])
    return [json.loads((out / f"report-{rank}.json").read_text()) for rank in range(2)]


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(reports):
    assert [report["unchanged"] for report in reports] == [True, True]
    assert [part["actor/skipped_updates"] for part in reports[0]["skipped"]] == [[1.0, 1.0]]
    assert "actor/grad_norm" not in reports[0]["skipped"][0]


def test_a_rank_says_what_it_computes_with(reports):
    experts = "experts TEGroupedMLP of GroupedLinear"  # Megatron's experts, over mrl's product
    assert {report["kernels"] for report in reports} == {
        f"layers of torch, attention CausalAttention, {experts}, norm Norm, optimizer AdamW of torch"
    }


def test_only_one_rank_of_a_replica_hands_out_metrics(reports):
    assert [len(report["skipped"]) for report in reports] == [1, 0]


@pytest.mark.parametrize("what", ["log_probs_repeat", "updates_repeat", "weights_repeat"])
def test_equal_inputs_give_equal_bits_and_a_skipped_update_leaves_no_trace(what, reports):
    assert [report[what] for report in reports] == [True, True]


def test_sixteen_bit_weights_load_rounded_train_and_export_in_their_own_dtype(reports):
    for report in reports:
        assert report["bfloat16_dtypes"] == ["torch.bfloat16"]
        assert report["bfloat16_loads_rounded_weights"]
        assert report["bfloat16_moved"]
    assert reports[0]["bfloat16_log_prob_error"] < 0.1
    assert reports[0]["bfloat16_update"][0]["actor/skipped_updates"] == [0.0, 1.0]


def test_log_probs_are_computed_as_in_evaluation_and_updates_as_in_training(reports):
    for report in reports:
        assert report["trains_while_scoring"] == [False] and report["trains_while_updating"] == [True]


def test_gradients_in_sixteen_bits_train_as_those_in_float32_but_for_their_rounding(reports):
    """bfloat16 has 8 bits, and a rank sums three micro-batches: the norms of such sums agree to a few 2**-9."""
    for report in reports:
        assert report["coarse_buffers"] == ["torch.bfloat16"] and report["coarse_moved"]
    (usual,), (coarse,) = reports[0]["bfloat16_update"], reports[0]["coarse_update"]
    assert coarse["actor/skipped_updates"] == [0.0, 1.0]
    assert coarse["actor/grad_norm"] != usual["actor/grad_norm"]
    assert coarse["actor/grad_norm"] == pytest.approx(usual["actor/grad_norm"], rel=2**-7)


def _batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    samples = []
    for i in range(ROWS):
        prompt, response = (tuple(rng.integers(1, 127, n).tolist()) for n in rng.integers(2, 12, 2))
        samples.append(Sample(i, i, i, 0, prompt, response, (0.0,) * len(response), "stop", 0))
    batch = collate(samples, 1.0, 0)
    advantages = np.where(batch.response_mask, rng.normal(size=(ROWS, 1)), 0).astype(np.float32)
    return batch.arrays | {
        "old_log_probs": np.where(batch.response_mask, -4.0, 0).astype(np.float32),
        "advantages": advantages,
    }


def _config(path: str, dtype: str, ddp: dict | None = None) -> dict:
    layout = {"world_size": 2, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    return {
        "model": {"path": path, "dtype": dtype},
        "actor": {
            "layout": layout,
            "optim": {"lr": 1e-2},
            "override_ddp_config": ddp or {},
            "ppo_mini_batch_size": ROWS,
            "ppo_micro_batch_size_per_gpu": 5,
        },
        "rollout": {"n": 1},
        "algorithm": {
            "policy_loss": {"loss_mode": "vanilla", "clip_ratio_low": 0.9, "clip_ratio_high": 1e6, "clip_ratio_c": 1e6}
        },
        "data": {"train_batch_size": ROWS},
        "cluster": {"device": "cpu", "step_timeout_s": 300},
    }
