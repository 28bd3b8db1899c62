"""Whole updates of a slice of a real model: MFU beside the ceiling of the same run (scripts/bench/actor.py)."""

import argparse
import importlib.util
import sys

from checks import ROOT, Figures, Machine, check


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
    spec = importlib.util.spec_from_file_location("bench_actor", ROOT / "scripts" / "bench" / "actor.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    options = {"device": machine.device, "layers": None, "tokens": None, "micro_batches": 4, "recompute": "full",
               "experts": experts}  # fmt: skip
    return module.measure(argparse.Namespace(**options))
