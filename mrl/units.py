"""Units of size in bytes, and rounding up."""

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
