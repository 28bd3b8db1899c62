"""Built-in tools."""

import ast
import operator
from collections.abc import Callable

from mrl.environments.tool import Tool

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
