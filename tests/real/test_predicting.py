"""The layer that predicts a further token is trained along: its loss and gradients are those of the published equations
over transformers' own layers, however ranks cut it, and the policy's update keeps its bits.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from padded import collate
from ranks import ROOT, run_ranks
from safetensors.torch import load_file
from tiny_models import save, tiny_glm, tiny_latent, with_head

from mrl.data.samples import Sample

pytestmark = pytest.mark.real

ROWS = 8
WEIGHT = 0.3
CASES = {
    "GLM-4.5": (tiny_glm, 1, {}),
    "DeepSeek-V3": (tiny_latent, 1, {}),
    "tensor and expert ranks": (tiny_glm, 2, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    "stages": (tiny_glm, 2, {"pipeline_model_parallel_size": 2}),
    "replicas": (tiny_latent, 2, {}),
    "context": (tiny_glm, 2, {"context_parallel_size": 2}),
    "all": (
        tiny_glm,
        8,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
    ),
}
QUICK = ("GLM-4.5", "stages")


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=[] if n in QUICK else pytest.mark.long) for n in CASES]
)
def case(request, tmp_path_factory) -> dict:
    build, ranks, layout = CASES[request.param]
    out = tmp_path_factory.mktemp("predicting")
    model = build()
    path = with_head(save(model, out / "model"), uneven=True)
    batch = _batch()
    np.savez(out / "batch.npz", **batch)
    configs = {
        "without": _config(path, ranks, layout, None),
        "synced": _config(path, ranks, layout, False),
        "trained": _config(path, ranks, layout, True),
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
    norms = [report["trained"][0][0]["actor/mtp_grad_norm"] for report in told if "actor/mtp_grad_norm" in report["trained"][0][0]]
    assert len(norms) == 1 and norms[0][0] > 0
    assert not any("actor/mtp_loss" in part for report in case["reports"] for part in report["synced"][0])


def _oracle(model, path: Path, batch: dict) -> tuple[float, int, dict[str, np.ndarray]]:
    """Sum of losses, their number, and gradients of the loss, by DeepSeek-V3's equations 21 to 25 over transformers'
    layers, row by row.
    """
    stored = {}
    last = model.config.num_hidden_layers
    prefix = f"model.layers.{last}."
    for name, tensor in load_file(path / "model.safetensors").items():
        if name.startswith(prefix) and not name.endswith(("embed_tokens.weight", "shared_head.head.weight")):
            stored[name.removeprefix(prefix)] = tensor.requires_grad_(not name.endswith("correction_bias"))
    layer = model.model.layers[-1]
    eps = model.config.rms_norm_eps

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], stored[name], eps)

    weights = _of_transformers(layer, stored)
    total, tokens = torch.zeros(()), 0
    for ids, prompt, length in zip(batch["input_ids"], batch["prompt_lengths"], batch["response_lengths"], strict=True):
        ids = torch.tensor(ids[: prompt + length])[None]
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state
            follow = model.model.embed_tokens(ids.roll(-1, 1))
            places = torch.arange(ids.shape[1])[None]
            angles = model.model.rotary_emb(hidden, places)
        follow[:, 0] = 0
        follow[:, -1] = 0
        pair = torch.cat([norm(follow, "enorm.weight"), norm(hidden, "hnorm.weight")], -1)
        joined = pair @ stored["eh_proj.weight"].T
        causal = torch.full((ids.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        given = {"attention_mask": causal, "position_embeddings": angles, "position_ids": places}
        out = torch.func.functional_call(layer, weights, (joined,), given)
        out = out[0] if isinstance(out, tuple) else out
        with torch.no_grad():
            head = model.lm_head.weight.clone()
        log_probs = (norm(out, "shared_head.norm.weight") @ head.T).log_softmax(-1)[0]
        for place in range(max(prompt, 2), prompt + length):
            total = total - log_probs[place - 2, ids[0, place]]
            tokens += 1
    count = int(batch["response_lengths"].sum())
    (total * WEIGHT / count).backward()
    gradients = {prefix + name: t.grad.numpy() for name, t in stored.items() if t.requires_grad}
    return float(total.detach()), tokens, gradients


def _of_transformers(layer, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The stored tensors under the names of transformers' layer, which stacks experts."""
    weights = {}
    for name in layer.state_dict():
        if name in stored:
            weights[name] = stored[name]
        elif name.endswith("experts.gate_up_proj"):
            experts = range(layer.state_dict()[name].shape[0])
            rows = [[stored[f"mlp.experts.{e}.{half}_proj.weight"] for half in ("gate", "up")] for e in experts]
            weights[name] = torch.stack([torch.cat(pair) for pair in rows])
        elif name.endswith("experts.down_proj"):
            experts = range(layer.state_dict()[name].shape[0])
            weights[name] = torch.stack([stored[f"mlp.experts.{e}.down_proj.weight"] for e in experts])
        else:
            raise AssertionError(name)
    return weights


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


def _config(path: Path, ranks: int, layout: dict, trained: bool | None) -> dict:
    """`trained`: None, nobody drafts; False, the layer is only synced."""
    speculation = None if trained is None else {"method": "mtp", "tokens": 2}
    return {
        "model": {"path": str(path), "dtype": "float32"},
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
