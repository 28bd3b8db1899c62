"""Conversion between flat arrays of response tokens, rows end to end, and numbers a row. numpy only.

The sum of a row uses the numbers of that row only. So it is the same whatever rows stand beside it, on whichever rank.
Sums over all rows add the sums of rows with math.fsum, which rounds once, at the end. So the order of rows changes no
bit.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

# [rows] by name: sums, counts and extremes of each row, from which metrics of all rows are made
RowValues = dict[str, np.ndarray]


def row_sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sums each row of `values` [tokens]; `lengths` [rows] is the number of tokens a row. An empty row has sum 0.

    Booleans are counted as int64.
    """
    counted = values.astype(np.int64) if values.dtype == bool else values
    sums = np.zeros(len(lengths), counted.dtype)
    filled = lengths > 0
    starts = (np.cumsum(lengths) - lengths)[filled]
    if len(starts):
        sums[filled] = np.add.reduceat(counted, starts)
    return sums


def on_tokens(per_row: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Repeats the number of each row on all its tokens, [tokens]."""
    return np.repeat(per_row, lengths)


def positions(lengths: np.ndarray) -> np.ndarray:
    """Returns the position of each token in its row, counted from 0, int64 [tokens]."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def row_extremes(ufunc: np.ufunc, values: np.ndarray, lengths: np.ndarray, empty: float) -> np.ndarray:
    """Returns np.maximum or np.minimum over each row of `values` [tokens], float64 [rows]; `empty` for a row without
    tokens.
    """
    extremes = np.full(len(lengths), empty, np.float64)
    filled = lengths > 0
    starts = (np.cumsum(lengths) - lengths)[filled]
    if len(starts):
        extremes[filled] = ufunc.reduceat(values, starts)
    return extremes


def in_chunks(
    function: Callable[..., RowValues], columns: Sequence[np.ndarray], lengths: np.ndarray, tokens: int = 1 << 20
) -> RowValues:
    """Calls `function(*columns, lengths)` on some rows after the others, and joins the results.

    The function has to treat each row by itself. A call gets about `tokens` tokens, and at least one row, so that its
    temporary arrays stay small.
    """
    ends = np.cumsum(lengths)
    first = np.flatnonzero(np.diff(ends // tokens, prepend=0))
    rows = [*dict.fromkeys([0, *first.tolist()]), len(lengths)]
    parts = []
    for start, stop in pairwise(rows):
        begin = int(ends[start - 1]) if start else 0
        end = int(ends[stop - 1]) if stop else 0
        parts.append(function(*(column[begin:end] for column in columns), lengths[start:stop]))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def total(values: np.ndarray) -> float:
    """Returns the exact sum, rounded once."""
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
    """Sums the product of two centred values over all tokens (Chan et al., 1983).

    `sums` and `other_sums` are sums of rows, `m2` their products about the row's own means.
    """
    filled = counts > 0
    everything = total(counts)
    counts = counts[filled]
    offset = sums[filled] / counts - total(sums) / everything  # mean of a row less the mean of all
    other_offset = other_sums[filled] / counts - total(other_sums) / everything
    return total(m2) + total(counts * offset * other_offset)
