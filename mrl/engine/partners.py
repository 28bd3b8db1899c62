"""Tools and environments as the partner of a model in a conversation.

    begin --> what the engine is asked first --> sampled --> acted --> appended --> what it is asked next --> ...
                                                                              ended <-- whatever ended it

The partner moves the conversation (mrl.schedule.conversation) on, records its calls, and appends what the model reads
next. The loop, the engine's slots and the finished row are the business of mrl.engine.conversations.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from mrl.acting.answering import Acting
from mrl.acting.dialects import Dialect, ToolCall
from mrl.acting.environment_pool import CallAnswer, Step, reply_digest
from mrl.data.samples import CALL_REASONS, KnownImage, RowImage, Samples, TurnCall, with_turns
from mrl.engine.call_reader import CallReader
from mrl.engine.kept_tokens import going_on
from mrl.engine.requests import Request
from mrl.schedule.conversation import Conversation, ConversationState, Stop
from mrl.schedule.segments import with_context

UNANSWERED = "unanswered"


class Eyes(Protocol):
    """The part of mrl.data.image_reader.ImageReader that conversations need."""

    image_token: int

    def take(self, images: Sequence[bytes], first: int = 1) -> list[KnownImage]:
        """Reads encoded images, and stores them. `first`: the number of the first one in messages. Raises BadRow for
        one that is not read.
        """

    def expanded(self, ids: Sequence[int], images: Sequence[KnownImage]) -> tuple[list[int], tuple[RowImage, ...]]:
        """Returns tokens with all of each image's in the place of one, and where they are."""

    def file_of(self, name: str) -> Path:
        """Returns the file of an image in the store."""


class Line(NamedTuple):
    """A response under way: the request for all of it, and the row so far."""

    request: Request
    made: Samples | None = None


@dataclass
class CallRecord:
    """The outcomes of a response's calls, as one list a turn."""

    calls: list[list[TurnCall]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, kept: Samples) -> "CallRecord":
        """Returns the record of a row that is continued, without its current turn."""
        turns = kept.turn_calls.tolist()[:-1]
        calls = _calls_of(kept)
        ends = np.cumsum([0, *turns]).tolist()
        parts = zip(kept.part_names.tolist(), kept.part_values.tolist(), strict=True)
        return cls(
            [calls[start:end] for start, end in itertools.pairwise(ends)],
            kept.turn_rewards.tolist()[:-1],
            {name.decode(): value for name, value in parts},
        )

    def add(self, calls: Sequence[ToolCall], answers: Mapping[int, CallAnswer], known: Collection[str]) -> None:
        """Records a turn, with the answers to calls that were made. `known` are names that can be called."""
        self.calls.append([_call(call, answers.get(i), known) for i, call in enumerate(calls)])
        self.rewards.append(math.fsum(answers[i].reward for i in sorted(answers)))
        for i in sorted(answers):
            self.parts |= answers[i].parts

    def completed(self, turns: int) -> None:
        """Adds turns without calls, up to the given number of turns."""
        while len(self.calls) < turns:
            self.add((), {}, ())


def _call(call: ToolCall, answer: CallAnswer | None, known: Collection[str]) -> TurnCall:
    name = ""
    if call.name in known:
        name = call.name
    if call.problem is not None:
        return TurnCall(name, "unread")
    if answer is None:
        return TurnCall(name, "not_called")
    return TurnCall(name, answer.reason, answer.seconds, reply_digest(answer))


def _calls_of(row: Samples) -> list[TurnCall]:
    names = [name.decode() for name in row.call_names.tolist()]
    reasons = [CALL_REASONS[reason] for reason in row.call_reasons.tolist()]
    columns = zip(names, reasons, row.call_seconds.tolist(), row.call_replies.tolist(), strict=True)
    return [TurnCall(*each) for each in columns]


class ToolPartner:
    """Tools, and the row's environment, which starts while the first turn is sampled."""

    def __init__(
        self,
        acting: Acting,
        reader: CallReader,
        dialect: Dialect,
        clock: Callable[[], float],
        kept: Samples | None,
        eyes: Eyes | None = None,
    ):
        """`kept` is the row that the response continues. `eyes`: how the model reads images; None: it reads none."""
        self.record = CallRecord()
        self._acting = acting
        self._reader = reader
        self._dialect = dialect
        self._clock = clock
        self._kept = kept
        self._eyes = eyes
        self._shown: dict[int, Sequence[KnownImage]] = {}  # images of the turn's answers, by number of the call
        self._turn = np.zeros(0, np.int32)  # sampled tokens of the last turn
        self._calls: list[ToolCall] = []  # calls in that turn
        self._judged: CallAnswer | None = None  # the last reward

    @property
    def can_go_on(self) -> bool:
        """Whether the conversation can be held between two turns, and continue at another engine: it has no environment
        that cannot be restored.
        """
        return self._acting.is_repeatable

    def begin(self, line: Line) -> Line:
        """Starts the environment without waiting for it, and repeats what was done to it before. Returns the response
        so far.
        """
        if self._kept is None:
            self._acting.begin(())
            self.record = CallRecord(parts=dict(self._acting.parts))
        else:
            self._acting.begin(self._steps(self._kept))
            self.record = CallRecord.of(self._kept)
        return line

    def _steps(self, kept: Samples) -> list[Step]:
        """Returns what was done to the environment, in order. It reads the calls again from the sampled tokens."""
        turns = enumerate(sampled_turns(kept)[:-1], start=1)
        read = [call for number, turn in turns for call in self._read(number, turn)]
        pairs = zip(read, _calls_of(kept), strict=True)
        return [
            (call.name, call.arguments, answer.reply)
            for call, answer in pairs
            if call.name in self._acting.actions and answer.reply
        ]

    def _read(self, number: int, turn: np.ndarray) -> list[ToolCall]:
        return self._reader.calls(number, turn, self._acting.functions)

    def asked(self, talk: Conversation, line: Line) -> Request:
        """Returns the next request: all tokens so far, and how many it may add."""
        return going_on(replace(line.request, max_tokens=talk.max_tokens), line.made)

    def sampled(self, talk: Conversation, line: Line) -> Conversation:
        """Returns the conversation after a turn, and reads the turn's calls."""
        self._turn = last_turn(line.made)
        self._calls = self._read(talk.turn, self._turn)
        added = int(line.made.response_lengths[0]) - talk.tokens
        problems = [call.problem for call in self._calls]
        return talk.sampled(added, self._clock(), problems, bool(line.made.truncated[0]))

    async def acted(self, talk: Conversation) -> Conversation:
        """Returns the conversation after all open calls are made and answered, or time is up. Records the turn."""
        if talk.state is ConversationState.HELD:
            return talk
        known = self._acting.functions
        if talk.state is ConversationState.ENDED:
            looked_at = ()
            if talk.stop is not Stop.LENGTH:
                looked_at = self._calls
            self.record.add(looked_at, {}, known)
            return talk
        talk, answers = await self._answered(talk)
        self.record.add(self._calls, answers, known)
        if any(answer.failed for answer in answers.values()):
            return talk.failed()
        if any(answer.end for answer in answers.values()):
            return talk.closed()
        return talk

    async def _answered(self, talk: Conversation) -> tuple[Conversation, dict[int, CallAnswer]]:
        """Returns the conversation, and answers by the number of their call. UNANSWERED marks calls that ran out of
        time.
        """
        waiting: dict[asyncio.Future[CallAnswer], int] = {}
        answers: dict[int, CallAnswer] = {}
        self._shown = {}
        for number in talk.open_calls:
            answer = self._acting.call(self._calls[number].name, self._calls[number].arguments)
            waiting[asyncio.ensure_future(asyncio.wrap_future(answer))] = number
        try:
            while talk.state is ConversationState.ACTING:
                left_s = max(0.0, talk.deadline - self._clock())
                done, _ = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    number = waiting.pop(each)
                    answer = each.result()
                    talk = talk.answered(talk.turn, number, answer.text, self._clock())
                    if talk.stop is Stop.SECONDS:
                        waiting[each] = number  # it came too late
                    else:
                        answers[number] = answer
                        self._shown[number] = answer.images
                talk = talk.passed(self._clock())
        finally:
            for each in waiting:
                each.cancel()
        for number in waiting.values():
            is_action = self._calls[number].name in self._acting.actions
            answers[number] = CallAnswer(UNANSWERED, "", seconds=talk.acting_s, failed=is_action)
        return talk, answers

    def appended(self, talk: Conversation, line: Line) -> tuple[Conversation, Line]:
        """Appends the answers to the response."""
        shown = [self._shown.get(number, ()) for number in range(len(talk.answers))]
        context = self._dialect.context(self._turn.tolist(), talk.answers, list(map(len, shown)))
        images: Sequence[RowImage] = ()
        if any(shown):
            context, images = self._eyes.expanded(context, [image for each in shown for image in each])
        after = talk.appended(len(context))
        if after.stop is Stop.CONTEXT:
            return after, line
        return after, line._replace(made=followed(line.made, context, len(talk.answers), talk.acting_s, images))

    async def ended(self, talk: Conversation) -> Conversation:
        """Returns the conversation, as failed where the environment did not start.

        The model may have ended before it acted on the environment.
        """
        if self._acting.ready is None:
            return talk
        begun = await asyncio.wrap_future(self._acting.ready)
        if begun.failed:
            return talk.failed()
        judged = self._acting.judge() if talk.state is ConversationState.ENDED else None
        if judged is None:
            return talk
        self._judged = await asyncio.wrap_future(judged)
        if self._judged.failed:
            return talk.failed()
        return talk

    def whole(self, line: Line) -> Samples:
        """Returns the row. The record then covers its turns; the current one may have called nothing."""
        self.record.completed(int(with_turns(line.made).turn_counts[0]))
        if self._judged is not None:
            self.record.rewards[-1] += self._judged.reward
            self.record.parts |= self._judged.parts
        return line.made

    def close(self) -> None:
        """Ends the environment."""
        self._acting.close()


def followed(
    made: Samples, context: Sequence[int], calls: int, seconds: float, images: Sequence[RowImage] = ()
) -> Samples:
    """Appends context to the row. `calls` and `seconds` belong to the turn that ends. `images` as in with_context."""
    return with_context(made, [np.array(context, np.int32)], np.array([calls]), np.array([seconds]), [images])


def sampled_turns(made: Samples) -> list[np.ndarray]:
    """Returns the sampled tokens of each turn, int32 [tokens]."""
    made = with_turns(made)
    (response,) = made.responses()
    starts = made.turn_starts[1:]
    parts = zip(np.split(response, starts), np.split(made.sampled, starts), strict=True)
    return [ids[sampled] for ids, sampled in parts]


def last_turn(made: Samples) -> np.ndarray:
    """Returns the sampled tokens of the last turn, int32 [tokens]."""
    made = with_turns(made)
    (response,) = made.responses()
    start = int(made.turn_starts[-1])
    return response[start:][made.sampled[start:]]
