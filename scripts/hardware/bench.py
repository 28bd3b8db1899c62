"""Whole updates of a slice of a real model: MFU beside the ceiling of the same run."""

import os
import time
from typing import Any

from checks import ROOT, Figures, Machine, check
from layer_slices import Slice, measure

from mrl.units import GIB

CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"  # one kernel for a grouped product, where its weights are in bfloat16


@check()
def actor(machine: Machine) -> Figures:
    """As many layers of Qwen3-30B-A3B as fit, 8 K tokens packed, with all experts on the device; on the CPU a small
    sibling.
    """
    return _measured(machine, None)


@check()
def actor_of_eight(machine: Machine) -> Figures:
    """The same with 16 experts, as each of eight ranks that share them computes it, without their exchange."""
    machine.needs_accelerator("room for it")
    return _measured(machine, 16)


@check()
def actor_8k(machine: Machine) -> Figures:
    """16 layers of the same, 8 K tokens at a time, with `CUTLASS` as the caller has it."""
    return _by_tokens(machine, 8192)


@check()
def actor_16k(machine: Machine) -> Figures:
    """The same with twice the tokens, which the host launches as fast."""
    return _by_tokens(machine, 16384)


@check()
def actor_32k(machine: Machine) -> Figures:
    """The same with four times the tokens."""
    return _by_tokens(machine, 32768)


@check(limit_s=220)
def lora_of_30b(machine: Machine) -> Figures:
    """All 48 layers of Qwen3-30B-A3B with adapters and random weights, 8 K tokens at a time: tokens a second, and the
    most memory, beside the plan's of one such device.
    """
    layers = machine.size(48, 2, "layers")
    found = machine.part(_measured(machine, None, layers=layers, tokens=machine.size(8192, 512, "tokens"), lora=32))
    if layers == 48:
        found |= _planned(machine.device)
    return found


@check(limit_s=90)
def long_sequence(machine: Machine) -> Figures:
    """One sequence of 128 K tokens through four layers with 16 experts: seconds, and GiB at most."""
    tokens = machine.size(131072, 1024, "long_tokens")
    return _measured(machine, 16, layers=machine.size(4, 2), tokens=tokens, micro_batches=1, one_sequence=True)


def _planned(device: str) -> Figures:
    """GiB at most of an update of the preset for eight devices, cut down to one, without what its engine holds."""
    from mrl.config.load import load_config
    from mrl.model import planning_model_spec
    from mrl.plan.memory import memory_section
    from mrl.plan.plan_inputs import PlanInputs, device_for

    settings = ["actor.layout.world_size=1", "actor.layout.tensor_model_parallel_size=1",
                "actor.layout.expert_model_parallel_size=1", "actor.layout.sequence_parallel=false",
                "cluster.n_gpus_per_node=1", "rollout.expert_parallel_size=1", "rollout.data_parallel_size=1",
                "rollout.tensor_model_parallel_size=1", "rollout.num_engines=1",
                "actor.ppo_max_token_len_per_gpu=8192", "data.max_prompt_length=1024", "data.max_response_length=1024",
                "actor.router_replay=disabled", "model.override_transformer_config.recompute_granularity=full",
                "model.override_transformer_config.recompute_method=uniform",
                "model.override_transformer_config.recompute_num_layers=1"]  # fmt: skip
    config = load_config(ROOT / "parallel_configs" / "qwen3-30b-a3b" / "h200-1x8-lora.yaml", None, settings).config
    model = planning_model_spec(config.model.path)[0]
    terms = memory_section(PlanInputs.of(config, model, device_for(config)))["phases"]["train"]["terms"]
    own = {name: size / GIB for name, size in terms.items() if not name.startswith("engine")}
    return {"planned_gib": sum(own.values()), "planned_terms_gib": own}


def _by_tokens(machine: Machine, tokens: int) -> Figures:
    machine.needs_accelerator("room for it")
    host = {"launch_us": _launch_us(machine.device), "cutlass": os.environ.get(CUTLASS, "0")}
    return host | _measured(machine, 16, layers=16, tokens=tokens)


def _launch_us(device: str) -> float:
    """Returns the host's microseconds for the smallest kernel."""
    import torch

    one = torch.zeros(8, device=device)
    launches = 20_000
    one.add_(1)
    began = time.perf_counter()
    for _ in range(launches):
        one.add_(1)
    return (time.perf_counter() - began) / launches * 1e6


def _measured(
    machine: Machine, experts: int | None, layers: int | None = None, tokens: int | None = None, **more: Any
) -> Figures:
    own = Slice(tokens or machine.size(8192, 512), layers, experts, **more)
    return measure(machine.device, own)
