"""Integer arithmetic as the shell writes it, `(a + b) * 2 / sp`, calculated from its syntax tree; nothing is evaluated as code."""

import ast
import re
from collections.abc import Callable

_LIMIT = 10**18  # the shell calculates in 64 bits
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),  # the shell cuts towards zero
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    ast.Pow: lambda a, b: a**b if 0 <= b <= 63 and abs(a) <= 1_000_000 else _LIMIT,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
}


def calculate(text: str, value_of: Callable[[str], int]) -> int:
    """The value of an expression. `value_of` gives variables by name and may raise.

    Raises ValueError for what is no such expression, divides by zero or leaves 64 bits.
    """
    if len(text) > 1000:
        raise ValueError("too long an expression")
    try:
        python = re.sub(r"(?<!/)/(?!/)", "//", text.strip() or "0").replace("&&", " and ").replace("||", " or ")
        tree = ast.parse(re.sub(r"!(?!=)", " not ", python).strip(), mode="eval")
        return _value(tree.body, value_of)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(f"cannot be calculated: {error}") from None


def _value(node: ast.expr, value_of: Callable[[str], int]) -> int:
    result = _plain_value(node, value_of)
    if abs(result) >= _LIMIT:
        raise ValueError("a number out of range")
    return result


def _plain_value(node: ast.expr, value_of: Callable[[str], int]) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name):
            return value_of(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, value_of)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, value_of)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _value(operand, value_of))
        case ast.BoolOp(op=op, values=parts):
            truths = [_value(part, value_of) != 0 for part in parts]
            return int(all(truths) if isinstance(op, ast.And) else any(truths))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left, value_of), _value(right, value_of))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            return int(_COMPARISONS[type(op)](_value(left, value_of), _value(right, value_of)))
    raise ValueError(f"{ast.unparse(node)} is no shell arithmetic that is read")
