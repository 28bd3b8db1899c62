"""The layer that predicts a further token is trained along: its loss and gradients are those of the published equations
over transformers' own layers, however ranks cut it, and the policy's update keeps its bits.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from padded import collate
from predicting_oracle import Oracle
from ranks import ROOT, run_ranks
from tiny_models import save, tiny_glm, tiny_kinds, tiny_kinds_moe, tiny_latent, tiny_next, with_head

from mrl.data.samples import Sample
from mrl.rank.predicting import PredictingLayer

pytestmark = pytest.mark.real

ROWS = 8
WEIGHT = 0.3
CASES = {
    "GLM-4.5": (tiny_glm, 1, {}),
    "DeepSeek-V3": (tiny_latent, 1, {}),
    "Qwen3-Next": (tiny_next, 1, {}),
    "Qwen3.5": (tiny_kinds, 1, {}),
    "Qwen3.5-MoE": (tiny_kinds_moe, 1, {}),
    "tensor and expert ranks": (tiny_glm, 2, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    "stages": (tiny_glm, 2, {"pipeline_model_parallel_size": 2, "pipeline_layers": [4, 0]}),
    "tensor and expert ranks, Qwen3-Next": (
        tiny_next,
        2,
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    ),
    "stages, tied": (tiny_kinds, 2, {"pipeline_model_parallel_size": 2}),
    "replicas": (tiny_latent, 2, {}),
    "context": (tiny_glm, 2, {"context_parallel_size": 2}),
    "all": (
        tiny_glm,
        8,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
    ),
}
QUICK = "stages"  # the first stage's embedding travels, too, and the last stage has no layer of the policy
# beside what the policy does with its own layers: recomputed, and with losses of routers
OVERRIDES = {
    "stages": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
        "moe_z_loss_coeff": 1e-3,
        "moe_aux_loss_coeff": 1e-2,
        "moe_router_load_balancing_type": "aux_loss",
    },
}


@pytest.fixture(scope="module", params=[pytest.param(n, marks=[] if n == QUICK else pytest.mark.long) for n in CASES])
def case(request, tmp_path_factory) -> dict:
    build, ranks, layout = CASES[request.param]
    out = tmp_path_factory.mktemp("predicting")
    model = build()
    path = with_head(save(model, out / "model"), uneven=True)
    batch = _batch()
    np.savez(out / "batch.npz", **batch)
    configs = {
        name: _config(path, ranks, layout, trained, OVERRIDES.get(request.param, {}))
        for name, trained in {"without": None, "synced": False, "trained": True}.items()
    }
    plan = {"batch": str(out / "batch.npz"), "configs": configs, "gradients_of": "trained", "updates": 2}
    (out / "plan.json").write_text(json.dumps(plan))
    run_ranks(ROOT / "tests/real/predicting_worker.py", ranks, out, [str(out / "plan.json")])
    reports = [json.loads((out / f"report-{rank}.json").read_text()) for rank in range(ranks)]
    return {"out": out, "reports": reports, "model": model, "path": path, "batch": batch}


def test_loss_and_gradients_are_those_of_the_equations(case):
    loss, tokens, gradients = _oracle(case["model"], case["path"], case["batch"])
    of_ranks = [report["loss"] for report in case["reports"] if "loss" in report]
    by_replica = {tuple(each) for each in of_ranks}  # equal on the ranks of a replica
    assert sum(count for _, count in by_replica) == tokens
    assert sum(value for value, _ in by_replica) == pytest.approx(loss, rel=1e-5)
    found = [np.load(file) for file in sorted(case["out"].glob("gradients-*.npz"))]
    assert set().union(*found) == gradients.keys()
    for name, expected in gradients.items():
        parts = [part[name] for part in found if name in part]
        whole = np.select([~np.isnan(part) for part in parts], parts, np.nan)
        error = np.abs(whole - expected).max()
        # float32's; NaN if no rank has an element
        assert error <= 2e-5 * np.abs(expected).max(), f"{name}: {error} of {np.abs(expected).max()}"


def test_the_policys_update_keeps_its_bits(case):
    for rank in range(len(case["reports"])):
        weights = {name: torch.load(case["out"] / f"{name}-{rank}.pt") for name in ("without", "synced", "trained")}
        plain = weights.pop("without")
        for other in weights.values():
            assert plain.keys() == other.keys() and all(torch.equal(plain[key], other[key]) for key in plain)
    assert all(report["without"] == report["synced"] for report in case["reports"])


def test_the_layer_moves_only_if_it_is_trained_and_says_its_loss(case):
    for report in case["reports"]:
        assert not any(report["synced moved"].values())
        constants = {name for name in report["trained moved"] if name.endswith("expert_bias")}
        assert all(moved == (name not in constants) for name, moved in report["trained moved"].items())
    told = [report for report in case["reports"] if any("actor/mtp_loss" in part for part in report["trained"][0])]
    losses = [[update[0]["actor/mtp_loss"][0] for update in report["trained"]] for report in told]
    assert losses and all(after < before for before, after in losses)
    parts = [part for report in told for part in report["trained"][0]]
    norms = [part["actor/mtp_grad_norm"][0] for part in parts if "actor/mtp_grad_norm" in part]
    assert norms and all(norm > 0 for norm in norms)
    assert not any("actor/mtp_loss" in part for report in case["reports"] for part in report["synced"][0])


def test_a_gradient_that_is_not_finite_leaves_the_layer(case):
    kept = [report["kept"] for report in case["reports"] if "kept" in report]
    assert kept and all(all(of_rank.values()) for of_rank in kept)
    for fused, name in ((False, "grad"), (True, "decoupled_grad")):  # the latter with Adam's master weights elsewhere
        weight = SimpleNamespace(**{name: torch.full((2,), float("nan"))})
        part = SimpleNamespace(
            config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=fused),
            get_parameters=lambda weight=weight: [weight],
            param_groups=[{"lr": 1.0}],
        )
        layer = PredictingLayer.__new__(PredictingLayer)
        layer.optimizer = SimpleNamespace(chained_optimizers=[part], step_with_ready_grads=lambda: None)
        layer.scheduler = SimpleNamespace(step=lambda count: None)
        layer.step(float("nan"), 1.0)
        assert not getattr(weight, name).any() and part.param_groups[0]["lr"] == 0


def _oracle(model, path: Path, batch: dict) -> tuple[float, int, dict[str, np.ndarray]]:
    """Sum of losses, their number, and gradients of the loss, row by row."""
    oracle = Oracle(model, path)
    total, tokens = torch.zeros(()), 0
    for ids, prompt, length in zip(batch["input_ids"], batch["prompt_lengths"], batch["response_lengths"], strict=True):
        ids = torch.tensor(ids[: prompt + length])
        log_probs = oracle.log_probs(ids)
        for place in range(max(prompt, 2), prompt + length):
            total = total - log_probs[place - 2, ids[place]]
            tokens += 1
    count = int(batch["response_lengths"].sum())
    (total * WEIGHT / count).backward()
    gradients = {oracle.prefix + name: t.grad.numpy() for name, t in oracle.stored.items() if t.requires_grad}
    return float(total.detach()), tokens, gradients


def _batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    samples = []
    for i in range(ROWS):
        prompt, response = (tuple(rng.integers(1, 127, n).tolist()) for n in rng.integers(1, 12, 2))
        samples.append(Sample(i, i, i, 0, prompt, response, (0.0,) * len(response), "stop", 0))
    batch = collate(samples, 1.0, 0)
    advantages = np.where(batch.response_mask, rng.normal(size=(ROWS, 1)), 0).astype(np.float32)
    old = np.where(batch.response_mask, -4.0, 0).astype(np.float32)
    return batch.arrays | {"old_log_probs": old, "advantages": advantages}


def _config(path: Path, ranks: int, layout: dict, trained: bool | None, overrides: dict) -> dict:
    """`trained`: None, nobody drafts; False, the layer is only synced."""
    speculation = None if trained is None else {"method": "mtp", "tokens": 2}
    return {
        "model": {"path": str(path), "dtype": "float32", "override_transformer_config": overrides},
        "actor": {
            "layout": {"world_size": ranks, **layout},
            "mtp": {"train": bool(trained), "loss_weight": WEIGHT},
            "optim": {"lr": 1e-3, "clip_grad": 0.5},
            "ppo_mini_batch_size": ROWS,
            "ppo_micro_batch_size_per_gpu": 3,
        },
        "rollout": {"n": 1, "speculation": speculation},
        "algorithm": {
            "policy_loss": {"loss_mode": "vanilla", "clip_ratio_low": 0.9, "clip_ratio_high": 1e6, "clip_ratio_c": 1e6}
        },
        "data": {"train_batch_size": ROWS},
        "cluster": {"device": "cpu", "step_timeout_s": 90},
    }
