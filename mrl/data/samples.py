"""Responses in columns: flat arrays and lengths, no Python object a token, no padding.

An example: the prompt 7 8 answered with 1 2 3, and with 4.

    a number a row          prompt_lengths 2 2    response_lengths 3 1    sample_id 0 1    seed ...
    a number a token        token_ids 7 8 1 2 3 | 7 8 4             prompt then response, rows end to end
    a number a response     rollout_log_probs -.1 -.2 -.3 | -.4     response tokens alone, rows end to end
      token
    a number a span         span_starts 0 2 | 0   span_versions 5 6 | 6   span_counts 2 1: the first response was
                            begun with the weights of version 5, and has those of 6 from its token 2 on

A response of several turns has context between its sampled tokens: answers of tools, and tokens of the chat template.

    sampled                 T T F F T | ...        which tokens were sampled; recorded, never derived from text
    a number a turn         turn_starts 0 4        a turn is sampled tokens, then the context that its calls brought
    a number a call         call_names b"guess"    calls of all turns, one after another (TurnCall)
    a number a part         part_names b"won"      the parts of an environment's reward

Context has no log-prob: 0 stands in the column, and nobody reads it. Without any context the columns of turns are
missing. Beside a response with context, one without it is one turn.

A response whose agent went back has branches (mrl.schedule.branches). They are one row, with one outcome and one
length. To a model each branch is a sequence of its own. It begins with a prompt, and the tokens that it shares with an
earlier branch are context.

    token_ids               7 8 1 2 5 3 | 7 8 1 2 6 4      3 was said to 5; then the agent went back, and said 6
    sampled                     T T F T   F F F F F T
    a number a branch       branch_starts 0 4   branch_prompts 0 2     in response tokens; the second prompt is 7 8

Where no row has several branches, the columns of branches are missing.

An image stands in a row as the tokens in whose places a model puts its features (RowImage). Its pixels are stored
elsewhere, under its name. Where no row has an image, the columns of images are missing.

    a number an image       image_names b"9f..."   image_starts 1   image_tokens 4   image_grids 1 4 4

`SampleRows` are numbers a response, all that a driver keeps. `Sequences` are what a model computes. `Samples` are both.
A `TrainBatch` (mrl.data.batch) is sequences with the loss's inputs for each token. The field of a column says which
things it has a number of. So `rows` and `joined` are written once for all columns. A response becomes a row where it
was generated (`packed`). The same columns travel to training and stand in the files of `samples/`
(mrl.record.sample_files).
"""

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np

from mrl.data.routes import is_missing
from mrl.data.row_columns import (
    NAME,
    NO_IMAGES,
    ONE_BRANCH,
    ONE_TURN,
    Columns,
    all_sampled,
    of,
    with_missing_routes,
)
from mrl.errors import DataError

_ID_BYTES = 4
_LOG_PROB_BYTES = 4
# why a response ended: vLLM's names, then those of conversations (mrl.schedule.conversation); a row holds the index
LEFT_OUT = "environment"  # the environment failed, so the response is not judged; also the reason of its reward
NOT_FINITE = "not_finite"  # a log-prob is not finite, so the response is not judged
NO_ENGINE = -1  # the engine of a response is not known
UNJUDGED = (LEFT_OUT, NOT_FINITE)  # reasons of rewards of responses that are not judged
STOP_REASONS = ("stop", "length", "turns", "seconds", "context", "closed", LEFT_OUT)
# how a call ended; a row holds the index
MOST_KNOWN = 1 << 16  # images of turns that a process remembers: some 10 MB; then it forgets all, and reads files again
CALL_REASONS = (
    "ok", "refused", "raised", "timeout", "died", "out_of_memory", "wrong_type", "not_a_number", "differs", "unread",
    "not_called", "unanswered", "fell",
    "overridden", "retry", "branch",  # an agent asked for other sampling, for a turn again, for another branch
    "untrained",  # an agent left a branch, which does not fit into the row
    "lost_reward",  # an agent gave a reward for an answer that is not in the row
    "unreadable_image",  # of an answer
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """A part of a response: the sampled tokens of one answer, then the context that its calls brought."""

    start: int  # its first response token
    stop_reason: str  # why sampling ended
    calls: int = 0  # tool calls
    seconds: float = 0.0  # until all answers to the calls were there
    reward: float = 0.0  # from an environment


@dataclass(frozen=True)
class TurnCall:
    """One call of a turn. `name` is empty where the call could not be read, or names an unknown tool."""

    name: str
    reason: str  # one of CALL_REASONS
    seconds: float = 0.0
    reply: int = 0  # digest of the reply, compared when an environment is replayed; 0: no reply


TurnCalls = Sequence[TurnCall]  # of one turn, or of all turns of a row


@dataclass(frozen=True)
class RowImage:
    """An image in a row: the tokens in whose places its features stand. Recorded, never derived from token ids, because
    a model can sample an image's token, too.
    """

    name: str  # digest of its pixels, under which they are stored
    start: int  # its first token among those of the row
    tokens: int
    grid: tuple[int, int, int]  # patches in time, height and width, before they are merged to tokens


class KnownImage(NamedTuple):
    """An image that was read."""

    name: str
    grid: tuple[int, int, int]  # as in RowImage
    tokens: int


@dataclass(frozen=True)
class ImageStore:
    """The encoded images of a run: of prompts, of answers of tools."""

    folder: str  # seen by all hosts
    most_pixels: int  # data.max_image_pixels


@dataclass(frozen=True)
class Sample:
    """One response before it becomes columns. Token ids in, token ids out: nothing is ever re-tokenised."""

    prompt_id: int  # position of the prompt's row in the data set
    group_id: int  # samples of one group share a prompt within one step
    sample_id: int  # unique and stable within one step
    seed: int
    prompt_ids: Sequence[int] | np.ndarray
    response_ids: Sequence[int] | np.ndarray
    rollout_log_probs: Sequence[float] | np.ndarray  # processed, at the sampling temperature; one per response token
    stop_reason: str
    weight_version: int  # version of the weights at its first token
    # as in mrl.data.routes; None: the engine returned none
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)
    later_versions: tuple[tuple[int, int], ...] = ()  # (response token, version from there on)
    sampled: Sequence[bool] | np.ndarray | None = None  # one per response token: false for context; None: all true
    turns: tuple[Turn, ...] = ()  # in order; empty: one turn
    calls: tuple[TurnCall, ...] = ()  # calls of all turns, in order
    parts: Mapping[str, float] = field(default_factory=dict)  # parts of an environment's reward
    images: tuple[RowImage, ...] = ()  # in the order of their tokens; one that stands in two branches is there twice
    engine: int = NO_ENGINE  # the engine that made its first token


def column_bytes(prompt_tokens: int, response_tokens: int, route_bytes: int = 0) -> int:
    """Returns the bytes of the token columns of one response, or of many. Numbers of whole rows are not counted.

    `route_bytes`: bytes of one token's routes.
    """
    return (prompt_tokens + response_tokens) * (_ID_BYTES + route_bytes) + response_tokens * _LOG_PROB_BYTES


@dataclass(frozen=True)
class Sequences(Columns):
    """Prompts and responses as a model computes them."""

    prompt_lengths: np.ndarray = field(**of("row", np.int64))
    response_lengths: np.ndarray = field(**of("row", np.int64))
    token_ids: np.ndarray = field(**of("token", np.int32))
    rollout_log_probs: np.ndarray = field(**of("response token", np.float32))
    # [tokens, MoE layers, topk], as in mrl.data.routes
    routes: np.ndarray | None = field(default=None, kw_only=True, **of("token"))
    sampled: np.ndarray | None = field(default=None, kw_only=True, **of("response token", np.bool_))  # None: all are
    branch_counts: np.ndarray | None = field(default=None, kw_only=True, **of("row", np.int32))  # as in SampleRows
    branch_starts: np.ndarray | None = field(default=None, kw_only=True, **of("branch", np.int32))
    branch_prompts: np.ndarray | None = field(default=None, kw_only=True, **of("branch", np.int32))
    image_counts: np.ndarray | None = field(default=None, kw_only=True, **of("row", np.int32))  # None: 0 each
    image_names: np.ndarray | None = field(default=None, kw_only=True, **of("image", NAME))  # as in RowImage
    image_starts: np.ndarray | None = field(default=None, kw_only=True, **of("image", np.int32))
    image_tokens: np.ndarray | None = field(default=None, kw_only=True, **of("image", np.int32))
    image_grids: np.ndarray | None = field(default=None, kw_only=True, **of("image", np.int32))  # [images, 3]

    @property
    def is_sampled(self) -> np.ndarray:
        """Which response tokens were sampled, bool [response tokens]; false for context."""
        if self.sampled is None:
            return all_sampled(self)
        return self.sampled

    def counts(self) -> dict[str, np.ndarray]:
        counts = super().counts() | {"token": self.lengths, "response token": self.response_lengths}
        if self.image_counts is not None:
            counts["image"] = self.image_counts.astype(np.int64)
        return counts

    def prompts(self) -> Iterator[np.ndarray]:
        """Returns the prompt of each row, int32 [prompt_length], a view."""
        starts = np.cumsum(self.lengths) - self.lengths
        return (self.token_ids[start:end] for start, end in zip(starts, starts + self.prompt_lengths, strict=True))

    def responses(self) -> Iterator[np.ndarray]:
        """Returns the response of each row, int32 [response_length], a view."""
        ends = np.cumsum(self.lengths)
        return (self.token_ids[start:end] for start, end in zip(ends - self.response_lengths, ends, strict=True))

    def spoken_last(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Returns prompt and response of the last branch of each row, int32, views. People and reward functions read
        these.
        """
        rows = zip(self.prompts(), self.responses(), strict=True)
        if self.branch_counts is None:
            return rows
        last = np.cumsum(self.branch_counts) - 1
        starts = self.branch_starts[last].tolist()
        branches = zip(rows, starts, self.branch_prompts[last].tolist(), strict=True)
        return (
            (response[start : start + length], response[start + length :]) if length else (prompt, response)
            for (prompt, response), start, length in branches
        )


_MAY_BE_ABSENT = ("sampled_counts", "branch_counts")  # columns of SampleRows that may be missing, with all later ones


@dataclass(frozen=True)
class SampleRows(Columns):
    """The numbers that generation knows of each response, without its tokens. Names are those of Sample."""

    prompt_lengths: np.ndarray = field(**of("row", np.int64))
    response_lengths: np.ndarray = field(**of("row", np.int64))
    prompt_id: np.ndarray = field(**of("row", np.int64))
    group_id: np.ndarray = field(**of("row", np.int64))
    sample_id: np.ndarray = field(**of("row", np.int64))
    seed: np.ndarray = field(**of("row", np.int64))
    stop_reason: np.ndarray = field(**of("row", np.uint8))  # index into STOP_REASONS
    span_counts: np.ndarray = field(**of("row", np.int32))  # at least 1
    span_starts: np.ndarray = field(**of("span", np.int32))  # first response token of the span
    span_versions: np.ndarray = field(**of("span", np.int64))  # version of its weights
    routed: np.ndarray = field(**of("row", np.bool_))  # at least one of its routes is known
    finite: np.ndarray = field(**of("row", np.bool_))  # all its log-probs are finite
    engine: np.ndarray = field(**of("row", np.int16))  # as in Sample
    sampled_counts: np.ndarray | None = field(default=None, kw_only=True, **of("row", np.int64))  # None: all tokens
    turn_counts: np.ndarray | None = field(default=None, kw_only=True, **of("row", np.int32))  # None: 1 each
    call_counts: np.ndarray | None = field(default=None, kw_only=True, **of("row", np.int32))  # None: 0 each
    call_names: np.ndarray | None = field(default=None, kw_only=True, **of("call", NAME))  # as in TurnCall
    call_reasons: np.ndarray | None = field(default=None, kw_only=True, **of("call", np.uint8))  # index: CALL_REASONS
    call_seconds: np.ndarray | None = field(default=None, kw_only=True, **of("call", np.float32))
    turn_starts: np.ndarray | None = field(default=None, kw_only=True, **of("turn", np.int32))  # as in Turn
    turn_rewards: np.ndarray | None = field(default=None, kw_only=True, **of("turn", np.float32))
    # digest of what was read since the turn before, in a first turn with the prompt; 0: nothing. `numbers` fills it
    turn_states: np.ndarray | None = field(default=None, kw_only=True, **of("turn", np.uint64))
    # the turn of the row that it follows, also in another branch; -1: none. `numbers` fills it
    turn_parents: np.ndarray | None = field(default=None, kw_only=True, **of("turn", np.int32))
    # None: 1 each
    branch_counts: np.ndarray | None = field(default=None, kw_only=True, **of("row", np.int32))
    # first response token of the branch
    branch_starts: np.ndarray | None = field(default=None, kw_only=True, **of("branch", np.int32))
    # response tokens that repeat the prompt; 0 for the first branch of a row
    branch_prompts: np.ndarray | None = field(default=None, kw_only=True, **of("branch", np.int32))

    def counts(self) -> dict[str, np.ndarray]:
        counts = super().counts() | {"span": self.span_counts.astype(np.int64)}
        if self.call_counts is not None:
            counts["call"] = self.call_counts.astype(np.int64)
        if self.turn_counts is not None:
            counts["turn"] = self.turn_counts.astype(np.int64)
        return counts

    @property
    def sampled_lengths(self) -> np.ndarray:
        """Sampled response tokens of each row, int64 [rows]; the others are context."""
        if self.sampled_counts is None:
            return self.response_lengths
        return self.sampled_counts

    @property
    def context_lengths(self) -> np.ndarray:
        """Response tokens of each row that are context, int64 [rows]."""
        return self.response_lengths - self.sampled_lengths

    def to_bytes(self) -> bytes:
        """Packs all columns: some 80 bytes for a single row, some 30 a row for many.

        Columns of turns come behind the others, and those of branches last. Where they are missing, the bytes end
        earlier.
        """
        given = [f for f in fields(SampleRows) if getattr(self, f.name) is not None]
        columns = (np.ascontiguousarray(getattr(self, f.name), f.metadata["dtype"]) for f in given)
        sizes = np.array([len(self.prompt_lengths), len(self.span_starts)], np.int64)
        return zlib.compress(b"".join([sizes.tobytes(), *(column.tobytes() for column in columns)]))

    @staticmethod
    def from_bytes(content: bytes) -> "SampleRows":
        """Reads the bytes of `to_bytes`. The columns are read-only views."""
        data = zlib.decompress(content)
        rows, spans = np.frombuffer(data, np.int64, 2).tolist()
        columns = {}
        start = 16
        for f in fields(SampleRows):
            if f.name in _MAY_BE_ABSENT and start == len(data):
                break
            count = {"span": spans, "row": rows}.get(f.metadata["of"])
            if count is None:  # calls or branches: their counts stand before them
                count = int(columns[f"{f.metadata['of']}_counts"].sum())
            columns[f.name] = np.frombuffer(data, f.metadata["dtype"], count, start)
            start += columns[f.name].nbytes
        return SampleRows(**columns)

    def as_context(self, rows: np.ndarray) -> Self:
        """Marks rows as context, which counts nowhere; `rows`: bool [rows]."""
        if not rows.any():
            return self
        return replace(self, sampled_counts=np.where(rows, 0, self.sampled_lengths))

    @property
    def truncated(self) -> np.ndarray:
        """True for responses that the length limit cut off, bool [rows]."""
        return self.stop_reason == STOP_REASONS.index("length")

    @property
    def overlong(self) -> np.ndarray:
        """True for responses that used up the length limit, by the model's tokens or by answers of tools, bool
        [rows].
        """
        return self.truncated | (self.stop_reason == STOP_REASONS.index("context"))

    @property
    def weight_version(self) -> np.ndarray:
        """Version of the weights at the first token of each response, int64 [rows]."""
        counts = self.span_counts.astype(np.int64)
        return self.span_versions[np.cumsum(counts) - counts]


@dataclass(frozen=True)
class Samples(Sequences, SampleRows):
    """Whole responses. The columns of turns are all there, or none is."""

    turn_stops: np.ndarray | None = field(default=None, kw_only=True, **of("turn", np.uint8))  # index: STOP_REASONS
    turn_calls: np.ndarray | None = field(default=None, kw_only=True, **of("turn", np.int32))
    turn_seconds: np.ndarray | None = field(default=None, kw_only=True, **of("turn", np.float32))
    call_replies: np.ndarray | None = field(default=None, kw_only=True, **of("call", np.uint64))  # as in TurnCall
    part_counts: np.ndarray | None = field(default=None, kw_only=True, **of("row", np.int32))  # None: 0 each
    part_names: np.ndarray | None = field(default=None, kw_only=True, **of("part", NAME))
    part_values: np.ndarray | None = field(default=None, kw_only=True, **of("part", np.float32))

    def counts(self) -> dict[str, np.ndarray]:
        counts = super().counts()
        if self.part_counts is not None:
            counts["part"] = self.part_counts.astype(np.int64)
        return counts

    def as_context(self, rows: np.ndarray) -> Self:
        marked = super().as_context(rows)
        if marked is self:
            return self
        return replace(marked, sampled=self.is_sampled & ~np.repeat(rows, self.response_lengths))

    @property
    def numbers(self) -> SampleRows:
        """The rows without their tokens."""
        given = {f.name: getattr(self, f.name) for f in fields(SampleRows)}
        if self.turn_starts is not None:
            given["turn_states"], given["turn_parents"] = _read_before(self)
        return SampleRows(**given)


def _read_before(samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    """Digests what was read before each turn, uint64 [turns], 0 where it was nothing; and says which turn of its row
    it follows, int32 [turns], -1 where none.

    What was read is the context since the turn before. Before the first turn of a branch it is what follows the last
    turn that the branch shares with an earlier one, and where it shares none, all of it with its prompt. Turns are
    shared where all tokens up to their end are the same.
    """
    whole = with_branches(samples)
    states: list[int] = []
    parents: list[int] = []
    turns = iter(np.split(whole.turn_starts, np.cumsum(whole.turn_counts)[:-1]))
    masks = iter(np.split(whole.is_sampled, np.cumsum(whole.response_lengths)[:-1]))
    begins = iter(np.split(whole.branch_starts, np.cumsum(whole.branch_counts)[:-1]))
    for prompt, response in zip(whole.prompts(), whole.responses(), strict=True):
        ids = np.concatenate([prompt, response])
        sampled = np.flatnonzero(next(masks)) + len(prompt)
        starts = (next(turns) + len(prompt)).tolist()
        first, *others = next(begins).tolist()
        branches = [first, *(other + len(prompt) for other in others)]
        said: list[np.ndarray] = []  # each turn with all before it in its branch
        of_branch = -1
        for turn, (start, end) in enumerate(zip(starts, [*starts[1:], len(ids)], strict=True)):
            branch = max(begin for begin in branches if begin <= start)
            before = ids[branch:start]
            if branch == of_branch:
                parent = turn - 1
            else:
                parent = max(_begins(said, before), key=[*map(len, said)].__getitem__, default=-1)
            known = len(said[parent]) if parent >= 0 else 0
            states.append(_digest(before[known:], parent >= 0) if known < len(before) else 0)
            parents.append(parent)
            own = sampled[(sampled >= start) & (sampled < end)]
            said.append(ids[branch : int(own[-1]) + 1 if len(own) else start])
            of_branch = branch
    return np.array(states, np.uint64), np.array(parents, np.int32)


def _begins(lines: Sequence[np.ndarray], whole: np.ndarray) -> list[int]:
    """Returns the positions of the lines that `whole` begins with."""
    return [position for position, line in enumerate(lines) if np.array_equal(line, whole[: len(line)])]


def _digest(ids: np.ndarray, is_reply: bool) -> int:
    """Digests a reply, or a prompt with what follows it: the two are never equal."""
    content = np.ascontiguousarray(ids, np.int32).tobytes()
    digest = hashlib.blake2b(content, digest_size=8, person=b"" if is_reply else b"prompt")
    return int.from_bytes(digest.digest(), "big") | 1


def with_turns(samples: Samples) -> Samples:
    """Adds all columns of turns. Rows without them become one turn each."""
    absent = [name for name in ONE_TURN if getattr(samples, name) is None]
    return replace(samples, **{name: ONE_TURN[name](samples) for name in absent})


def with_branches(samples: Samples) -> Samples:
    """Adds the columns of branches. Rows without them become one branch each."""
    absent = [name for name in ONE_BRANCH if getattr(samples, name) is None]
    return replace(samples, **{name: ONE_BRANCH[name](samples) for name in absent})


def with_images(samples: Samples) -> Samples:
    """Adds the columns of images. Rows without them have none."""
    if samples.image_counts is not None:
        return samples
    return replace(samples, **{name: none(samples) for name, none in NO_IMAGES.items()})


def row_images(samples: Samples, row: int) -> tuple[RowImage, ...]:
    """Returns the images of a row, in the order of their tokens."""
    if samples.image_counts is None:
        return ()
    one = samples.rows(slice(row, row + 1))
    columns = zip(one.image_names, one.image_starts, one.image_tokens, one.image_grids, strict=True)
    return tuple(
        RowImage(name.decode(), int(start), int(tokens), tuple(grid.tolist())) for name, start, tokens, grid in columns
    )


def with_outcome(
    one: Samples, calls: Sequence[TurnCalls], rewards: Sequence[float], parts: Mapping[str, float], seconds: float
) -> Samples:
    """Adds the outcome of its turns to one row: the calls and the reward of each turn, in order.

    `seconds`: duration of the last turn's calls, if there are any. Raises DataError where the row has another number of
    turns.
    """
    one = with_turns(one)
    if not len(calls) == len(rewards) == one.turn_counts[0]:
        raise DataError(f"a response has {one.turn_counts[0]} turns, and calls are given for {len(calls)}")
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
    """Makes rows of the responses, in the given order. Raises DataError for an unknown stop reason."""
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
        "engine": [s.engine for s in samples],
        **_turns_of(samples),
        **_images_of(samples),
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
    """Returns the columns of turns; none where no sample has several turns, calls or context."""
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


def _images_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns the columns of images; none where no sample has one."""
    images = [image for sample in samples for image in sample.images]
    if not images:
        return {}
    return {
        "image_counts": [len(sample.images) for sample in samples],
        "image_names": [image.name.encode() for image in images],
        "image_starts": [image.start for image in images],
        "image_tokens": [image.tokens for image in images],
        "image_grids": [image.grid for image in images],
    }


def _stop_reason(sample: Sample, reason: str) -> int:
    if reason not in STOP_REASONS:
        known = ", ".join(STOP_REASONS)
        raise DataError(f"sample {sample.sample_id} has the unknown stop reason {reason!r}; known: {known}")
    return STOP_REASONS.index(reason)
