"""Where the time of a step goes: stacks become seconds of parts, and parts are named after functions that are there."""

import ast
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "scripts" / "bench")]

from step_profile import CORE, PARTS, RANK, Look, in_order, read  # noqa: E402

STACKS = """\
main (mrl);update (mrl/rank/rank_step.py:31);Attention.forward (core/transformer/attention.py:9);bmm (torch/x.py:1) 30
main (mrl);update (rank_step.py:31);MoELayer.forward (core/moe/moe_layer.py:8);Attention.forward (attention.py:2) 10
main (mrl);update (mrl/rank/rank_step.py:31);numpy 6
thread (17);idle (zmq/poll.py) 3
main (mrl);update (mrl/rank/rank_step.py:31);Worker.main_loop (ray/_private/worker.py:9) 51
"""


def test_a_sample_counts_for_its_innermost_part_and_waits_for_none():
    shares = Look(read(STACKS), busy=0.49).shares(PARTS[RANK])
    assert shares == pytest.approx({"attention forward": 0.40, "micro-batches": 0.06, "all else": 0.03})
    assert in_order(shares, 20.0) == {"attention forward": 8.0, "micro-batches": 1.2, "all else": 0.6}


def test_classes_tell_functions_of_one_file_apart():
    stacks = read("loop (core.py:1);Other.step (x.py:1) 5\nloop (core.py:1);Scheduler.schedule (a/scheduler.py:2) 7")
    assert Look(stacks, 0.6).shares(PARTS[CORE]) == pytest.approx({"schedule": 0.35, "all else": 0.25})


PACKAGES = (
    "mrl",
    "ray/actor.py",
    "ray/_private",
    "torch/autograd",
    "megatron/core",
    "vllm/v1",
    "vllm/model_executor/models/qwen3_moe.py",
)


def test_functions_that_parts_name_are_in_the_installed_packages():
    needed = {tuple(key.split(":")) for parts in PARTS.values() for functions in parts.values() for key in functions}
    needed -= {("threading.py", "run")}
    for package in PACKAGES:
        needed -= defined(package, {file for file, _ in needed})
    assert sorted(needed) == []


def defined(package: str, files: set[str]) -> set[tuple[str, str]]:
    """Functions of those files, with their classes and without."""
    root = Path(find_spec(package.split("/")[0]).submodule_search_locations[0]).parent / package
    found = set()
    for path in [root] if root.is_file() else root.rglob("*.py"):
        if path.name in files:
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                        found.add((path.name, name))
                    case ast.ClassDef(name=owner, body=body):
                        found |= {(path.name, f"{owner}.{n.name}") for n in body if isinstance(n, ast.FunctionDef)}
    return found
