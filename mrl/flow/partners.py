"""Who a model talks with while it answers, as a conversation sees them; tools and environments are one kind.

    begin --> what the engine is asked first --> sampled --> acted --> told --> what the engine is asked next --> ...
                                                                         ended <-- whatever ended it

A partner moves the conversation (mrl.schedule.conversation) by what it did, keeps the record of its calls, and appends
what the model reads next. The loop, slots of the engine and what becomes of a row are of mrl.flow.conversations.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np

from mrl.data.dialects import Dialect, ToolCall
from mrl.data.samples import CALL_REASONS, Samples, TurnCall, with_turns
from mrl.environments.acting import Acting
from mrl.environments.environment_pool import CallAnswer, Step, reply_digest
from mrl.flow.call_reader import CallReader
from mrl.flow.kept_tokens import going_on
from mrl.schedule.conversation import Conversation, ConversationState, Stop
from mrl.schedule.segments import with_context
from mrl.vllm.requests import Request

UNANSWERED = "unanswered"


class Line(NamedTuple):
    """A response on its way: the request for all of it, and the row so far."""

    request: Request
    made: Samples | None = None


@dataclass
class CallRecord:
    """The outcomes of a response's calls: a list a turn."""

    calls: list[list[TurnCall]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, kept: Samples) -> "CallRecord":
        """The record of a row that goes on, without the turn that it is at."""
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
        """Records a turn, with answers of those calls that were made; `known`: names that can be called."""
        self.calls.append([_call(call, answers.get(i), known) for i, call in enumerate(calls)])
        self.rewards.append(math.fsum(answers[i].reward for i in sorted(answers)))
        for i in sorted(answers):
            self.parts |= answers[i].parts

    def completed(self, turns: int) -> None:
        """Adds turns that called nothing, up to so many."""
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


class Partner(Protocol):
    """Who answers what the model says in one response."""

    record: CallRecord

    @property
    def leaves(self) -> asyncio.Future | None:
        """Is done once nobody waits for what is sampled; None: that is not known, and all is sampled."""

    async def begin(self, line: Line) -> Line | None:
        """What the engine is asked first; None: nothing, and the conversation has failed."""

    def asked(self, talk: Conversation, line: Line) -> Request:
        """The next request: all tokens so far, and what it may add."""

    def sampled(self, talk: Conversation, line: Line, asked: Request) -> Conversation:
        """The conversation after the engine has answered `asked`, of which `line` has the tokens."""

    def left(self, talk: Conversation) -> tuple[Conversation, Line]:
        """The conversation after nobody waited for what was asked, and the response without it."""

    async def acted(self, talk: Conversation) -> Conversation:
        """After what was called has been done, or time is up; the turn is recorded once it has ended."""

    def told(self, talk: Conversation, line: Line) -> tuple[Conversation, Line]:
        """With what the model reads next behind the response, where it leaves room for more."""

    async def ended(self, talk: Conversation) -> Conversation:
        """The conversation, with another reason where the partner has failed whatever ended it."""

    def whole(self, talk: Conversation, line: Line) -> Samples:
        """All that was said as one row, of whose turns the record then is."""

    def close(self) -> None:
        """Ends what was begun for the response, without waiting for it."""


class ToolPartner:
    """Tools, and the row's environment, which begins while the first turn is sampled."""

    leaves = None

    def __init__(
        self,
        acting: Acting,
        reader: CallReader,
        dialect: Dialect,
        clock: Callable[[], float],
        kept: Samples | None,
    ):
        """`kept`: the row that the response goes on from."""
        self.record = CallRecord()
        self._acting = acting
        self._reader = reader
        self._dialect = dialect
        self._clock = clock
        self._kept = kept
        self._turn = np.zeros(0, np.int32)  # what was sampled of the last one
        self._calls: list[ToolCall] = []  # in it

    async def begin(self, line: Line) -> Line:
        """Begins the environment without waiting for it, by what was done to it before."""
        if self._kept is None:
            self._acting.begin(())
            self.record = CallRecord(parts=dict(self._acting.parts))
        else:
            self._acting.begin(self._steps(self._kept))
            self.record = CallRecord.of(self._kept)
        return line

    def _steps(self, kept: Samples) -> list[Step]:
        """What was done to the environment, in order: the calls are read again from what was sampled."""
        turns = enumerate(sampled_turns(kept)[:-1], start=1)
        read = [call for number, turn in turns for call in self._read(number, turn)]
        pairs = zip(read, _calls_of(kept), strict=True)
        return [
            (call.name, call.arguments, told.reply)
            for call, told in pairs
            if call.name in self._acting.actions and told.reply
        ]

    def _read(self, number: int, turn: np.ndarray) -> list[ToolCall]:
        return self._reader.calls(number, turn, self._acting.functions)

    def asked(self, talk: Conversation, line: Line) -> Request:
        """The next request."""
        return going_on(replace(line.request, max_tokens=talk.max_tokens), line.made)

    def sampled(self, talk: Conversation, line: Line, asked: Request) -> Conversation:
        """The conversation after a turn, whose calls are read."""
        self._turn = sampled_turns(line.made)[-1]
        self._calls = self._read(talk.turn, self._turn)
        added = int(line.made.response_lengths[0]) - talk.tokens
        problems = [call.problem for call in self._calls]
        return talk.sampled(added, self._clock(), problems, bool(line.made.truncated[0]))

    def left(self, talk: Conversation) -> tuple[Conversation, Line]:
        """Raises RuntimeError: tools wait for whatever is sampled."""
        raise RuntimeError("tools do not leave a conversation")

    async def acted(self, talk: Conversation) -> Conversation:
        """After all open calls are made and answered."""
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
        """With the answers of the calls that were made, by their numbers; UNANSWERED where time was up before."""
        waiting: dict[asyncio.Future[CallAnswer], int] = {}
        answers: dict[int, CallAnswer] = {}
        for number in talk.open_calls:
            answer = self._acting.call(self._calls[number].name, self._calls[number].arguments)
            waiting[asyncio.ensure_future(asyncio.wrap_future(answer))] = number
        try:
            while talk.state is ConversationState.ACTING:
                left_s = max(0.0, talk.deadline - self._clock())
                done, _ = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    number = waiting.pop(each)
                    answers[number] = each.result()
                    talk = talk.answered(talk.turn, number, answers[number].text, self._clock())
                talk = talk.passed(self._clock())
        finally:
            for each in waiting:
                each.cancel()
        for number in waiting.values():
            is_action = self._calls[number].name in self._acting.actions
            answers[number] = CallAnswer(UNANSWERED, "", seconds=talk.acting_s, failed=is_action)
        return talk, answers

    def told(self, talk: Conversation, line: Line) -> tuple[Conversation, Line]:
        """With the answers behind the response."""
        context = self._dialect.context(self._turn.tolist(), talk.answers)
        after = talk.told(len(context))
        if after.stop is Stop.CONTEXT:
            return after, line
        return after, line._replace(made=followed(line.made, context, len(talk.answers), talk.acting_s))

    async def ended(self, talk: Conversation) -> Conversation:
        """The conversation, with the reason `environment` where the environment never began.

        The model may not have acted on it then.
        """
        if self._acting.ready is None:
            return talk
        begun = await asyncio.wrap_future(self._acting.ready)
        if begun.failed:
            return talk.failed()
        return talk

    def whole(self, talk: Conversation, line: Line) -> Samples:
        """The row as it is; the turn that it is at may have called nothing."""
        self.record.completed(int(with_turns(line.made).turn_counts[0]))
        return line.made

    def close(self) -> None:
        """Ends the environment."""
        self._acting.close()


def followed(made: Samples, context: Sequence[int], calls: int, seconds: float) -> Samples:
    """The row with context behind it; `calls` and `seconds` are of the turn that ends."""
    return with_context(made, [np.array(context, np.int32)], np.array([calls]), np.array([seconds]))


def sampled_turns(made: Samples) -> list[np.ndarray]:
    """int32: what was sampled of each turn."""
    made = with_turns(made)
    (response,) = made.responses()
    starts = made.turn_starts[1:]
    parts = zip(np.split(response, starts), np.split(made.sampled, starts), strict=True)
    return [ids[sampled] for ids, sampled in parts]
