"""Responses in columns: flat arrays and lengths, no Python object a token, no padding.

An example: the prompt 7 8 answered with 1 2 3, and with 4.

    a number a row          prompt_lengths 2 2    response_lengths 3 1    sample_id 0 1    seed ...
    a number a token        token_ids 7 8 1 2 3 | 7 8 4             prompt then response, rows end to end
    a number a response     rollout_log_probs -.1 -.2 -.3 | -.4     response tokens alone, rows end to end
      token
    a number a span         span_starts 0 2 | 0   span_versions 5 6 | 6   span_counts 2 1: the first response was
                            begun with the weights of version 5, and has those of 6 from its token 2 on

`SampleRows` are numbers a response, all that a driver keeps; `Sequences` are what a model computes; `Samples` are both;
a `TrainBatch` (mrl.data.batch) is sequences with what a loss takes of each token. A column says in its field what it
has a number of, so `rows` and `joined` are written once for all of them. A response becomes a row where it was
generated (`packed`); the same columns travel to training and stand in the files of `samples/`
(mrl.record.sample_files).
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np

from mrl.data.routes import end_to_end, is_missing, missing_in
from mrl.errors import DataError

_ID_BYTES, _LOG_PROB_BYTES = 4, 4
STOP_REASONS = ("stop", "length")  # vLLM's names; a row holds the index


@dataclass(frozen=True)
class Sample:
    """One response on its way into columns. Token ids in, token ids out: nothing is ever re-tokenised."""

    prompt_id: int  # position of the prompt's row in the data set
    group_id: int  # samples of one group share a prompt within one step
    sample_id: int  # unique and stable within one step
    seed: int
    prompt_ids: Sequence[int] | np.ndarray
    response_ids: Sequence[int] | np.ndarray
    rollout_log_probs: Sequence[float] | np.ndarray  # processed, at the sampling temperature; one per response token
    stop_reason: str
    weight_version: int  # that it was begun with
    # see mrl.data.routes; None: the engine told of none
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)
    later_versions: tuple[tuple[int, int], ...] = ()  # (response token, version from there on)


def column_bytes(prompt_tokens: int, response_tokens: int, route_bytes: int = 0) -> int:
    """Of a response, or of many together; `route_bytes`: of one token's routes. Numbers of whole rows are left out."""
    return (prompt_tokens + response_tokens) * (_ID_BYTES + route_bytes) + response_tokens * _LOG_PROB_BYTES


def of(what: str, dtype: type | None = None) -> dict[str, Any]:
    """Of a field that holds one number, or one sub-array, for each row, token, response token or span."""
    return {"metadata": {"of": what, "dtype": dtype}}


class Columns:
    """What every dataclass of columns can do."""

    prompt_lengths: np.ndarray  # each has it: one number a row

    def counts(self) -> dict[str, np.ndarray]:
        """int64 [rows] by kind: how many numbers each row has in a column of that kind."""
        raise NotImplementedError

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
        columns = {f.name: _joined([getattr(part, f.name) for part in parts], f, parts) for f in fields(cls)}
        return cls(**columns)


def _joined(arrays: list[np.ndarray | None], which: Any, parts: Sequence[Columns]) -> np.ndarray | None:
    """One column of all parts. None where all are; else missing routes stand for one that is None."""
    if all(array is None for array in arrays):
        return None
    if which.name == "routes":
        return _with_missing(arrays, [int(part.counts()["token"].sum()) for part in parts])
    return np.concatenate(arrays)


def _with_missing(routes: Sequence[np.ndarray | None], tokens: Sequence[int]) -> np.ndarray | None:
    """Routes of so many tokens each, end to end; missing ones of those that are None. None where all are."""
    known = next((each for each in routes if each is not None), None)
    if known is None:
        return None
    code = missing_in(known.dtype)
    return end_to_end([
        np.full((count, *known.shape[1:]), code, known.dtype) if each is None else each
        for each, count in zip(routes, tokens, strict=True)
    ])  # fmt: skip


def positions(counts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """int64: where the numbers of `rows` stand in a flat column that has `counts` [all rows] of each row."""
    picked = counts[rows]
    starts, ends = np.cumsum(counts) - counts, np.cumsum(picked)
    return np.repeat(starts[rows] - (ends - picked), picked) + np.arange(int(picked.sum()))


def _span(counts: np.ndarray, rows: slice) -> slice:
    """Where consecutive rows stand in a flat column."""
    first, last, _ = rows.indices(len(counts))
    ends = np.concatenate([[0], np.cumsum(counts)])
    return slice(int(ends[first]), int(ends[max(first, last)]))


@dataclass(frozen=True)
class Sequences(Columns):
    """Prompts and responses as a model computes them."""

    prompt_lengths: np.ndarray = field(**of("row", np.int64))
    response_lengths: np.ndarray = field(**of("row", np.int64))
    token_ids: np.ndarray = field(**of("token", np.int32))
    rollout_log_probs: np.ndarray = field(**of("response token", np.float32))
    # [tokens, MoE layers, topk]; see mrl.data.routes
    routes: np.ndarray | None = field(default=None, kw_only=True, **of("token"))

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]: tokens of each row, prompt and response."""
        return self.prompt_lengths + self.response_lengths

    def counts(self) -> dict[str, np.ndarray]:
        """See Columns.counts."""
        return {
            "row": np.ones_like(self.prompt_lengths),
            "token": self.lengths,
            "response token": self.response_lengths,
        }

    def prompts(self) -> Iterator[np.ndarray]:
        """Each row's prompt, int32 [prompt_length], a view."""
        starts = np.cumsum(self.lengths) - self.lengths
        return (self.token_ids[start:end] for start, end in zip(starts, starts + self.prompt_lengths, strict=True))

    def responses(self) -> Iterator[np.ndarray]:
        """Each row's response, int32 [response_length], a view."""
        ends = np.cumsum(self.lengths)
        return (self.token_ids[start:end] for start, end in zip(ends - self.response_lengths, ends, strict=True))


@dataclass(frozen=True)
class SampleRows(Columns):
    """What generation knows of each response, without its tokens; names are those of Sample."""

    prompt_lengths: np.ndarray = field(**of("row", np.int64))
    response_lengths: np.ndarray = field(**of("row", np.int64))
    prompt_id: np.ndarray = field(**of("row", np.int64))
    group_id: np.ndarray = field(**of("row", np.int64))
    sample_id: np.ndarray = field(**of("row", np.int64))
    seed: np.ndarray = field(**of("row", np.int64))
    stop_reason: np.ndarray = field(**of("row", np.uint8))  # index into STOP_REASONS
    span_counts: np.ndarray = field(**of("row", np.int32))  # at least 1
    span_starts: np.ndarray = field(**of("span", np.int32))  # response token that the span begins with
    span_versions: np.ndarray = field(**of("span", np.int64))  # of the weights
    routed: np.ndarray = field(**of("row", np.bool_))  # some route of it is known
    finite: np.ndarray = field(**of("row", np.bool_))  # so are all its log-probs

    def counts(self) -> dict[str, np.ndarray]:
        """See Columns.counts."""
        return {"row": np.ones_like(self.prompt_lengths), "span": self.span_counts.astype(np.int64)}

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]: tokens of each row, prompt and response."""
        return self.prompt_lengths + self.response_lengths

    def to_bytes(self) -> bytes:
        """All columns, packed: some 80 bytes of a row alone, some 30 a row of many."""
        columns = (np.ascontiguousarray(getattr(self, f.name), f.metadata["dtype"]) for f in fields(SampleRows))
        sizes = np.array([len(self.prompt_lengths), len(self.span_starts)], np.int64)
        return zlib.compress(b"".join([sizes.tobytes(), *(column.tobytes() for column in columns)]))

    @staticmethod
    def from_bytes(told: bytes) -> "SampleRows":
        """What `to_bytes` made; columns are views that cannot be written to."""
        told = zlib.decompress(told)
        rows, spans = np.frombuffer(told, np.int64, 2).tolist()
        columns, start = {}, 16
        for f in fields(SampleRows):
            count = spans if f.metadata["of"] == "span" else rows
            columns[f.name] = np.frombuffer(told, f.metadata["dtype"], count, start)
            start += columns[f.name].nbytes
        return SampleRows(**columns)

    @property
    def truncated(self) -> np.ndarray:
        """bool [rows]: cut off at the longest length that was allowed."""
        return self.stop_reason == STOP_REASONS.index("length")

    @property
    def weight_version(self) -> np.ndarray:
        """int64 [rows]: version of the weights that each response was begun with."""
        counts = self.span_counts.astype(np.int64)
        return self.span_versions[np.cumsum(counts) - counts]


@dataclass(frozen=True)
class Samples(Sequences, SampleRows):
    """Responses, whole."""

    def counts(self) -> dict[str, np.ndarray]:
        """See Columns.counts."""
        return SampleRows.counts(self) | Sequences.counts(self)

    @property
    def numbers(self) -> SampleRows:
        """The same without tokens."""
        return SampleRows(**{f.name: getattr(self, f.name) for f in fields(SampleRows)})


def packed(samples: Sequence[Sample]) -> Samples:
    """The responses as rows, in the given order. Raises DataError for a stop reason that is not known."""
    prompts, responses = [len(s.prompt_ids) for s in samples], [len(s.response_ids) for s in samples]
    spans = [((0, s.weight_version), *s.later_versions) for s in samples]
    given = {
        "prompt_lengths": prompts,
        "response_lengths": responses,
        "token_ids": _end_to_end([ids for s in samples for ids in (s.prompt_ids, s.response_ids)], np.int32),
        "rollout_log_probs": _end_to_end([s.rollout_log_probs for s in samples], np.float32),
        **{name: [getattr(s, name) for s in samples] for name in ("prompt_id", "group_id", "sample_id", "seed")},
        "stop_reason": [_stop_reason(s) for s in samples],
        "span_counts": list(map(len, spans)),
        "span_starts": [start for each in spans for start, _ in each],
        "span_versions": [version for each in spans for _, version in each],
        "finite": [bool(np.isfinite(np.asarray(s.rollout_log_probs, np.float32)).all()) for s in samples],
        "routed": [s.routes is not None and not is_missing(s.routes).all() for s in samples],
    }
    arrays = {f.name: np.asarray(given[f.name], f.metadata["dtype"]) for f in fields(Samples) if f.name in given}
    tokens = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    routes = _with_missing([sample.routes for sample in samples], tokens)
    return Samples(**arrays, routes=routes)


def _end_to_end(parts: list[Any], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def _stop_reason(sample: Sample) -> int:
    if sample.stop_reason not in STOP_REASONS:
        raise DataError(f"sample {sample.sample_id} ended for {sample.stop_reason!r}; known: {', '.join(STOP_REASONS)}")
    return STOP_REASONS.index(sample.stop_reason)
