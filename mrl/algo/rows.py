"""Flat arrays of response tokens, rows end to end, and numbers a row: from one to the other. numpy.

A row's sum is that of its own numbers alone, so it is the same whatever rows stand beside it, on whichever rank. Sums
of all rows are made of the rows' sums by math.fsum, which rounds once, at the end: no order of rows changes a bit.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

# [rows] by name: sums, counts and extremes of each row, from which metrics of all rows are made
RowValues = dict[str, np.ndarray]


def row_sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[rows]: sums over each row of `values` [tokens]; `lengths` [rows] are tokens a row. 0 of an empty row;
    of booleans int64 counts.
    """
    counted = values.astype(np.int64) if values.dtype == bool else values
    sums = np.zeros(len(lengths), counted.dtype)
    filled = lengths > 0
    starts = (np.cumsum(lengths) - lengths)[filled]
    if len(starts):
        sums[filled] = np.add.reduceat(counted, starts)
    return sums


def on_tokens(per_row: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[tokens]: each row's number on each of its tokens."""
    return np.repeat(per_row, lengths)


def places(lengths: np.ndarray) -> np.ndarray:
    """int64 [tokens]: each token's place in its row, from 0."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def row_extremes(ufunc: np.ufunc, values: np.ndarray, lengths: np.ndarray, empty: float) -> np.ndarray:
    """float64 [rows]: np.maximum or np.minimum over each row of `values` [tokens]; `empty` of a row without tokens."""
    extremes = np.full(len(lengths), empty, np.float64)
    filled = lengths > 0
    starts = (np.cumsum(lengths) - lengths)[filled]
    if len(starts):
        extremes[filled] = ufunc.reduceat(values, starts)
    return extremes


def in_chunks(
    function: Callable[..., RowValues], columns: Sequence[np.ndarray], lengths: np.ndarray, tokens: int = 1 << 20
) -> RowValues:
    """`function(*columns, lengths)`, which looks at one row at a time, over some rows after the others.

    What it computes of tokens on the way lies in memory for about `tokens` of them at once, and for one row at least.
    """
    ends = np.cumsum(lengths)
    first = np.flatnonzero(np.diff(ends // tokens, prepend=0))
    rows = [*dict.fromkeys([0, *first.tolist()]), len(lengths)]
    parts = []
    for start, stop in pairwise(rows):
        begin, end = (int(ends[row - 1]) if row else 0 for row in (start, stop))
        parts.append(function(*(column[begin:end] for column in columns), lengths[start:stop]))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def total(values: np.ndarray) -> float:
    """The exact sum, rounded once."""
    return math.fsum(values.tolist())


def moments(values: np.ndarray, mask: np.ndarray, lengths: np.ndarray) -> RowValues:
    """Sums up each row's masked values [tokens] as `count`, `sum`, `m2`, `low` and `high`.

    `m2` are squares about the row's own mean.
    """
    counts = row_sums(mask, lengths)
    sums = row_sums(np.where(mask, values, 0.0), lengths)
    centred = np.where(mask, values - on_tokens(sums / np.maximum(counts, 1), lengths), 0.0)
    low = row_extremes(np.minimum, np.where(mask, values, np.inf), lengths, np.inf)
    high = row_extremes(np.maximum, np.where(mask, values, -np.inf), lengths, -np.inf)
    return {"count": counts, "sum": sums, "m2": row_sums(centred**2, lengths), "low": low, "high": high}


def second_moment(m2: np.ndarray, sums: np.ndarray, other_sums: np.ndarray, counts: np.ndarray) -> float:
    """Sum over all tokens of the product of two centred values, from rows' sums and products about their own means
    (Chan et al., 1983).
    """
    filled = counts > 0
    counts, everything = counts[filled], total(counts)
    apart = [each[filled] / counts - total(each) / everything for each in (sums, other_sums)]
    return total(m2) + total(counts * apart[0] * apart[1])
