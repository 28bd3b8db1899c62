"""A real engine takes its weights box by box: bit-equal to a fresh engine and to vLLM's own loader, and every fault is
named.

Each engine starts from one checkpoint (that is a fresh engine), is synced to another and back, and must then hold and
say the same bits.
"""

import json
from pathlib import Path

import pytest
import torch
from deadlines import RUN_S
from engine_driver import run_engine
from safetensors.torch import load_file, save_file
from tiny_models import save, tiny_dense, tiny_moe, tiny_shared

from mrl.model import load_model_spec
from mrl.model.layout import RolloutLayout
from mrl.model.vllm_parameters import target_parameters
from mrl.reshard.digest import MODULUS, partial_digest

EXPERTS, QKV = "model.layers.1.mlp.experts.routed_experts", "model.layers.2.self_attn.qkv_proj"
ONE_RANK = {"world_size": 1}
EIGHT = {
    "world_size": 8,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
}


def checkpoints(folder: Path, model, dtype: torch.dtype) -> tuple[Path, Path]:
    """What the engine starts from, and other weights altogether, with signed zeros,
    which no identity matrix can show.
    """
    start, other = save(model.to(dtype), folder / "start"), save(model, folder / "other")
    noise = torch.Generator().manual_seed(1)
    weights = {
        k: v + torch.randn(v.shape, generator=noise).to(v.dtype)
        for k, v in load_file(start / "model.safetensors").items()
    }
    for tensor in weights.values():
        tensor.view(-1)[3] = -0.0
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    return start, other


def setup_of(folder: Path, dtype: str, train: dict, tensor: int, expert: int) -> dict:
    ranks = [[0, i] for i in range(train["world_size"])]
    return {
        "hf_config": json.loads((folder / "config.json").read_text()), "train": train,
        "rollout": {"num_engines": 1, "tensor": tensor, "data": 1, "expert": expert}, "dialect": "cpu", "dtype": dtype,
        "topology": {"ranks": ranks, "workers": [[0, 100 + i] for i in range(tensor)]},
        "budget_bytes": 1 << 16, "timeout_s": 60.0, "transport": {"kind": "shm"},
    }  # fmt: skip


def run(folder: Path, model: Path, dtype: str, steps: list, tensor: int = 1, expert: int = 1) -> list:
    """What came of each step."""
    arguments = {
        "model": str(model), "dtype": dtype, "tensor_parallel_size": tensor, "enable_expert_parallel": expert > 1,
        "enforce_eager": True,
        "max_model_len": 64, "max_num_batched_tokens": 1024, "max_num_seqs": 16, "enable_chunked_prefill": False,
        "seed": 0,
        "skip_tokenizer_init": True, "generation_config": "vllm", "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
    }  # fmt: skip
    return run_engine("engine_slices.py", folder, {"arguments": arguments, "steps": steps}, tensor, RUN_S)["found"]


def file_digests(folder: Path, dtype: str, tensor: int, expert: int) -> list[dict[str, int]]:
    """Of each worker's parameters, straight from the checkpoint's file."""
    weights = load_file(folder / "model.safetensors")
    layout = RolloutLayout(tensor=tensor, expert=expert)
    found = []
    for worker in range(tensor):
        targets = target_parameters(load_model_spec(folder), layout, worker, "cpu", dtype)
        parts = {
            t.name: [partial_digest(weights[p.hf_name][p.hf_box.slices], p.hf_name, p.hf_box.origin) for p in t.pieces]
            for t in targets
        }
        found.append({name: sum(digests) % MODULUS for name, digests in parts.items()})
    return found


def written(fingerprints: dict[str, str]) -> dict[str, str]:
    """Without what no sync writes: tables computed from the configuration."""
    return {k: v for k, v in fingerprints.items() if "rotary_emb" not in k and not k.endswith("_scale")}


def merged(per_worker: list[dict[str, str]]) -> dict[str, str]:
    return {k: v for one in per_worker for k, v in written(one).items()}


def fingerprints_of(worker: int, parameter: str, known: dict[str, str]) -> set[str]:
    """Names under which a worker tells the parameter's bits; vLLM 0.23 has no `routed_experts`."""
    name = f"rank{worker}.{parameter}"
    found = {name, name.replace(".routed_experts", ""), name.removesuffix(".weight") + ".<packed>"} & known.keys()
    assert found, name
    return found


def shared() -> torch.nn.Module:
    """Two heads, because vLLM's CPU attention has no heads of 16."""
    return tiny_shared(num_attention_heads=2, shared_expert_intermediate_size=128)


CASES = {
    "moe-tp1-fp32": (tiny_moe, "float32", EIGHT, 1, 1),
    "moe-tp2-bf16": (tiny_moe, "bfloat16", ONE_RANK, 2, 1),
    "moe-tp2-ep2-fp32": (tiny_moe, "float32", EIGHT, 2, 2),
    "dense-tied-tp1-bf16": (tiny_dense, "bfloat16", ONE_RANK, 1, 1),
    "shared-bias-tp2-fp32": (shared, "float32", ONE_RANK, 2, 1),
}


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_written_by_boxes_an_engine_equals_a_fresh_one(tmp_path, case):
    build, dtype, train, tensor, expert = CASES[case]
    start, other = checkpoints(tmp_path, build(), getattr(torch, dtype))
    generates = expert == 1  # vLLM's CPU kernel crashes when it generates with expert parallelism
    setup = setup_of(start, dtype, train, tensor, expert)
    say = [["answers"]] if generates else []
    steps = [
        *say, ["weight_fingerprints"], ["use_files", setup],
        ["write", str(other)], ["weight_fingerprints"], *say, ["weight_digests"],
        ["write_slowly", str(other)], ["weight_fingerprints"],
        ["use_files", setup], ["write", str(start)], ["weight_fingerprints"], *say, ["weight_bytes"],
    ]  # fmt: skip
    found = iter(run(tmp_path, start, dtype, steps, tensor, expert))
    fresh_answers = next(found) if generates else None
    fresh, _, reports, held = merged(next(found)), next(found), next(found), merged(next(found))
    other_answers = next(found) if generates else None
    digests, _, slowly = next(found), next(found), merged(next(found))

    for worker, parameters in enumerate(digests):
        same = [name for name in parameters if all(fresh[n] == held[n] for n in fingerprints_of(worker, name, fresh))]
        assert same == [], "every weight must have changed"
    assert held == slowly, "by boxes and by vLLM's own loader"
    assert [r["received"] for r in reports] == file_digests(other, dtype, tensor, expert)
    assert [r["held"] for r in reports] == [r["shown"] for r in reports] == digests
    assert any(r["shown"] != r["received"] for r in reports), "the signed zeros must have been there"

    _, reports, again = next(found), next(found), merged(next(found))
    assert [r["received"] for r in reports] == file_digests(start, dtype, tensor, expert)
    assert again == fresh
    if generates:
        assert next(found) == fresh_answers != other_answers
    size = sum(t.numel() * t.element_size() for t in load_file(start / "model.safetensors").values())
    if tensor == 1:
        assert next(found) == [size]


def wrong_setups(right: dict) -> dict[str, dict]:
    """What an engine is not, by what is wrong of it."""
    config = right["hf_config"]
    return {
        "dtype": right | {"dtype": "bfloat16"},
        "layout": right
        | {
            "rollout": right["rollout"] | {"tensor": 2},
            "topology": right["topology"] | {"workers": [[0, 100], [0, 101]]},
        },
        "experts": right | {"hf_config": config | {"moe_intermediate_size": 32}},
        "layers": right | {"hf_config": config | {"num_hidden_layers": 5}},
        "fewer layers": right | {"hf_config": config | {"num_hidden_layers": 3}},
    }


def check_refusals(told: dict[str, str]) -> None:
    """Of the handshake, by what is wrong."""
    assert "engine 0 worker 0: dtype is float32 in vLLM, bfloat16 in the plan" in told["dtype"]
    assert "tensor_parallel_size is 1 in vLLM, 2 in the plan" in told["layout"]
    assert (
        "model.layers.0.mlp.experts.routed_experts.w13_weight is [8, 128, 64] in vLLM, [8, 64, 64] in the plan"
        in told["experts"]
    )
    assert "vLLM has no model.layers.4.input_layernorm.weight" in told["layers"]
    assert (
        "model.layers.3.input_layernorm.weight is a parameter of vLLM that the plan does not know"
        in told["fewer layers"]
    )
    assert "engine 0 worker 0 plans" in told["hash"] and "the driver as 000000000000" in told["hash"]


@pytest.mark.real
@pytest.mark.long
def test_faults_are_found_and_named(tmp_path):
    start, other = checkpoints(tmp_path, tiny_moe(), torch.float32)
    right = setup_of(start, "float32", ONE_RANK, 1, 1)
    wrong = wrong_setups(right)
    steps = [
        *(["refusal", setup] for setup in wrong.values()), ["refusal", right, "0" * 64], ["weight_fingerprints"],
        ["answers"],
        ["use_files", right], ["loader_refusals"], ["weight_fingerprints"], ["answers"],
        ["write", str(other)], ["flip", EXPERTS], ["flip", QKV], ["weight_digests"],
        ["write", str(start), EXPERTS], ["write", str(start)], ["weight_fingerprints"], ["answers"],
    ]  # fmt: skip
    found = iter(run(tmp_path, start, "float32", steps))
    check_refusals({name: next(found)[0] for name in [*wrong, "hash"]})

    fresh, said, _, refusals, untouched, said_after = (next(found) for _ in range(6))
    assert untouched == fresh and said_after == said, "the handshake leaves the engine as it was"
    assert len(refusals[0]) == 3
    for text, name in zip(refusals[0], ("w13_weight", "qkv_proj.weight", "w2_weight"), strict=True):
        assert name in text and "vLLM's loader does not put" in text

    (report,), (experts,), (qkv,), (digests,) = (next(found) for _ in range(4))
    assert {name for name in digests if digests[name] != report["shown"][name]} == {experts, qkv}

    (refused,), (report,), again, said_again = (next(found) for _ in range(4))
    assert f"the update left 1 of 35 modules incomplete: {EXPERTS}" in refused["error"]
    assert report["held"] == report["shown"] == report["received"]
    assert again == fresh and said_again == said, "after an update that failed, the next one makes the engine whole"
