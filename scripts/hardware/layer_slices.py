"""MFU of the update and of a pass of log-probs, on as many layers of Qwen3-30B-A3B as one device holds.

One rank of the real actor (Megatron's layers, the distributed optimizer, packed sequences of mixed lengths), weights as
they are at a model's birth. FLOPs are those of the sequences as they are, with the experts that a token is sent to; a
layer that is computed twice counts once. The ceiling is a large matrix product of the same run. Half the layers are
measured too: their difference extrapolates to all 48, which stands beside what `mrl plan` predicts of one device that
held them. On a CPU all sizes are small, and only that it runs is worth something.
"""

import gc
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MODEL = "Qwen3-30B-A3B"
SMALL = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096,
    "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4,
}  # fmt: skip
# bytes a weight: itself, its gradient, master weight and two moments; torch's AdamW has another copy of its shard
_STATE_BYTES = {"transformer_engine": 18, "torch": 22}
_ROOM = 0.8  # of the device; the rest is activations
# overrides of Megatron's config that presets for NVIDIA devices share: parallel_configs/base/device
FUSED = {"apply_rope_fusion": True, "moe_permute_fusion": True}
_PASSES = 3  # a forward and its backward, of which each costs two


@dataclass(frozen=True)
class Slice:
    """What is measured. `layers`: an even number; None: as many as fit."""

    tokens: int  # of a micro-batch
    layers: int | None = None
    experts: int | None = None  # of a layer on this device; None: all; 16 are those of EP8
    micro_batches: int = 4
    lora: int = 0  # rank of adapters, which are trained alone; 0: all weights
    one_sequence: bool = False  # a micro-batch is one sequence


def measure(device: str, options: Slice) -> dict[str, Any]:
    """The figures of a slice."""
    from mrl.platforms import get_platform
    from mrl.platforms.layers import layers

    platform, kind = get_platform(device), "torch"
    if device != "cpu":
        platform.set_device(0)
        kind = layers()
    config = sizes(device)
    if options.experts:
        config["num_experts"] = options.experts
    depth = options.layers or fitting_layers(device, config, kind)
    runs = {n: _Run(platform, config, n, options) for n in dict.fromkeys((max(depth // 2, 1), depth))}
    found = {n: run.times() for n, run in runs.items()}
    return _report(platform, runs[depth], found) | {"layers_computed": depth, "tokens": options.tokens}


def sizes(device: str) -> dict[str, Any]:
    """config.json of the model, on a CPU of its small sibling."""
    from mrl.model.registry import known_hf_config

    return dict(known_hf_config(MODEL)) | (SMALL if device == "cpu" else {})


def fitting_layers(device: str, config: dict[str, Any], kind: str) -> int:
    """The even number of layers whose states fill no more than _ROOM of the device; 2 on a CPU."""
    import torch

    from mrl.model import model_spec, parameter_count

    if device == "cpu":
        return 2
    free = getattr(torch, device).mem_get_info()[0] * _ROOM
    none, one = (parameter_count(model_spec(config | {"num_hidden_layers": n})) for n in (1, 2))
    layer = one - none
    room = free / _STATE_BYTES[kind] - (none - layer)
    return max(2, min(int(room // layer) // 2 * 2, config["num_hidden_layers"]))


class _Run:
    """One depth."""

    def __init__(self, platform: Any, config: dict[str, Any], layers: int, options: Slice) -> None:
        self.platform, self.layers, self.options = platform, layers, options
        self.config = config | {"num_hidden_layers": layers}
        parts = (1,) if options.one_sequence else (4, 4, 8, 8, 16, 16, 16, 16)
        self.batch = _batch([options.tokens // part for part in parts] * options.micro_batches, config["vocab_size"])

    def times(self) -> dict[str, float]:
        """Seconds of an update and of a pass of log-probs, and GiB at most; the model is gone afterwards."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.config))
            found = self._measured(_actor(Path(folder), self))
        gc.collect()
        self.platform.release_cache()
        return found

    def _measured(self, actor: Any) -> dict[str, float]:
        self.kernels = actor.kernels()
        actor.update(self.batch)  # warms up; optimizer states come into being
        self.platform.reset_peak_memory()
        update = self._seconds(lambda: actor.update(self.batch))
        memory = self.platform.max_memory_allocated_gb()
        scored = self._seconds(lambda: actor.log_probs(self.batch))
        actor.close()
        return {"update": update, "log_prob": scored, "memory": memory}

    def _seconds(self, run: Any) -> float:
        times = []
        for _ in range(3):
            self.platform.synchronize()
            began = time.perf_counter()
            run()
            self.platform.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times)


def _batch(sequences: list[int], words: int) -> Any:
    """Sequences of these lengths, a third of each its prompt. Quarters, eighths and sixteenths of a micro-batch are
    mixed, and they fill it.
    """
    import numpy as np

    from mrl.data.batch import TrainBatch

    lengths = np.array(sequences)
    prompts, rng = lengths // 3, np.random.default_rng(0)
    responses, rows = lengths - prompts, len(lengths)
    flat = np.full(int(responses.sum()), -8.0, np.float32)
    return TrainBatch(
        prompt_lengths=prompts, response_lengths=responses, temperature=np.ones(rows, np.float32),
        token_ids=rng.integers(1, words, int(lengths.sum())).astype(np.int32), rollout_log_probs=flat,
        old_log_probs=flat.copy(),
        advantages=np.repeat(rng.random(rows, np.float32), responses),
    )  # fmt: skip


def _actor(folder: Path, run: _Run) -> Any:
    """Of one rank. No weights are loaded: what a product costs does not depend on them."""
    from mrl.config.schema import RunConfig
    from mrl.platforms import prepare_process
    from mrl.process.free_ports import free_port

    rows, layout = len(run.batch), {"world_size": 1, "tensor_model_parallel_size": 1, "sequence_parallel": False}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    overrides = prepare_process(run.platform.name, layout, recompute | of_presets(run.platform.name))
    dtype = "float32" if run.platform.name == "cpu" else "bfloat16"
    config = RunConfig.model_validate({
        "model": {"path": str(folder), "dtype": dtype, "allow_torch_layers": True,
                  "override_transformer_config": overrides},
        "actor": {"layout": layout, "optim": {"lr": 1e-6}, "ppo_mini_batch_size": rows, "use_dynamic_bsz": True,
                  "ppo_max_token_len_per_gpu": run.options.tokens, "lora": {"rank": run.options.lora}},
        "rollout": {"n": 1}, "data": {"train_batch_size": rows}, "cluster": {"device": run.platform.name},
    })  # fmt: skip
    from mrl.rank import actor as module

    class Unloaded(module.MBridge):
        def load_hf(self, path: str) -> None:
            """Weights stay as Megatron makes them."""

    module.MBridge = Unloaded
    return module.MegatronActor(config, 0, 1, "127.0.0.1", free_port())


def of_presets(device: str) -> dict[str, bool]:
    """FUSED where the device and its layers have these kernels."""
    from mrl.platforms.layers import layers

    return FUSED if device == "cuda" and layers() == "transformer_engine" else {}


def _report(platform: Any, run: _Run, found: dict[int, dict[str, float]]) -> dict[str, Any]:
    import torch

    from mrl.model import forward_flops, model_spec
    from mrl.plan.devices import published_flops
    from mrl.platforms.speed import product_rate

    dtype, name = torch.float32 if platform.name == "cpu" else torch.bfloat16, platform.device_name()
    ceiling, published = product_rate(platform, dtype), published_flops(platform.device_name())
    lengths, predicted = run.batch.lengths.tolist(), int(run.batch.response_lengths.sum())
    forward = forward_flops(model_spec(run.config), lengths, predicted)
    seconds, peak, tokens = found[run.layers], published or ceiling, sum(lengths)
    return {
        "device": name, "kernels": run.kernels, "recompute": "full", "sequences": len(lengths),
        "tokens_per_s": tokens / seconds["update"], "mfu": _PASSES * forward / seconds["update"] / peak,
        "share_of_ceiling": _PASSES * forward / seconds["update"] / ceiling, "ceiling_tflops": ceiling / 1e12,
        "published_tflops": published and published / 1e12, "update_s": seconds["update"],
        "log_prob_s": seconds["log_prob"], "log_prob_tokens_per_s": tokens / seconds["log_prob"],
        "log_prob_mfu": forward / seconds["log_prob"] / peak, "memory_gib": seconds["memory"],
    } | _extrapolated(run, found, peak)  # fmt: skip


def _extrapolated(run: _Run, found: dict[int, dict[str, float]], peak: float) -> dict[str, float]:
    """An update of all 48 layers from two depths, and what `mrl plan` predicts of it: FLOPs at the share that it
    assumes.
    """
    from mrl.model import forward_flops, model_spec
    from mrl.model.registry import known_hf_config
    from mrl.plan.activations import Recompute
    from mrl.plan.devices import USUAL
    from mrl.plan.times import update_passes

    if len(found) < 2:
        return {}
    (few, less), (many, more) = found.items()
    layer = (more["update"] - less["update"]) / (many - few)
    whole = known_hf_config(MODEL)["num_hidden_layers"]
    spec = replace(model_spec(run.config), num_layers=whole, moe_layers=tuple(range(whole)))
    forward = forward_flops(spec, run.batch.lengths.tolist(), int(run.batch.response_lengths.sum()))
    passes = update_passes(Recompute("full")).compute
    measured = more["update"] + (whole - many) * layer
    planned = passes * forward / (peak * USUAL.compute_share)
    return {
        "layer_s": layer,
        "update_of_48_layers_s": measured,
        "planned_of_48_layers_s": planned,
        "measured_over_planned": measured / planned,
    }
