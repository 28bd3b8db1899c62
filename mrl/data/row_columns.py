"""Columns of rows: what each has a number of, and how rows are taken out and joined, written once for all of them.

See mrl.data.samples for an example.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Self

import numpy as np

from mrl.data.routes import end_to_end, missing_in

NAME = np.dtype("S64")  # of tools and parts, which mrl.environments keeps within


def of(what: str, dtype: type | None = None) -> dict[str, Any]:
    """Marks a field as one number, or one sub-array, for each row, token, response token, span or turn."""
    return {"metadata": {"of": what, "dtype": dtype}}


class Columns:
    """What every dataclass of columns can do."""

    prompt_lengths: np.ndarray  # each has these two: one number a row
    response_lengths: np.ndarray
    branch_counts: np.ndarray | None  # and these three, of branches
    branch_starts: np.ndarray | None
    branch_prompts: np.ndarray | None

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]: tokens of each row, prompt and response."""
        return self.prompt_lengths + self.response_lengths

    @property
    def sequence_lengths(self) -> np.ndarray:
        """int64 [branches]: tokens of each sequence that a model computes by itself; a row without branches is one."""
        if self.branch_counts is None:
            return self.lengths
        lengths = self._branch_lengths
        lengths[self._first_branches] += self.prompt_lengths
        return lengths

    @property
    def longest_responses(self) -> np.ndarray:
        """int64 [rows]: tokens behind the prompt of each row's longest branch."""
        if self.branch_counts is None or not len(self):
            return self.response_lengths
        return np.maximum.reduceat(self._branch_lengths - self.branch_prompts, self._first_branches)

    @property
    def _first_branches(self) -> np.ndarray:
        counts = self.branch_counts.astype(np.int64)
        return np.cumsum(counts) - counts

    @property
    def _branch_lengths(self) -> np.ndarray:
        """int64 [branches]: response tokens of each."""
        ends = np.append(self.branch_starts[1:], 0).astype(np.int64)
        ends[np.cumsum(self.branch_counts) - 1] = self.response_lengths
        return ends - self.branch_starts

    def counts(self) -> dict[str, np.ndarray]:
        """int64 [rows] by kind: how many numbers each row has in a column of that kind."""
        counts = {"row": np.ones_like(self.prompt_lengths)}
        if self.branch_counts is not None:
            counts["branch"] = self.branch_counts.astype(np.int64)
        return counts

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The columns that there are, by name; `type(self)(**arrays)` is the same again."""
        return {f.name: array for f in fields(self) if (array := getattr(self, f.name)) is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(array.nbytes for array in self.arrays.values())

    def rows(self, index: np.ndarray | slice) -> Self:
        """The given rows alone. Of consecutive ones (a slice) the columns are views, else copies."""
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
        """The rows of all parts, in their order. Raises ValueError where there is no part."""
        if not parts:
            raise ValueError("no parts to join")
        columns = {}
        for column in fields(cls):
            of_parts = [getattr(part, column.name) for part in parts]
            columns[column.name] = _joined(of_parts, column, parts)
        return cls(**columns)


def _joined(arrays: list[np.ndarray | None], which: Any, parts: Sequence[Columns]) -> np.ndarray | None:
    """One column of all parts. None where all are; else missing routes, or one turn a row, stand for one that is."""
    if all(array is None for array in arrays):
        return None
    if which.name == "routes":
        return with_missing_routes(arrays, [int(part.counts()["token"].sum()) for part in parts])
    usual = {**ONE_TURN, **ONE_BRANCH}
    if which.name in usual:
        pairs = zip(parts, arrays, strict=True)
        arrays = [usual[which.name](part) if array is None else array for part, array in pairs]
    return np.concatenate(arrays)


def with_missing_routes(routes: Sequence[np.ndarray | None], tokens: Sequence[int]) -> np.ndarray | None:
    """Routes of so many tokens each, end to end; missing ones of those that are None. None where all are."""
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
    """int64: where the numbers of `rows` stand in a flat column that has `counts` [all rows] of each row."""
    picked = counts[rows]
    starts = np.cumsum(counts) - counts
    ends = np.cumsum(picked)
    return np.repeat(starts[rows] - (ends - picked), picked) + np.arange(int(picked.sum()))


def _span(counts: np.ndarray, rows: slice) -> slice:
    """Where consecutive rows stand in a flat column."""
    first, last, _ = rows.indices(len(counts))
    ends = np.concatenate([[0], np.cumsum(counts)])
    return slice(int(ends[first]), int(ends[max(first, last)]))


def all_sampled(rows: Columns) -> np.ndarray:
    """bool [response tokens]: as of rows without context."""
    return np.ones(len(rows.rollout_log_probs), bool)


# of rows without the columns of turns: what stands in those of one turn each, in which all is sampled
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


# of rows without the columns of branches; they are added to such rows alone as are joined to others that have them
ONE_BRANCH: dict[str, Callable[[Any], np.ndarray]] = {
    "branch_counts": lambda rows: np.ones(len(rows), np.int32),
    "branch_starts": lambda rows: np.zeros(len(rows), np.int32),
    "branch_prompts": lambda rows: np.zeros(len(rows), np.int32),
}
