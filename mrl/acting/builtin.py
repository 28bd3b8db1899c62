"""Built-in tools and environments."""

import ast
import operator
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mrl.acting.environment import Environment, Reply, given_by
from mrl.acting.text_arena import TEXTARENA, TextArena
from mrl.acting.tool import Tool

_LONGEST = 500  # characters of an expression
_LARGEST_BITS = 4096  # of an intermediate whole number
_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: of numbers, + - * / // % ** and parentheses
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression of {len(expression)} characters; at most {_LONGEST}")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value)


def _value(node: ast.expr) -> int | float:
    """Computes an expression that consists of numbers and operators only."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _small(_OPERATORS[type(op)], _value(left), _value(right))
    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic")


def _small(function: Callable, left: int | float, right: int | float) -> int | float:
    """Raises ValueError before a number becomes too large, or if it is not real."""
    if function is operator.pow and isinstance(left, int) and abs(right) * left.bit_length() > _LARGEST_BITS:
        raise ValueError("the result is too large")
    value = function(left, right)
    if isinstance(value, complex):
        raise ValueError("the result is no real number")
    if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
        raise ValueError("the result is too large")
    return value


BUILTIN_TOOLS: dict[str, Tool] = {"calculator": Tool.of(calculator, "calculator")}


class GuessTheNumber(Environment):
    """A hidden whole number between `low` and `high` of the row's extra_info, by default 1 and 100.

    Rewards 1 for the right guess, and 0 before. `guesses` of extra_info: after so many the game ends; by default it
    goes on as long as the conversation may.
    """

    actions = ("guess",)
    repeatable = True
    parts = MappingProxyType({"guesses": 0.0, "won": 0.0})

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Raises ValueError for a row without a number in between, or without a guess."""
        given = given_by(row)
        self._low = int(given.get("low", 1))
        self._high = int(given.get("high", 100))
        if self._low > self._high:
            raise ValueError(f"extra_info: there is no number between low {self._low} and high {self._high}")
        self._most = given.get("guesses")
        if self._most is not None and self._most < 1:
            raise ValueError(f"extra_info: guesses {self._most}: must be at least 1")
        self._hidden = random.Random(seed).randint(self._low, self._high)
        self._guesses = 0

    def guess(self, number: int) -> Reply:
        """Guesses the hidden number.

        Args:
            number: a whole number
        """
        self._guesses += 1
        parts = {"guesses": float(self._guesses), "won": float(number == self._hidden)}
        if number == self._hidden:
            return Reply("That is the number.", 1.0, parts, end=True)
        way = "lower"
        if number < self._hidden:
            way = "higher"
        return Reply(f"The hidden number is {way} than {number}.", 0.0, parts, end=self._guesses == self._most)


BUILTIN_ENVIRONMENTS: dict[str, type[Environment]] = {"guess_the_number": GuessTheNumber, TEXTARENA: TextArena}
