"""Whole updates of a slice of a real model: MFU beside the ceiling of the same run (scripts/bench/actor.py)."""

import argparse

from checks import Figures, Machine, actor_bench, check


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


def _measured(machine: Machine, experts: int | None) -> Figures:
    options = {"device": machine.device, "layers": None, "tokens": None, "micro_batches": 4, "recompute": "full",
               "experts": experts}  # fmt: skip
    return actor_bench().measure(argparse.Namespace(**options))
