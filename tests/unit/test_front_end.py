"""The two generations of vLLM's front end, against stand-ins with the signatures of AsyncLLM in 0.23.0 and 0.32.0."""

import ast
import asyncio
import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl.errors import EnvironmentFault
from mrl.vllm.front_end import front_end


class Llm032:
    """AsyncLLM of vLLM 0.32.0; that of 0.23.0 has no such method."""

    def __init__(self):
        self.calls = []

    async def update_weight_version(self, new_version: str) -> None:
        self.calls.append(new_version)


def test_each_generation_is_called_with_what_it_has():
    llm, older = Llm032(), object()
    asyncio.run(front_end("0.32.0").set_version(llm, 7))
    asyncio.run(front_end("0.23.0").set_version(older, 7))
    assert llm.calls == ["7"]


def test_the_installed_vllm_has_the_method_that_its_stand_in_has():
    folder = Path(next(iter(importlib.util.find_spec("vllm").submodule_search_locations)))  # read, not imported: that takes seconds
    tree = ast.parse((folder / "v1" / "engine" / "async_llm.py").read_text())
    found = {node.name: [a.arg for a in node.args.args] for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)}
    assert found["update_weight_version"] == list(inspect.signature(Llm032.update_weight_version).parameters)


def test_0_32_says_itself_which_versions_took_part():
    answer = SimpleNamespace(weight_versions=[SimpleNamespace(version="3"), SimpleNamespace(version="4")])
    assert front_end("0.32.1").versions(answer, 4, 4) == {"3", "4"}
    assert front_end("0.32.1").versions(SimpleNamespace(weight_versions=None), 4, 4) == set()


def test_on_0_23_a_request_that_saw_an_update_shows_a_mixture():
    answer = SimpleNamespace()
    assert front_end("0.23.0").versions(answer, 4, 4) == {"4"}
    assert front_end("0.23.0").versions(answer, 4, 5) == {"4", "5"}
    assert front_end("0.23.0").versions(answer, 4, None) == {"4", "None"}  # an update is under way


def test_another_generation_is_refused_with_the_list():
    with pytest.raises(EnvironmentFault, match=r"0\.31\.0 is of no supported generation \(0\.23, 0\.32\)"):
        front_end("0.31.0")
