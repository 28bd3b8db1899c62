"""Makes up tool calls in a rehearsal, because random weights call nothing.

Sampled tokens are not read. Each turn that ends by itself calls functions that its row may call, one after the other.
The last turn calls nothing. So tools, environments and their answers run as in training. How a model's calls are read
is covered by tests only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mrl.acting.dialects import Dialect, ToolCall
from mrl.acting.tool import TurnsSpec
from mrl.data.parameter_types import properties_of, types_of

Schema = Mapping[str, Any]

_VALUES = {"string": "1", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


class MadeUpCalls:
    """Replaces mrl.engine.call_reader.DialectReader, with the same arguments."""

    def __init__(self, dialect: Dialect, spec: TurnsSpec):
        self._spec = spec

    def calls(self, turn: int, ids: Sequence[int], functions: Mapping[str, Schema]) -> list[ToolCall]:
        """Makes up the calls of a turn, whatever was sampled."""
        if turn >= self._spec.max_turns:
            return []
        return made_up_calls(functions, turn, self._spec.max_calls)


def made_up_calls(functions: Mapping[str, Schema], turn: int, most: int) -> list[ToolCall]:
    """Makes up at most `most` calls for a turn; turns count from 1.

    `functions` are by name, in the form that chat templates take.
    """
    names = list(functions)
    first = (turn - 1) * most
    chosen = [names[number % len(names)] for number in range(first, first + min(most, len(names)))]
    return [ToolCall(name, _arguments(functions[name]["parameters"])) for name in chosen]


def _arguments(parameters: Schema) -> dict[str, Any]:
    """Returns values for the required parameters."""
    properties = properties_of(parameters)
    return {name: _value(properties.get(name, {}), parameters) for name in parameters["required"]}


def _value(schema: Schema, root: Schema) -> Any:
    """Returns a value that fits the schema, as far as its type, `enum` and `const` say."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    types = types_of(schema, root)
    return next((value for kind, value in _VALUES.items() if kind in types), None)
