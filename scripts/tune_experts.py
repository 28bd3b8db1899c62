#!/usr/bin/env python
"""Tunes vLLM's kernel of fused experts for the engines of a configuration, on one device of yours.

    python scripts/tune_experts.py CONFIG [--set KEY=VALUE ...] --out FOLDER     some ten minutes

It writes the file that vLLM looks for (E=16,N=768,device_name=NVIDIA_H200.json). Then set `rollout.tuned_experts:
FOLDER`. For each number of tokens it begins with vLLM's default and changes one value after the other, as long as the
layer gets faster; results that differ from the default's are not taken. vLLM's own benchmarks/kernels/benchmark_moe.py,
which is in no wheel, tries all combinations in hours.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.config.load import load_config
from mrl.errors import ConfigError, EnvironmentFault, MrlError
from mrl.model import planning_model_spec
from mrl.platforms.tuned_experts import shape_of_worker
from mrl.whole_file import appears_whole

Config = dict[str, int]
Timer = Callable[[Config, int], float]  # seconds of the layer with a configuration, for so many tokens

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)  # vLLM's own grid
VALUES = {
    "BLOCK_SIZE_M": (16, 32, 64, 128),
    "BLOCK_SIZE_N": (32, 64, 128, 256),
    "BLOCK_SIZE_K": (64, 128, 256),
    "GROUP_SIZE_M": (1, 16, 32, 64),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
}
_USUAL = {"num_warps": 4, "num_stages": 3, "SPLIT_K": 1}  # where vLLM's default leaves them to Triton
_GAIN = 0.98  # seconds that count as faster, over the best so far


@dataclass(frozen=True)
class Layer:
    """The experts of one worker of an engine."""

    experts: int
    width: int  # inner, of each
    hidden: int
    chosen: int  # experts of a token
    total: int  # experts of all workers


def layer_of(config: Any, model: Any) -> Layer:
    """Returns the layer that engines of a configuration compute. Raises ConfigError where there is none to tune."""
    rollout = config.rollout
    if not model.is_moe:
        raise ConfigError("model.path: is dense, so there are no experts to tune a kernel for")
    if config.cluster.device != "cuda":
        raise ConfigError(f"cluster.device: {config.cluster.device} has no such kernel; it is NVIDIA's alone")
    if rollout.quantization is not None:
        raise ConfigError("rollout.quantization: only engines in 16 bits are tuned here; leave it out")
    shape = shape_of_worker(
        model.num_experts, model.moe_intermediate_size, rollout.expert_parallel_size, rollout.workers_per_engine
    )
    return Layer(*shape, model.hidden_size, model.num_experts_per_tok, model.num_experts)


def tuned(start: Callable[[int], Config], timer: Timer, tokens: tuple[int, ...] = TOKENS) -> dict[str, Config]:
    """Returns the fastest configuration that is found for each number of tokens.

    `start` gives the one to begin with. Each number also tries what was best for the one before it.
    """
    found: dict[str, Config] = {}
    best: Config = {}
    for number in tokens:
        first = _USUAL | start(number)
        starts = [first, *([best] if best else [])]
        best = min(starts, key=lambda config: timer(config, number))
        best = _descended(best, lambda config, number=number: timer(config, number))
        found[str(number)] = best
        print(
            f"{number} tokens: {timer(first, number) / timer(best, number):.2f} times as fast as the default",
            flush=True,
        )
    return found


def _descended(config: Config, seconds: Callable[[Config], float]) -> Config:
    """Changes one value after the other until nothing gets faster."""
    least, changed = seconds(config), True
    while changed:
        changed = False
        for candidate in _neighbours(config):
            took = seconds(candidate)
            if took < _GAIN * least:
                config, least, changed = candidate, took, True
    return config


def _neighbours(config: Config) -> Iterator[Config]:
    for name, values in VALUES.items():
        for value in values:
            if value != config[name]:
                yield config | {name: value}


def timer_of(layer: Layer) -> Timer:
    """Returns a timer of vLLM's own fused_experts on this device; a configuration that fails takes forever."""
    import torch
    from vllm.model_executor.layers.fused_moe import override_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts, get_default_config

    noise = torch.Generator("cuda").manual_seed(0)
    drawn = {"device": "cuda", "generator": noise}
    w1 = torch.randn(layer.experts, 2 * layer.width, layer.hidden, **drawn).mul_(layer.hidden**-0.5).bfloat16()
    w2 = torch.randn(layer.experts, layer.hidden, layer.width, **drawn).mul_(layer.width**-0.5).bfloat16()
    local = torch.full((layer.total,), -1, dtype=torch.int32, device="cuda")
    local[: layer.experts] = torch.arange(layer.experts, device="cuda")
    known: dict[tuple[Any, ...], float] = {}

    def call(config: Config, number: int) -> Callable[[], Any]:
        noise.manual_seed(number)
        x = torch.randn(number, layer.hidden, **drawn).bfloat16()
        ids = torch.rand(number, layer.total, **drawn).topk(layer.chosen).indices.int()
        weights = torch.full((number, layer.chosen), 1 / layer.chosen, device="cuda")
        given = {"global_num_experts": layer.total, "expert_map": local if layer.total > layer.experts else None}

        def compute() -> Any:
            with override_config(config):
                return fused_experts(x, w1, w2, weights, ids, **given)

        return compute

    def seconds(config: Config, number: int) -> float:
        key = (number, *sorted(config.items()))
        if key not in known:
            default = get_default_config(number, layer.experts, layer.width, layer.hidden, layer.chosen, None)
            known[key] = _measured(call(config, number), call(_USUAL | default, number))
        return known[key]

    return seconds


def _measured(compute: Callable[[], Any], reference: Callable[[], Any], repeats: int = 20) -> float:
    """Returns the least seconds of a call; infinity where it fails, or gives something else than the reference."""
    import torch

    try:
        if not torch.allclose(compute().float(), reference().float(), rtol=2e-2, atol=2e-2):
            return float("inf")
        for _ in range(3):
            compute()
        times = []
        for _ in range(repeats):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            compute()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) / 1e3)
    except Exception:  # Triton's own errors: too much shared memory, too many registers
        return float("inf")
    return min(times)


def written(folder: Path, name: str, found: dict[str, Config]) -> Path:
    """Writes the file as vLLM reads it, or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    with appears_whole(path) as work:
        work.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return path


def main() -> None:
    """Prints what was gained for each number of tokens, and the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args()
    try:
        config = load_config(options.config, overrides=options.set).config
        layer = layer_of(config, planning_model_spec(config.model.path)[0])
        import torch

        if not torch.cuda.is_available():
            raise EnvironmentFault("torch sees no CUDA device here: run this on a node with the devices of the engines")
        from vllm.model_executor.layers.fused_moe import fused_moe

        name = fused_moe.get_config_file_name(layer.experts, layer.width, None)

        def start(number: int) -> Config:
            return fused_moe.get_default_config(number, layer.experts, layer.width, layer.hidden, layer.chosen, None)

        path = written(options.out, name, tuned(start, timer_of(layer)))
    except MrlError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    print(f"{path}\nset rollout.tuned_experts: {options.out.absolute()}")


if __name__ == "__main__":
    main()
