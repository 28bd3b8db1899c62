"""Reads FP8 matrices (e4m3) with one float32 scale for each block as bfloat16, the form in which they are trained.

An element is its code's value times its block's scale. The product is computed in float32 and rounded to the nearest
bfloat16, as in DeepSeek's own cast. Blocks are counted from the matrix's first row and column, and the last ones may be
smaller:

    columns   0 .. 127   128 .. 255   256 .. 299
    scales    s[i, 0]    s[i, 1]      s[i, 2]
"""

from collections.abc import Iterator

import numpy as np

_CODES = np.arange(256, dtype=np.uint8)
_FRACTION_BITS = 3
_BIAS = 7


def bfloat16_bits(
    codes: np.ndarray, scales: np.ndarray, block: tuple[int, int], first: tuple[int, int] = (0, 0)
) -> np.ndarray:
    """Returns the bfloat16 numbers of a box of a matrix, as integers of 16 bits.

    `codes`: e4m3 as bytes [rows, columns]. `scales`: of the whole matrix. `first`: the box's origin in it.
    """
    bits = np.empty(codes.shape, np.uint16)
    for rows, block_row in _parts(first[0], codes.shape[0], block[0]):
        for columns, block_column in _parts(first[1], codes.shape[1], block[1]):
            of_block = nearest_bfloat16(_VALUES * np.float32(scales[block_row, block_column]))
            bits[rows, columns] = of_block[codes[rows, columns]]
    return bits


def _parts(first: int, count: int, block: int) -> Iterator[tuple[slice, int]]:
    """Splits `count` rows from row `first` on at boundaries of blocks. Yields rows, and the block's number."""
    for number in range(first // block, -(-(first + count) // block)):
        start = max(number * block, first)
        stop = min((number + 1) * block, first + count)
        yield slice(start - first, stop - first), number


def nearest_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounds float32 to the nearest bfloat16, as integers of 16 bits. Ties go to even."""
    bits = values.view(np.uint32)
    is_odd = (bits >> 16) & 1
    return ((bits + 0x7FFF + is_odd) >> 16).astype(np.uint16)


def _values() -> np.ndarray:
    """Returns the number of each code: a sign, four bits of exponent, three of fraction; without infinities."""
    exponent = ((_CODES >> _FRACTION_BITS) & 15).astype(np.int32)
    fraction = (_CODES & 7) / np.float32(8)
    sizes = np.ldexp(np.where(exponent > 0, 1 + fraction, fraction), np.maximum(exponent, 1) - _BIAS)
    values = np.where(_CODES < 128, sizes, -sizes).astype(np.float32)
    values[[0x7F, 0xFF]] = np.nan
    return values


_VALUES = _values()
