"""Replaces modules of verl that a user's file imports: its decorator of tools and its base class. For hosts without
verl.

The decorator returns a function unchanged and registers it under the given name.
"""

import importlib.util
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

FUNCTIONS: dict[str, Callable[..., Any]] = {}  # of this process, by name
# verl's modules whose names are in mrl.environments.verl_base_tool, which is loaded on first use
_OF_CLASSES = ("verl.tools.base_tool", "verl.tools.schemas", "verl.utils.rollout_trace")
STOOD_IN = ("verl", "verl.tools", "verl.utils", "verl.tools.function_tool", *_OF_CLASSES)


def stand_in() -> None:
    """Makes the replaced modules importable. Does nothing if verl is installed."""
    if "verl" in sys.modules or importlib.util.find_spec("verl") is not None:
        return
    for name in STOOD_IN:
        module = ModuleType(name, "Stands in for verl's, which is not installed.")
        sys.modules[name] = module
        if name in ("verl", "verl.tools", "verl.utils"):
            module.__path__ = []  # a package, so that a missing submodule is reported by its name
    for name in STOOD_IN[1:]:
        parent, _, own = name.rpartition(".")
        setattr(sys.modules[parent], own, sys.modules[name])
    sys.modules["verl.tools.function_tool"].function_tool = function_tool
    for name in _OF_CLASSES:
        sys.modules[name].__getattr__ = _of_classes


def _of_classes(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module("mrl.environments.verl_base_tool"), name)


def function_tool(named: str | Callable[..., Any] | None = None, *, name: str | None = None, schema: Any = None) -> Any:
    """Replaces verl's decorator, with or without a name. A function with a schema of its own is not registered."""
    if callable(named):
        FUNCTIONS[named.__name__] = named
        return named

    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        if schema is None:
            FUNCTIONS[name or named or function.__name__] = function
        return function

    return note
