"""Tools as they are written for verl."""

from verl.tools.function_tool import function_tool


@function_tool("add")
def plus(left: int, right: int) -> str:
    """Adds.

    Args:
        left: one
        right: other
    """
    return str(left + right)


@function_tool
def twice(number: int) -> str:
    """Doubles."""
    return str(2 * number)


@function_tool(schema={"type": "function"})
def own(number: int) -> str:
    """Has a schema."""
    return ""


def helper():
    return 1
