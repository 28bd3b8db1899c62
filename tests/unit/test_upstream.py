"""Contracts with upstream: names and calls are read off source, found in a package's tree, and what moved is named with
its place.
"""

import importlib
import sys
from pathlib import Path

import pytest

from mrl.platforms.versions import ROWS, row_of

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "upstream"))
attributes, check, tree, used = (importlib.import_module(name) for name in ("attributes", "check", "tree", "used"))

OURS = """
import torch
import vllm.config as configs
from ray import get as fetch
from vllm.engine import Engine

def start(torch_like, torch_size=1):
    engine = Engine(1, *[2], model="x")
    return configs.Parallel.of(engine), fetch(engine, timeout=3)

PATCHED = "torch.cuda.Stream"
WORDS = "ray of hope. no name"
"""

THEIRS = {
    "pkg/__init__.py": (
        "from .deep import *\nfrom .engine import Engine as Motor\n"
        "LAZY = {'Late': '.engine:Engine'}\ndef __getattr__(n): ...\n"
    ),
    "pkg/deep.py": "try:\n    import fast\nexcept ImportError:\n    def helper(a, b=1, *, c): ...\n",
    "pkg/engine.py": (
        "from dataclasses import dataclass\nfrom typing import overload\n"
        "class Base:\n    def __init__(self, size, **more):\n        self.size = size\n"
        "    def run(self, x, /, y=2): ...\n"
        "class Engine(Base):\n    limit: int = 3\n    @staticmethod\n    def of(text): ...\n"
        "@dataclass\nclass Sizes:\n    wide: int\n    high: int = 2\n"
        "@overload\ndef once(): ...\ndef once(*args, key=None): ...\n"
    ),
}  # fmt: skip


@pytest.fixture
def package(tmp_path):
    for name, text in THEIRS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tree.Tree(tmp_path)


def test_uses_are_the_whole_paths_of_what_imports_bind_with_their_calls(tmp_path):
    (tmp_path / "mrl").mkdir()
    (tmp_path / "mrl" / "a.py").write_text(OURS)
    found = used.used_names(tmp_path)
    assert found["ray"]["ray.get"].calls == {used.Call(1, ("timeout",), False)}
    both = found["vllm 0.32.0"]
    assert both == found["vllm 0.23.0"] and both["vllm.engine.Engine"].calls == {used.Call(1, ("model",), True)}
    assert "vllm.config.Parallel.of" in both and both["vllm.config.Parallel.of"].places == {"mrl/a.py:9"}
    assert "torch.cuda.Stream" in found["torch"] and "ray of hope. no name" not in found["ray"]


@pytest.mark.parametrize(
    ("name", "place", "signature"),
    [
        ("pkg.helper", "pkg/deep.py:4", "(a, b=, *c)"),
        ("pkg.Motor", "pkg/engine.py:7", "(size, **kwargs)"),
        ("pkg.Late.of", "pkg/engine.py:10", "(text)"),
        ("pkg.engine.Engine.run", "pkg/engine.py:6", "(x, y=)"),
        ("pkg.engine.Engine.size", "pkg/engine.py:5", "None"),
        ("pkg.engine.Engine.limit", "pkg/engine.py:8", "None"),
        ("pkg.engine.Sizes", "pkg/engine.py:12", "(wide, high=)"),
        ("pkg.engine.once", "pkg/engine.py:17", "(*args, *key=)"),
        ("pkg.engine", "pkg/engine.py", "None"),
    ],
)
def test_a_name_is_found_through_re_exports_stars_bases_and_tables(package, name, place, signature):
    found = package.find(name)
    assert (found.place, str(found.signature)) == (place, signature)


@pytest.mark.parametrize("name", ["pkg.nothing", "pkg.engine.Engine.walk", "pkg.engine.Nobody.of", "other.name"])
def test_what_is_not_there_is_not_found(package, name):
    assert package.find(name) is None


@pytest.mark.parametrize(
    ("name", "call", "refused"),
    [
        ("pkg.helper", (1, ("c",), False), None),
        ("pkg.helper", (1, (), False), "needs c"),
        ("pkg.helper", (1, (), True), None),  # a star may bring it
        ("pkg.helper", (3, ("c",), False), "takes 2 positional arguments, not 3"),
        ("pkg.helper", (1, ("c", "d"), False), "takes no d"),
        ("pkg.Motor", (0, ("size", "anything"), False), None),
        ("pkg.engine.Engine.run", (1, ("x",), False), "takes no x"),  # positional alone
        ("pkg.engine.Sizes", (0, ("high",), False), "needs wide"),
        ("pkg.engine.once", (5, ("key",), False), None),
    ],
)
def test_a_call_that_would_be_refused_is_named_with_the_reason(package, name, call, refused):
    assert package.find(name).signature.refuses(*call) == refused


def test_what_moved_is_told_with_the_places_that_use_it(package):
    names = {
        "pkg.gone": used.Use({"mrl/a.py:3"}),
        "pkg.helper": used.Use({"mrl/b.py:7"}, {used.Call(0, ("d",), False)}),
    }
    assert list(check.faults_of("pkg 2", check.answers(package.root, names), names)) == [
        "pkg 2: pkg.gone is not there; used in mrl/a.py:3", "pkg 2: pkg.helper takes no d; called in mrl/b.py:7",
    ]  # fmt: skip


def test_modules_that_star_import_each_other_are_asked_once_each(tmp_path):
    """Ten of them, and more that are not there: by every way through them it would take 18 ** 12 looks."""
    (tmp_path / "ring").mkdir()
    (tmp_path / "ring" / "__init__.py").write_text("from .m0 import *\n")
    for number in range(10):
        others = [*(f"m{n}" for n in range(10) if n != number), *(f"gone{n}" for n in range(9))]
        own = "def last(x): ...\n" if number == 9 else ""
        (tmp_path / "ring" / f"m{number}.py").write_text("".join(f"from .{o} import *\n" for o in others) + own)
    found = tree.Tree(tmp_path)
    assert found.find("ring.nothing") is None and str(found.find("ring.last").signature) == "(x)"


def test_what_is_stored_is_of_the_versions_of_the_rows_and_lacks_nothing_that_mrl_uses():
    faults, counts = check.check_stored()
    assert faults == [] and all(counts.values())
    npu = row_of("npu")
    expected = {
        "vllm 0.23.0": npu.packages["vllm"],
        "vllm-ascend": npu.packages["vllm-ascend"],
        "transformer-engine": row_of("cuda").packages["transformer-engine"],
        "mindspeed": "core_r0.16.0",
        "torch-npu": npu.packages["torch-npu"],
    }
    assert {name: record["version"] for name, record in check.stored().items()} == expected
    assert npu.source_only["mindspeed"].endswith(expected["mindspeed"]) and len(ROWS) == 3


def test_installed_packages_have_what_mrl_uses_and_would_take_its_calls():
    faults, counts = check.check_installed()
    assert faults == [] and {"megatron-core", "mbridge", "ray", "torch"} <= set(counts)


def test_every_variable_that_mrl_names_is_in_the_package_that_it_is_for():
    """But those of HCCL, which CANN's own libraries read."""
    lost = {
        name: variable
        for name, record in check.stored().items()
        for variable, place in record["variables"].items()
        if not place and not variable.startswith(("HCCL_", "P2P_HCCL_"))
    }
    assert lost == {}


def test_what_is_reached_through_objects_is_still_used_where_the_table_says():
    for reached in attributes.REACHED:
        place = ROOT / reached.file
        text = "".join(p.read_text() for p in (sorted(place.rglob("*.py")) if place.is_dir() else [place]))
        assert [name for name in reached.names if name not in text] == [], reached.owner
