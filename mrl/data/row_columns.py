"""Columns of rows: which things each has a number of, and how rows are taken out and joined, written once for all.

An example stands in mrl.data.samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Self

import numpy as np

from mrl.data.routes import end_to_end, missing_in

NAME = np.dtype("S64")  # names of tools and parts; mrl.acting refuses longer ones


def of(what: str, dtype: type | None = None) -> dict[str, Any]:
    """Marks a field as one number, or one sub-array, for each row, token, response token, span, turn and so on."""
    return {"metadata": {"of": what, "dtype": dtype}}


class Columns:
    """The common methods of all dataclasses of columns."""

    prompt_lengths: np.ndarray  # every class has these two, with one number a row
    response_lengths: np.ndarray
    branch_counts: np.ndarray | None  # and these three columns of branches
    branch_starts: np.ndarray | None
    branch_prompts: np.ndarray | None

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, prompt and response, int64 [rows]."""
        return self.prompt_lengths + self.response_lengths

    @property
    def sequence_lengths(self) -> np.ndarray:
        """Tokens of each sequence that a model computes by itself, int64 [branches]. A row without branches is one
        sequence.
        """
        if self.branch_counts is None:
            return self.lengths
        lengths = self._branch_lengths
        lengths[self._first_branches] += self.prompt_lengths
        return lengths

    @property
    def longest_responses(self) -> np.ndarray:
        """Tokens behind the prompt in the longest branch of each row, int64 [rows]."""
        if self.branch_counts is None or not len(self):
            return self.response_lengths
        return np.maximum.reduceat(self._branch_lengths - self.branch_prompts, self._first_branches)

    @property
    def _first_branches(self) -> np.ndarray:
        counts = self.branch_counts.astype(np.int64)
        return np.cumsum(counts) - counts

    @property
    def _branch_lengths(self) -> np.ndarray:
        """Response tokens of each branch, int64 [branches]."""
        ends = np.append(self.branch_starts[1:], 0).astype(np.int64)
        ends[np.cumsum(self.branch_counts) - 1] = self.response_lengths
        return ends - self.branch_starts

    def counts(self) -> dict[str, np.ndarray]:
        """Returns by kind, int64 [rows]: how many numbers each row has in a column of that kind."""
        counts = {"row": np.ones_like(self.prompt_lengths)}
        if self.branch_counts is not None:
            counts["branch"] = self.branch_counts.astype(np.int64)
        return counts

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The columns that are not None, by name; `type(self)(**arrays)` makes the same object."""
        return {f.name: array for f in fields(self) if (array := getattr(self, f.name)) is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(array.nbytes for array in self.arrays.values())

    def rows(self, index: np.ndarray | slice) -> Self:
        """Takes the given rows. For a slice of consecutive ones the columns are views, else copies."""
        counts = self.counts()
        if isinstance(index, slice) and index.step in (None, 1):
            chosen = {what: _span(each, index) for what, each in counts.items()}
        else:
            numbers = np.arange(len(self))[index]
            chosen = {what: positions(each, numbers) for what, each in counts.items()}
        return replace(self, **{f.name: array[chosen[f.metadata["of"]]] for f, array in self._filled()})

    def _filled(self) -> list[tuple[Any, np.ndarray]]:
        return [(f, array) for f in fields(self) if (array := getattr(self, f.name)) is not None]

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Joins the rows of all parts, in their order. Raises ValueError where there is no part."""
        if not parts:
            raise ValueError("no parts to join")
        columns = {}
        for column in fields(cls):
            of_parts = [getattr(part, column.name) for part in parts]
            columns[column.name] = _joined(of_parts, column, parts)
        return cls(**columns)


def _joined(arrays: list[np.ndarray | None], which: Any, parts: Sequence[Columns]) -> np.ndarray | None:
    """Joins one column of all parts; None where all are None.

    Else a part without the column gets missing routes, or the values of one turn or one branch a row.
    """
    if all(array is None for array in arrays):
        return None
    if which.name == "routes":
        return with_missing_routes(arrays, [int(part.counts()["token"].sum()) for part in parts])
    # a conversation's rows all have columns of turns: where these are missing, no row of the group has a state
    states = {
        "turn_states": lambda rows: np.zeros(len(rows), np.uint64),
        "turn_parents": lambda rows: np.full(len(rows), -1, np.int32),
    }
    usual = {**ONE_TURN, **ONE_BRANCH, **NO_IMAGES, **states}
    if which.name in usual:
        pairs = zip(parts, arrays, strict=True)
        arrays = [usual[which.name](part) if array is None else array for part, array in pairs]
    return np.concatenate(arrays)


def with_missing_routes(routes: Sequence[np.ndarray | None], tokens: Sequence[int]) -> np.ndarray | None:
    """Joins routes of `tokens` tokens each. Where some are None, missing ones stand in; where all are, returns None."""
    known = next((each for each in routes if each is not None), None)
    if known is None:
        return None
    code = missing_in(known.dtype)
    filled = []
    for each, count in zip(routes, tokens, strict=True):
        if each is None:
            each = np.full((count, *known.shape[1:]), code, known.dtype)
        filled.append(each)
    return end_to_end(filled)


def positions(counts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns where the numbers of `rows` stand in a flat column, int64. `counts` [all rows]: how many each row has."""
    picked = counts[rows]
    starts = np.cumsum(counts) - counts
    ends = np.cumsum(picked)
    return np.repeat(starts[rows] - (ends - picked), picked) + np.arange(int(picked.sum()))


def _span(counts: np.ndarray, rows: slice) -> slice:
    """Returns where consecutive rows stand in a flat column."""
    first, last, _ = rows.indices(len(counts))
    ends = np.concatenate([[0], np.cumsum(counts)])
    return slice(int(ends[first]), int(ends[max(first, last)]))


def all_sampled(rows: Columns) -> np.ndarray:
    """Returns true for every response token, bool [response tokens]: rows without context."""
    return np.ones(len(rows.rollout_log_probs), bool)


# values that rows without columns of turns get: each row is one turn, in which all tokens are sampled
ONE_TURN: dict[str, Callable[[Any], np.ndarray]] = {
    "sampled": all_sampled,
    "sampled_counts": lambda rows: rows.response_lengths,
    "turn_counts": lambda rows: np.ones(len(rows), np.int32),
    "turn_starts": lambda rows: np.zeros(len(rows), np.int32),
    "turn_stops": lambda rows: rows.stop_reason,
    "turn_calls": lambda rows: np.zeros(len(rows), np.int32),
    "turn_seconds": lambda rows: np.zeros(len(rows), np.float32),
    "turn_rewards": lambda rows: np.zeros(len(rows), np.float32),
    "call_counts": lambda rows: np.zeros(len(rows), np.int32),
    "call_names": lambda rows: np.zeros(0, NAME),
    "call_reasons": lambda rows: np.zeros(0, np.uint8),
    "call_seconds": lambda rows: np.zeros(0, np.float32),
    "call_replies": lambda rows: np.zeros(0, np.uint64),
    "part_counts": lambda rows: np.zeros(len(rows), np.int32),
    "part_names": lambda rows: np.zeros(0, NAME),
    "part_values": lambda rows: np.zeros(0, np.float32),
}


# values that rows without columns of branches get when they are joined to rows that have them
ONE_BRANCH: dict[str, Callable[[Any], np.ndarray]] = {
    "branch_counts": lambda rows: np.ones(len(rows), np.int32),
    "branch_starts": lambda rows: np.zeros(len(rows), np.int32),
    "branch_prompts": lambda rows: np.zeros(len(rows), np.int32),
}


# values that rows without images get when they are joined to rows that have some
NO_IMAGES: dict[str, Callable[[Any], np.ndarray]] = {
    "image_counts": lambda rows: np.zeros(len(rows), np.int32),
    "image_names": lambda rows: np.zeros(0, NAME),
    "image_starts": lambda rows: np.zeros(0, np.int32),
    "image_tokens": lambda rows: np.zeros(0, np.int32),
    "image_grids": lambda rows: np.zeros((0, 3), np.int32),
}
