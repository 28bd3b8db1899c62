"""Responses in columns: flat arrays and lengths, no Python object a token, no padding.

An example: the prompt 7 8 answered with 1 2 3, and with 4.

    a number a row          prompt_lengths 2 2    response_lengths 3 1    sample_id 0 1    seed ...
    a number a token        token_ids 7 8 1 2 3 | 7 8 4             prompt then response, rows end to end
    a number a response     rollout_log_probs -.1 -.2 -.3 | -.4     response tokens alone, rows end to end
      token
    a number a span         span_starts 0 2 | 0   span_versions 5 6 | 6   span_counts 2 1: the first response was
                            begun with the weights of version 5, and has those of 6 from its token 2 on

A response of several turns has context between what was sampled: answers of tools, the chat template's own tokens.

    sampled                 T T F F T | ...        which is which, as it was appended; never derived from text
    a number a turn         turn_starts 0 4        a turn is what was sampled, then the context that its calls brought
    a number a call         call_names b"guess"    of all turns, one after another; see TurnCall
    a number a part         part_names b"won"      what an environment says of its rewards

Context has no log-prob: 0 stands in the column, and nobody reads it. Where no response has context the columns of turns
are not there; where another one has, such a response is one turn.

A response whose agent went back has branches (mrl.schedule.branches). They are one row, of one outcome and one length,
and each is a sequence of its own to a model: it begins with a prompt, and what it has in common with one before is
context.

    token_ids               7 8 1 2 5 3 | 7 8 1 2 6 4      3 was said to 5; then the agent went back, and said 6
    sampled                     T T F T   F F F F F T
    a number a branch       branch_starts 0 4   branch_prompts 0 2     of response tokens, 7 8 at the second among them

Where no row has several the columns of branches are not there.

`SampleRows` are numbers a response, all that a driver keeps; `Sequences` are what a model computes; `Samples` are both;
a `TrainBatch` (mrl.data.batch) is sequences with what a loss takes of each token. A column says in its field what it
has a number of, so `rows` and `joined` are written once for all of them. A response becomes a row where it was
generated (`packed`); the same columns travel to training and stand in the files of `samples/`
(mrl.record.sample_files).
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np

from mrl.data.routes import is_missing
from mrl.data.row_columns import NAME, ONE_BRANCH, ONE_TURN, Columns, all_sampled, of, with_missing_routes
from mrl.errors import DataError

_ID_BYTES = 4
_LOG_PROB_BYTES = 4
# why a response ended: vLLM's names, then those of conversations (mrl.schedule.conversation); a row holds the index
LEFT_OUT = "environment"  # the environment failed, and nobody judges the response: its reward's reason too
NOT_FINITE = "not_finite"  # nobody judges the response: a log-prob of it is no number
UNJUDGED = (LEFT_OUT, NOT_FINITE)  # reasons of rewards that nobody gave
STOP_REASONS = ("stop", "length", "turns", "seconds", "context", "closed", LEFT_OUT)
# how a call ended; a row holds the index
CALL_REASONS = (
    "ok", "refused", "raised", "timeout", "died", "out_of_memory", "wrong_type", "not_a_number", "differs", "unread",
    "not_called", "unanswered", "fell",
    "overridden", "retry", "branch",  # what an agent asked for: sampling of another kind, a turn again, another branch
    "untrained",  # a branch that an agent left, and that has no room in the row
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """A part of a response: what one answer of the model sampled, then the context that its calls brought."""

    start: int  # response token that it begins with
    stop_reason: str  # why sampling ended
    calls: int = 0  # of tools
    seconds: float = 0.0  # that their answers took
    reward: float = 0.0  # that an environment gave for it


@dataclass(frozen=True)
class TurnCall:
    """One call of a turn. `name`: empty where it could not be read, or names what there is not."""

    name: str
    reason: str  # of CALL_REASONS
    seconds: float = 0.0
    reply: int = 0  # digest of what it brought, by which an environment that is begun anew is compared; 0: of nothing


TurnCalls = Sequence[TurnCall]  # of one turn, or of a row's turns one after another


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
    sampled: Sequence[bool] | np.ndarray | None = None  # one per response token: false of context; None: all are
    turns: tuple[Turn, ...] = ()  # in order; none: it is one turn
    calls: tuple[TurnCall, ...] = ()  # of all turns, in order
    parts: Mapping[str, float] = field(default_factory=dict)  # of an environment's rewards


def column_bytes(prompt_tokens: int, response_tokens: int, route_bytes: int = 0) -> int:
    """Bytes of one response, or of many, without numbers of whole rows; `route_bytes`: of one token's routes."""
    return (prompt_tokens + response_tokens) * (_ID_BYTES + route_bytes) + response_tokens * _LOG_PROB_BYTES


@dataclass(frozen=True)
class Sequences(Columns):
    """Prompts and responses as a model computes them."""

    prompt_lengths: np.ndarray = field(**of("row", np.int64))
    response_lengths: np.ndarray = field(**of("row", np.int64))
    token_ids: np.ndarray = field(**of("token", np.int32))
    rollout_log_probs: np.ndarray = field(**of("response token", np.float32))
    # [tokens, MoE layers, topk]; see mrl.data.routes
    routes: np.ndarray | None = field(default=None, kw_only=True, **of("token"))
    sampled: np.ndarray | None = field(default=None, kw_only=True, **of("response token", np.bool_))  # None: all are
    branch_counts: np.ndarray | None = field(default=None, kw_only=True, **of("row", np.int32))  # see SampleRows
    branch_starts: np.ndarray | None = field(default=None, kw_only=True, **of("branch", np.int32))
    branch_prompts: np.ndarray | None = field(default=None, kw_only=True, **of("branch", np.int32))

    @property
    def is_sampled(self) -> np.ndarray:
        """bool [response tokens]: false of context."""
        if self.sampled is None:
            return all_sampled(self)
        return self.sampled

    def counts(self) -> dict[str, np.ndarray]:
        return super().counts() | {"token": self.lengths, "response token": self.response_lengths}

    def prompts(self) -> Iterator[np.ndarray]:
        """Each row's prompt, int32 [prompt_length], a view."""
        starts = np.cumsum(self.lengths) - self.lengths
        return (self.token_ids[start:end] for start, end in zip(starts, starts + self.prompt_lengths, strict=True))

    def responses(self) -> Iterator[np.ndarray]:
        """Each row's response, int32 [response_length], a view."""
        ends = np.cumsum(self.lengths)
        return (self.token_ids[start:end] for start, end in zip(ends - self.response_lengths, ends, strict=True))

    def spoken_last(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Prompt and response of each row's last branch, int32, views: what people and reward functions read."""
        rows = zip(self.prompts(), self.responses(), strict=True)
        if self.branch_counts is None:
            return rows
        last = np.cumsum(self.branch_counts) - 1
        starts = self.branch_starts[last].tolist()
        own = zip(rows, starts, self.branch_prompts[last].tolist(), strict=True)
        return (
            (response[start : start + length], response[start + length :]) if length else (prompt, response)
            for (prompt, response), start, length in own
        )


_MAY_BE_ABSENT = ("sampled_counts", "branch_counts")  # of SampleRows, with all columns behind it


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
    sampled_counts: np.ndarray | None = field(default=None, kw_only=True, **of("row", np.int64))  # None: all tokens
    turn_counts: np.ndarray | None = field(default=None, kw_only=True, **of("row", np.int32))  # None: 1 each
    call_counts: np.ndarray | None = field(default=None, kw_only=True, **of("row", np.int32))  # None: 0 each
    call_names: np.ndarray | None = field(default=None, kw_only=True, **of("call", NAME))  # see TurnCall
    call_reasons: np.ndarray | None = field(default=None, kw_only=True, **of("call", np.uint8))  # index: CALL_REASONS
    call_seconds: np.ndarray | None = field(default=None, kw_only=True, **of("call", np.float32))
    # of rows with several branches; None: 1 each
    branch_counts: np.ndarray | None = field(default=None, kw_only=True, **of("row", np.int32))
    # response token that the branch begins with
    branch_starts: np.ndarray | None = field(default=None, kw_only=True, **of("branch", np.int32))
    # response tokens that are its prompt; 0 of a row's first
    branch_prompts: np.ndarray | None = field(default=None, kw_only=True, **of("branch", np.int32))

    def counts(self) -> dict[str, np.ndarray]:
        counts = super().counts() | {"span": self.span_counts.astype(np.int64)}
        if self.call_counts is not None:
            counts["call"] = self.call_counts.astype(np.int64)
        return counts

    @property
    def sampled_lengths(self) -> np.ndarray:
        """int64 [rows]: response tokens of each row that were sampled; the others are context."""
        if self.sampled_counts is None:
            return self.response_lengths
        return self.sampled_counts

    @property
    def context_lengths(self) -> np.ndarray:
        """int64 [rows]: the other response tokens of each row."""
        return self.response_lengths - self.sampled_lengths

    def to_bytes(self) -> bytes:
        """All columns, packed: some 80 bytes of a row alone, some 30 a row of many.

        Those of turns come behind the others, and those of branches last, so that their absence is an earlier end.
        """
        given = [f for f in fields(SampleRows) if getattr(self, f.name) is not None]
        columns = (np.ascontiguousarray(getattr(self, f.name), f.metadata["dtype"]) for f in given)
        sizes = np.array([len(self.prompt_lengths), len(self.span_starts)], np.int64)
        return zlib.compress(b"".join([sizes.tobytes(), *(column.tobytes() for column in columns)]))

    @staticmethod
    def from_bytes(told: bytes) -> "SampleRows":
        """What `to_bytes` made; columns are views that cannot be written to."""
        told = zlib.decompress(told)
        rows, spans = np.frombuffer(told, np.int64, 2).tolist()
        columns = {}
        start = 16
        for f in fields(SampleRows):
            if f.name in _MAY_BE_ABSENT and start == len(told):
                break
            count = {"span": spans, "row": rows}.get(f.metadata["of"])
            if count is None:  # of calls or branches, whose counts stand before them
                count = int(columns[f"{f.metadata['of']}_counts"].sum())
            columns[f.name] = np.frombuffer(told, f.metadata["dtype"], count, start)
            start += columns[f.name].nbytes
        return SampleRows(**columns)

    def as_context(self, rows: np.ndarray) -> Self:
        """Takes rows for context, which counts nowhere; `rows`: bool [rows]."""
        if not rows.any():
            return self
        return replace(self, sampled_counts=np.where(rows, 0, self.sampled_lengths))

    @property
    def truncated(self) -> np.ndarray:
        """bool [rows]: cut off at the longest length that was allowed."""
        return self.stop_reason == STOP_REASONS.index("length")

    @property
    def overlong(self) -> np.ndarray:
        """bool [rows]: no token of that length was left, to the model or to the answers that it asked for."""
        return self.truncated | (self.stop_reason == STOP_REASONS.index("context"))

    @property
    def weight_version(self) -> np.ndarray:
        """int64 [rows]: version of the weights that each response was begun with."""
        counts = self.span_counts.astype(np.int64)
        return self.span_versions[np.cumsum(counts) - counts]


@dataclass(frozen=True)
class Samples(Sequences, SampleRows):
    """Responses, whole. The columns of turns are all there, or none."""

    turn_starts: np.ndarray | None = field(default=None, kw_only=True, **of("turn", np.int32))  # see Turn
    turn_stops: np.ndarray | None = field(default=None, kw_only=True, **of("turn", np.uint8))  # index: STOP_REASONS
    turn_calls: np.ndarray | None = field(default=None, kw_only=True, **of("turn", np.int32))
    turn_seconds: np.ndarray | None = field(default=None, kw_only=True, **of("turn", np.float32))
    turn_rewards: np.ndarray | None = field(default=None, kw_only=True, **of("turn", np.float32))
    call_replies: np.ndarray | None = field(default=None, kw_only=True, **of("call", np.uint64))  # see TurnCall
    part_counts: np.ndarray | None = field(default=None, kw_only=True, **of("row", np.int32))  # None: 0 each
    part_names: np.ndarray | None = field(default=None, kw_only=True, **of("part", NAME))
    part_values: np.ndarray | None = field(default=None, kw_only=True, **of("part", np.float32))

    def counts(self) -> dict[str, np.ndarray]:
        counts = super().counts()
        if self.turn_counts is not None:
            counts["turn"] = self.turn_counts.astype(np.int64)
        if self.part_counts is not None:
            counts["part"] = self.part_counts.astype(np.int64)
        return counts

    def as_context(self, rows: np.ndarray) -> Self:
        own = super().as_context(rows)
        if own is self:
            return self
        return replace(own, sampled=self.is_sampled & ~np.repeat(rows, self.response_lengths))

    @property
    def numbers(self) -> SampleRows:
        """The rows without their tokens."""
        return SampleRows(**{f.name: getattr(self, f.name) for f in fields(SampleRows)})


def with_turns(samples: Samples) -> Samples:
    """Adds all columns of turns; rows that had none are one turn each."""
    absent = [name for name in ONE_TURN if getattr(samples, name) is None]
    return replace(samples, **{name: ONE_TURN[name](samples) for name in absent})


def with_branches(samples: Samples) -> Samples:
    """Adds the columns of branches; rows that had none are one branch each."""
    absent = [name for name in ONE_BRANCH if getattr(samples, name) is None]
    return replace(samples, **{name: ONE_BRANCH[name](samples) for name in absent})


def with_outcome(
    one: Samples, calls: Sequence[TurnCalls], rewards: Sequence[float], parts: Mapping[str, float], seconds: float
) -> Samples:
    """One row with the outcome of its calls: calls and reward of each turn, one after another.

    `seconds`: that the calls of the last turn took, where it has some. Raises DataError for more or fewer turns than
    the row has.
    """
    one = with_turns(one)
    if not len(calls) == len(rewards) == one.turn_counts[0]:
        raise DataError(f"a response of {one.turn_counts[0]} turns is told of {len(calls)}")
    every = [call for of_turn in calls for call in of_turn]
    times = one.turn_seconds.copy()
    times[-1] = seconds
    return replace(
        one,
        turn_calls=np.array([len(of_turn) for of_turn in calls], np.int32),
        turn_rewards=np.array(rewards, np.float32),
        turn_seconds=times,
        **_calls_of([every]),
        **_parts_of([parts]),
    )


def _calls_of(rows: Sequence[TurnCalls]) -> dict[str, np.ndarray]:
    every = [call for row in rows for call in row]
    return {
        "call_counts": np.array([len(row) for row in rows], np.int32),
        "call_names": np.array([call.name.encode() for call in every], NAME),
        "call_reasons": np.array([CALL_REASONS.index(call.reason) for call in every], np.uint8),
        "call_seconds": np.array([call.seconds for call in every], np.float32),
        "call_replies": np.array([call.reply for call in every], np.uint64),
    }


def _parts_of(rows: Sequence[Mapping[str, float]]) -> dict[str, np.ndarray]:
    return {
        "part_counts": np.array([len(row) for row in rows], np.int32),
        "part_names": np.array([name.encode() for row in rows for name in row], NAME),
        "part_values": np.array([value for row in rows for value in row.values()], np.float32),
    }


def packed(samples: Sequence[Sample]) -> Samples:
    """The responses as rows, in the given order. Raises DataError for a stop reason that is not known."""
    prompts = [len(s.prompt_ids) for s in samples]
    responses = [len(s.response_ids) for s in samples]
    spans = [((0, s.weight_version), *s.later_versions) for s in samples]
    given = {
        "prompt_lengths": prompts,
        "response_lengths": responses,
        "token_ids": _end_to_end([ids for s in samples for ids in (s.prompt_ids, s.response_ids)], np.int32),
        "rollout_log_probs": _end_to_end([s.rollout_log_probs for s in samples], np.float32),
        "prompt_id": [s.prompt_id for s in samples],
        "group_id": [s.group_id for s in samples],
        "sample_id": [s.sample_id for s in samples],
        "seed": [s.seed for s in samples],
        "stop_reason": [_stop_reason(s, s.stop_reason) for s in samples],
        "span_counts": list(map(len, spans)),
        "span_starts": [start for each in spans for start, _ in each],
        "span_versions": [version for each in spans for _, version in each],
        "finite": [_is_finite(s) for s in samples],
        "routed": [s.routes is not None and not is_missing(s.routes).all() for s in samples],
        **_turns_of(samples),
    }
    arrays = {f.name: np.asarray(given[f.name], f.metadata["dtype"]) for f in fields(Samples) if f.name in given}
    routes = with_missing_routes([sample.routes for sample in samples], np.add(prompts, responses).tolist())
    return Samples(**arrays, routes=routes)


def _end_to_end(parts: list[Any], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def _is_finite(sample: Sample) -> bool:
    finite = np.isfinite(np.asarray(sample.rollout_log_probs, np.float32))
    return bool(finite.all() if sample.sampled is None else finite[np.asarray(sample.sampled, bool)].all())


def _turns_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """The columns of turns; none where no sample has several or context."""
    if not any(sample.sampled is not None or len(sample.turns) > 1 or sample.calls for sample in samples):
        return {}
    of_each = [sample.turns or (Turn(0, sample.stop_reason),) for sample in samples]
    sampled = [np.ones(len(s.response_ids), bool) if s.sampled is None else s.sampled for s in samples]
    turns = [turn for each in of_each for turn in each]
    stops = []
    for sample, each in zip(samples, of_each, strict=True):
        stops += [_stop_reason(sample, turn.stop_reason) for turn in each]
    return {
        "sampled": _end_to_end(sampled, bool),
        "sampled_counts": [int(np.sum(each)) for each in sampled],
        "turn_counts": list(map(len, of_each)),
        "turn_starts": [turn.start for turn in turns],
        "turn_stops": stops,
        "turn_calls": [turn.calls for turn in turns],
        "turn_seconds": [turn.seconds for turn in turns],
        "turn_rewards": [turn.reward for turn in turns],
        **_calls_of([sample.calls for sample in samples]),
        **_parts_of([sample.parts for sample in samples]),
    }


def _stop_reason(sample: Sample, reason: str) -> int:
    if reason not in STOP_REASONS:
        raise DataError(f"sample {sample.sample_id} ended for {reason!r}; known: {', '.join(STOP_REASONS)}")
    return STOP_REASONS.index(reason)
