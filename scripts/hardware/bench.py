"""Whole updates of a slice of a real model: MFU beside the ceiling of the same run (scripts/bench/actor.py)."""

import argparse
import importlib.util
import sys

from checks import ROOT, Figures, Machine, check


@check()
def actor(machine: Machine) -> Figures:
    """As many layers of Qwen3-30B-A3B as fit, 8 K tokens packed; on the CPU a small sibling."""
    spec = importlib.util.spec_from_file_location("bench_actor", ROOT / "scripts" / "bench" / "actor.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    options = {"device": machine.device, "layers": None, "tokens": None, "micro_batches": 4, "recompute": "full"}
    return module.measure(argparse.Namespace(**options))
