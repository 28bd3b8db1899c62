"""Sizes in bytes, and counts rounded up."""

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
