"""Reads the calls in a turn, by the dialect of the model's family."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mrl.acting.dialects import Dialect, ToolCall
from mrl.acting.tool import TurnsSpec
from mrl.data.parameter_types import typed_parameters


class CallReader(Protocol):
    """Reads the calls in a turn. It is built from a dialect and the limits of conversations."""

    def calls(self, turn: int, ids: Sequence[int], functions: Mapping[str, Mapping[str, Any]]) -> list[ToolCall]:
        """Returns the calls in a turn; turns count from 1.

        `functions` are those that may be called, by name, in the form that chat templates take.
        """


class DialectReader:
    """Reads the calls that the model sampled."""

    def __init__(self, dialect: Dialect, spec: TurnsSpec):
        self._dialect = dialect

    def calls(self, turn: int, ids: Sequence[int], functions: Mapping[str, Mapping[str, Any]]) -> list[ToolCall]:
        """Returns the calls in a turn, as the model wrote them."""
        parameters = {name: typed_parameters(function["parameters"]) for name, function in functions.items()}
        return self._dialect.calls(ids, parameters)
