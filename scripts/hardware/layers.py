"""Megatron's layers on one rank: Transformer Engine's and plain ones against Hugging Face's, offload, equal bits."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

from checks import Figures, Machine, Skip, Wrong, check, expect

ROWS = 12
# mean difference of a log-prob, and of a gradient by its norm, from float32 Hugging Face
_BOUNDS = (1e-5, 1e-4)
# in bfloat16 times what Hugging Face in bfloat16 is off by itself, by kind of weight: a rounded router sends tokens to
# other experts, so that one expert by itself says little
_TIMES = 2.0
_LENGTH = 0.1  # share by which the length of all gradients together may be off, which shows a wrong factor


_NO_CLIP = {"clip_ratio_low": 0.9, "clip_ratio_high": 1e6, "clip_ratio_c": 1e6}


@check()
def plain_layers(machine: Machine) -> Figures:
    """mrl's layers in plain torch against Hugging Face's: log-probs and gradients of packed sequences, with experts and
    a router in float32."""
    return _of_layers(machine, "torch")


@check()
def transformer_engine_layers(machine: Machine) -> Figures:
    """The same with the layers that an accelerator's row brings."""
    from importlib.util import find_spec

    if find_spec("transformer_engine") is None and machine.device != "npu":
        raise Skip("no Transformer Engine: scripts/install.sh cuda compiles it")
    machine.needs_accelerator("Transformer Engine")
    return _of_layers(machine, "transformer_engine")


@check(limit_s=120)
def wide_heads(machine: Machine) -> Figures:
    """The same of packed attention with heads of 256, and with latent attention (192 of queries, 128 of values), by the
    layers that are there; for grouped products in one kernel too.
    """
    from importlib.util import find_spec

    layers = "transformer_engine" if not machine.small and find_spec("transformer_engine") else "torch"
    forms = [("head_256", "wide", {}), ("latent", "latent", {})]
    if layers != "torch":  # whose products know nothing of it
        forms.append(("cutlass", "", {CUTLASS: "1"}))
    found: Figures = {}
    for name, kind, own in forms:
        of_kind = _of_layers(machine, layers, kind, own)
        found |= machine.part({f"{name}_{key}": value for key, value in of_kind.items()})
    return found


def _of_layers(machine: Machine, layers: str, kind: str = "", environment: dict[str, str] | None = None) -> Figures:
    """In a process of its own: what Megatron found at its import stays."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, machine.device, layers, folder, kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=machine.limit_s, check=False,
                              env=os.environ | (environment or {}))  # fmt: skip
        if done.returncode:
            raise Wrong(f"{layers}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    bounds = dict(zip(("log_prob_error", "gradient_error"), _BOUNDS, strict=True))
    if found["dtype"] != "float32":
        bounds = {"log_prob_over_hugging_face": _TIMES, "gradient_over_hugging_face": _TIMES}
    for name, bound in bounds.items():
        expect(found[name] < bound, f"{name} of {found['kernels']} is {found[name]:.2g}, more than {bound:.2g}")
    off = abs(found["gradient_length"] - 1)
    expect(
        off < _LENGTH,
        f"gradients of {found['kernels']}, {found['worst_length']}, are as long as {off:.2g} less or more",
    )
    return found


def compare(machine: Machine, layers: str, folder: Path, kind: str = "") -> Figures:
    """Log-probs and gradients of one update against Hugging Face's in float32, on the host."""
    if layers == "torch":
        sys.modules["transformer_engine"] = None  # as where it is not installed
    model = tiny_moe(folder, kind)
    actor = one_rank(machine, folder, DTYPE[machine.small])
    batch = some_batch()
    result = actor.log_probs(batch)
    expected, gradients = _of_hugging_face(model, batch)
    actor.gradients(batch)
    found = exported_gradients(actor)
    errors = _errors(found, gradients)
    worst = max(errors, key=errors.get)  # a router's is the smallest and the first to be lost
    lengths = {kind: _length(found, names) / _length(gradients, names) for kind, names in _kinds(gradients).items()}
    longest = max(lengths, key=lambda kind: abs(lengths[kind] - 1))
    figures = {
        "kernels": actor.kernels(), "dtype": DTYPE[machine.small],
        "log_prob_error": float(abs(result.log_probs - expected[batch.token_indices(result.rows)]).mean()),
        "gradient_error": errors[worst], "worst_gradient": worst,
        "gradient_length": lengths[longest], "worst_length": longest,
    }  # fmt: skip
    if machine.small:
        return figures
    theirs, of_theirs = _of_hugging_face(_in_bfloat16(folder), batch)
    over = {kind: _apart(found, gradients, names) / _apart(of_theirs, gradients, names)
            for kind, names in _kinds(gradients).items()}  # fmt: skip
    kind = max(over, key=over.get)
    their_error = float(abs(theirs - expected).mean())
    return figures | {
        "hugging_face_log_prob_error": their_error,
        "hugging_face_gradient_error": max(_errors(of_theirs, gradients).values()),
        "log_prob_over_hugging_face": figures["log_prob_error"] / their_error,
        "gradient_over_hugging_face": over[kind], "worst_kind": kind,
    }  # fmt: skip


def _in_bfloat16(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def _kinds(gradients: dict[str, Any]) -> dict[str, list[str]]:
    """Names of weights by what is left of them without the numbers of layers and experts."""
    kinds: dict[str, list[str]] = {}
    for name in gradients:
        kinds.setdefault(re.sub(r"\.\d+", "", name), []).append(name)
    return kinds


def _errors(found: dict[str, Any], gradients: dict[str, Any]) -> dict[str, float]:
    return {name: _relative(found[name].float().cpu(), gradient) for name, gradient in gradients.items()}


def _apart(found: dict[str, Any], gradients: dict[str, Any], names: list[str]) -> float:
    return _length({name: found[name].float().cpu() - gradients[name] for name in names}, names)


def _length(gradients: dict[str, Any], names: list[str]) -> float:
    return sum(float(gradients[name].float().norm()) ** 2 for name in names) ** 0.5


DTYPE = {True: "float32", False: "bfloat16"}
LATENT = {
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"  # one kernel for a grouped product


def tiny_moe(folder: Path, kind: str = "") -> Any:
    """A model with experts whose errors show, saved in `folder`: matrices are three times as large as at a model's
    birth. Qwen3-MoE, with `wide` heads, or DeepSeek-V3 for `latent` attention.
    """
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    common = {"vocab_size": 512, "intermediate_size": 256}
    if kind == "latent":
        sizes |= {"num_key_value_heads": 4} | LATENT
        del sizes["head_dim"], experts["num_experts"]
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **experts, **common))
    else:
        if kind == "wide":
            sizes["head_dim"] = 256
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, **common))
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def one_rank(
    machine: Machine, folder: Path, dtype: str, overrides: Figures | None = None, *, layout: Figures | None = None,
    rank: int = 0, port: int | None = None, **actor: Any,
) -> Any:  # fmt: skip
    """An actor's rank with the model in `folder`, alone where no `layout` is given; `overrides`: of Megatron's
    transformer config, `actor`: more of its section. All ranks of a layout meet at `port`.
    """
    from mrl.config.schema import RunConfig
    from mrl.platforms import prepare_process
    from mrl.platforms.hosting import set_rank_defaults
    from mrl.process.free_ports import free_port

    layout = {"world_size": 1, "tensor_model_parallel_size": 1} | (layout or {})
    layout["sequence_parallel"] = layout["tensor_model_parallel_size"] > 1
    config = RunConfig.model_validate({
        "model": {"path": str(folder), "dtype": dtype, "allow_torch_layers": True,
                  "override_transformer_config": overrides or {}},
        "actor": {"layout": layout, "optim": {"lr": 1e-3}, "ppo_mini_batch_size": ROWS,
                  "ppo_micro_batch_size_per_gpu": ROWS} | actor,
        "rollout": {"n": 1},
        "algorithm": {"policy_loss": {"loss_mode": "vanilla", "loss_agg_mode": "token-mean", **_NO_CLIP}},
        "data": {"train_batch_size": ROWS},
        "cluster": {"device": machine.device},
        "trainer": {"deterministic": machine.small},
    })  # fmt: skip
    cuts_layers = max(layout["tensor_model_parallel_size"], layout.get("context_parallel_size", 1)) > 1
    set_rank_defaults(machine.device, cuts_layers, config.model.grouped_gemm)
    prepare_process(machine.device, layout, overrides or {})
    from mrl.rank.actor import MegatronActor

    return MegatronActor(config, rank, layout["world_size"], "127.0.0.1", port or free_port())


def some_batch(rows: int = ROWS, longest: int = 24, words: int = 500) -> Any:
    """Prompts and responses of 2 to `longest` tokens, with positive advantages: of a negative one the clip would take
    the gradient.
    """
    import numpy as np

    from mrl.data.batch import TrainBatch

    rng = np.random.default_rng(0)
    prompts, responses = rng.integers(2, longest, rows), rng.integers(2, longest, rows)
    ones, total = np.ones(rows, np.float32), int(responses.sum())
    return TrainBatch(
        prompt_lengths=prompts, response_lengths=responses, temperature=ones,
        token_ids=rng.integers(1, words, int((prompts + responses).sum())).astype(np.int32),
        rollout_log_probs=np.full(total, -4.0, np.float32), old_log_probs=np.full(total, -6.0, np.float32),
        advantages=np.repeat(rng.random(rows, np.float32), responses),
    )  # fmt: skip


def _of_hugging_face(model: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """Flat log-probs, and gradients of the loss that `one_rank` has: mean over sequences and tokens of -advantage x
    ratio.
    """
    import numpy as np
    import torch

    parts, at, first = [], 0, 0
    sums = [torch.zeros(parameter.shape) for parameter in model.parameters()]
    for prompt, response in zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True):
        last = first + prompt + response
        ids = torch.from_numpy(batch.token_ids[first:last].astype(np.int64))[None]
        logits = model(ids).logits[0, prompt - 1 : -1].float().log_softmax(-1)
        log_probs = logits.gather(-1, ids[0, prompt:, None])[:, 0]
        own = slice(at, at + response)
        ratio = torch.exp(log_probs - torch.from_numpy(batch.old_log_probs[own]))
        loss = -(torch.from_numpy(batch.advantages[own]) * ratio).sum() / len(batch.advantages)
        model.zero_grad()
        loss.backward()
        for total, parameter in zip(sums, model.parameters(), strict=True):
            total += 0.0 if parameter.grad is None else parameter.grad
        parts.append(log_probs.detach().numpy())
        at, first = at + response, last
    return np.concatenate(parts), _as_checkpoint(model, sums)


def _as_checkpoint(model: Any, gradients: list[Any]) -> dict[str, Any]:
    """Gradients under the names that weights have in a file, where transformers writes each expert by itself. Buffers
    have none, as a router's correction.
    """
    import torch
    from safetensors.torch import load_file

    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for parameter, gradient in zip(model.float().parameters(), gradients, strict=True):
            parameter.copy_(gradient)
        model.save_pretrained(folder)
        buffers = {name for name, _ in model.named_buffers()}
        written = load_file(Path(folder) / "model.safetensors")
        return {name: tensor.clone() for name, tensor in written.items() if name not in buffers}


def exported_gradients(actor: Any) -> dict[str, Any]:
    """Whole gradients, on every rank, under Hugging Face's names: they take the weights' place for the length of an
    export.
    """
    import torch

    parameters = [p for chunk in actor.chunks for p in chunk.parameters() if p.requires_grad]
    weights = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for chunk in actor.chunks:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                for bucket in buffer.buckets:
                    _gather_shards(bucket.grad_data, buffer.data_parallel_group)
        for parameter in parameters:
            parameter.copy_(parameter.main_grad)
        found = {name: tensor.clone() for name, tensor in actor.export_hf()}
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)
    return found


def _gather_shards(gradients: Any, group: Any) -> None:
    """The distributed optimizer leaves each rank with its own shard of the summed gradient."""
    import torch.distributed as dist

    shards = list(gradients.chunk(group.size()))
    dist.all_gather(shards, shards[group.rank()].clone(), group=group)


def _relative(found: Any, expected: Any) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))


@check()
def deterministic(machine: Machine) -> Figures:
    """Two updates from the same start, twice: the same bits where `trainer.deterministic` says so."""
    import torch

    from mrl.platforms import get_platform

    get_platform(machine.device).deterministic()
    with tempfile.TemporaryDirectory() as folder:
        tiny_moe(Path(folder))
        runs = []
        for _ in range(2):
            actor = one_rank(machine, Path(folder), DTYPE[machine.small])
            batch = some_batch()
            parts = [actor.update(batch).parts for _ in range(2)]
            runs.append((parts, {name: tensor.clone() for name, tensor in actor.export_hf()}))
            actor.close()
    unlike = [name for name, tensor in runs[0][1].items() if not torch.equal(tensor, runs[1][1][name])]
    expect(
        not unlike and runs[0][0] == runs[1][0], f"two runs from one start differ, first in {unlike[:1] or 'metrics'}"
    )
    return {"tensors": len(runs[0][1]), "updates": 2}


@check()
def offload(machine: Machine) -> Figures:
    """Parameters, gradients and optimizer leave the device and come back: GB/s, and the same weights."""
    import time

    import torch

    with tempfile.TemporaryDirectory() as folder:
        tiny_moe(Path(folder))
        switches = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
        actor = one_rank(machine, Path(folder), DTYPE[machine.small], **switches)
        batch = some_batch()
        actor.update(batch)
        before, kinds, times = _weights(actor), ("parameters", "gradients", "optimizer"), {"off": [], "on": []}
        for _ in range(3):
            for name, run in (("off", actor.offload), ("on", lambda: actor.bring(*kinds))):
                machine.platform.synchronize()
                began = time.perf_counter()
                run()
                machine.platform.synchronize()
                times[name].append(time.perf_counter() - began)
        left = sum(actor.residence.left_bytes.values())
        same = all(torch.equal(a, b) for a, b in zip(before.values(), _weights(actor).values(), strict=True))
    expect(same, "weights that were on the host are not what they were")
    return {"bytes": left, **{f"{name}_gb_per_s": left / min(found) / 1e9 for name, found in times.items()}}


def _weights(actor: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in actor.export_hf()}


if __name__ == "__main__":
    from checks import quiet, say

    quiet()
    say(compare(Machine(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:]))
