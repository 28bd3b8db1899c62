"""Flat arrays of response tokens, rows end to end, and numbers a row: from one to the other. numpy.

A row's sum is that of its own numbers alone, so it is the same whatever rows stand beside it, on whichever rank.
"""

import numpy as np


def row_sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[rows]: sums over each row of `values` [tokens]; `lengths` [rows] are tokens a row. 0 of an empty row; of booleans int64 counts."""
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
