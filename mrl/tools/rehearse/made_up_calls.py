"""What a rehearsal calls in a model's place: random weights call nothing.

Nothing that was sampled is another for it: each turn that ends by itself is taken for one that calls what its row may
call, one function after the other, and the last turn calls nothing. So tools, environments and what follows of their
answers run as in training; how a model's calls are read is looked at by tests alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mrl.data.dialects import Dialect, ToolCall
from mrl.environments.tool import TurnsSpec

Schema = Mapping[str, Any]

_VALUES = {"string": "1", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


class MadeUpCalls:
    """Takes the place of mrl.flow.call_reader.DialectReader, with the same arguments."""

    def __init__(self, dialect: Dialect, spec: TurnsSpec):
        self._spec = spec

    def calls(self, turn: int, ids: Sequence[int], functions: Mapping[str, Schema]) -> list[ToolCall]:
        """Makes up what the turn calls, whatever was sampled."""
        if turn >= self._spec.max_turns:
            return []
        return made_up_calls(functions, turn, self._spec.max_calls)


def made_up_calls(functions: Mapping[str, Schema], turn: int, most: int) -> list[ToolCall]:
    """Makes up the calls of a turn, counted from 1; at most `most`. `functions`: by name, as a chat template takes
    them.
    """
    names = list(functions)
    first = (turn - 1) * most
    chosen = [names[number % len(names)] for number in range(first, first + min(most, len(names)))]
    return [ToolCall(name, _arguments(functions[name]["parameters"])) for name in chosen]


def _arguments(parameters: Schema) -> dict[str, Any]:
    """The required ones."""
    return {name: _value(parameters["properties"][name]) for name in parameters["required"]}


def _value(schema: Schema) -> Any:
    """One that fits."""
    if "enum" in schema:
        return schema["enum"][0]
    return _VALUES[schema["type"]]
