"""Files of tools that were written for verl import its decorator: where verl is not installed, this stands in for it.

The decorator leaves a function as it is and notes it under the name that it was given.
"""

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

FUNCTIONS: dict[str, Callable[..., Any]] = {}  # of this process, by name
_MODULES = ("verl", "verl.tools", "verl.tools.function_tool")


def stand_in() -> None:
    """Makes `from verl.tools.function_tool import function_tool` possible; nothing where verl is there."""
    if "verl" in sys.modules or importlib.util.find_spec("verl") is not None:
        return
    for name in _MODULES:
        sys.modules[name] = ModuleType(name, "Stands in for verl's, which is not installed.")
    for name in _MODULES[1:]:
        parent, _, own = name.rpartition(".")
        setattr(sys.modules[parent], own, sys.modules[name])
    sys.modules[_MODULES[-1]].function_tool = function_tool


def function_tool(named: str | Callable[..., Any] | None = None, *, name: str | None = None, schema: Any = None) -> Any:
    """Stands in for verl's decorator, with or without a name. A function with a schema of its own is not noted."""
    if callable(named):
        FUNCTIONS[named.__name__] = named
        return named

    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        if schema is None:
            FUNCTIONS[name or named or function.__name__] = function
        return function

    return note
