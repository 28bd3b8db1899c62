"""Stand-ins for packages of Ascend's that cannot be installed here have the signatures of the releases in our row, as
these were read from wheels and sources (scripts/upstream/stored.json).
"""

import ast
import importlib
import json
import sys
from pathlib import Path

import pytest
from test_npu import STAND_INS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "upstream"))
tree = importlib.import_module("tree")
STORED = json.loads((ROOT / "scripts" / "upstream" / "stored.json").read_text(encoding="utf-8"))
# class of a stand-in -> dependency, and what it stands in for
CLASSES = {
    "test_npu.Npu": ("torch-npu", "torch_npu.npu"),
    "test_worker_sleep.Pool": ("vllm-ascend", "vllm_ascend.device_allocator.camem.CaMemAllocator"),
    "test_worker_sleep.NPUWorker": ("vllm-ascend", "vllm_ascend.worker.worker.NPUWorker"),
}


def methods_of(name: str) -> list[str]:
    """Public methods of a class in a file beside this one."""
    module, _, owner = name.partition(".")
    source = ast.parse((Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8"))
    (found,) = [node for node in source.body if isinstance(node, ast.ClassDef) and node.name == owner]
    return [node.name for node in found.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


@pytest.mark.parametrize(("stand_in", "stands_for"), CLASSES.items())
def test_a_class_has_the_methods_of_the_release_with_their_parameters(stand_in, stands_for):
    dependency, owner = stands_for
    names = methods_of(stand_in)
    ours = {name: str(tree.Tree(Path(__file__).parent).find(f"{stand_in}.{name}").signature) for name in names}
    theirs = {name: STORED[dependency]["names"].get(f"{owner}.{name}", {}).get("text") for name in names}
    assert names and ours == theirs


def test_mindspeeds_functions_have_their_parameters(tmp_path):
    for name, text in STAND_INS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    there = {name: answer["text"] for name, answer in STORED["mindspeed"]["names"].items() if answer["text"] != "there"}
    assert {name: str(tree.Tree(tmp_path).find(name).signature) for name in there} == there and len(there) == 4
