"""Whole updates of a slice of a real model: MFU beside the ceiling of the same run (scripts/bench/actor.py)."""

import argparse
import os
import time

from checks import Figures, Machine, actor_bench, check

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


def _measured(machine: Machine, experts: int | None, layers: int | None = None, tokens: int | None = None) -> Figures:
    options = {"device": machine.device, "layers": layers, "tokens": tokens, "micro_batches": 4, "recompute": "full",
               "experts": experts}  # fmt: skip
    return actor_bench().measure(argparse.Namespace(**options))
