"""Units of size in bytes, rounding up, and numbers as text."""

from decimal import Decimal

KIB = 1024
MIB = 1024**2
GIB = 1024**3
MOST_DEVICES = 100_000  # of a run: so many nodes, and engines, may a configuration have
MOST_OF_A_NODE = 1000  # devices


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def counted(number: int, noun: str) -> str:
    """Returns `1 row`, or `2 rows`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def plain_number(number: Decimal) -> str:
    """Returns a finite decimal without an exponent, and without zeros at the end of its fraction."""
    text = format(number, "f")
    if "." in text:
        text = text.rstrip("0").removesuffix(".")
    return "0" if text == "-0" else text
