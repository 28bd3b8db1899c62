"""Replaces modules of verl that a user's file imports: its decorator of tools and its base class. For hosts without
verl.

The decorator returns a function unchanged and registers it under the given name.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from mrl.reward import verl_modules

FUNCTIONS: dict[str, Callable[..., Any]] = {}  # of this process, by name


def mock_verl() -> None:
    """Makes the replaced modules importable where verl is not installed, those of scores too."""
    verl_modules.mock_verl(MODULES | verl_modules.SCORES)


def _of_classes(name: str) -> Any:
    return getattr(import_module("mrl.acting.verl_base_tool"), name)


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


# verl's modules of classes have their names from mrl.acting.verl_base_tool, which is loaded on first use
MODULES = {"verl.tools.function_tool": {"function_tool": function_tool}.__getitem__} | dict.fromkeys(
    ("verl.tools.base_tool", "verl.tools.schemas", "verl.utils.rollout_trace"), _of_classes
)
