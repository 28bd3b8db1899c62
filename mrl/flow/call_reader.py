"""Who reads what a turn calls: the dialect of the model's family, or the reader that the environment names.

MRL_CALL_READER, as MODULE:NAME, names a class in its place; all processes of a run inherit it.
"""

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from mrl.data.dialects import Dialect, ToolCall
from mrl.environments.tool import TurnsSpec

VARIABLE = "MRL_CALL_READER"


class CallReader(Protocol):
    """Reads calls; made with a dialect and what conversations may do."""

    def calls(self, turn: int, ids: Sequence[int], functions: Mapping[str, Mapping[str, Any]]) -> list[ToolCall]:
        """What a turn, counted from 1, calls. `functions`: what may be called, by name, as a chat template takes it."""


class DialectReader:
    """Reads what was sampled."""

    def __init__(self, dialect: Dialect, spec: TurnsSpec):
        self._dialect = dialect

    def calls(self, turn: int, ids: Sequence[int], functions: Mapping[str, Mapping[str, Any]]) -> list[ToolCall]:
        """What a turn calls, as the model wrote it."""
        return self._dialect.calls(ids, parameters_of(functions))


def parameters_of(functions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The parameters of each function, which calls of some families are read by."""
    return {name: function["parameters"]["properties"] for name, function in functions.items()}


def call_reader(dialect: Dialect, spec: TurnsSpec) -> CallReader:
    """Makes the reader of a run."""
    named = os.environ.get(VARIABLE)
    if named is None:
        return DialectReader(dialect, spec)
    module, _, name = named.partition(":")
    return getattr(import_module(module), name)(dialect, spec)
