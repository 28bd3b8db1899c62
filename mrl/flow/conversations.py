"""In an engine's process: responses of several turns, each until it has ended.

    request --> engine: a turn --> its calls --Acting--> answers --> context behind the response --+
                   ^                                                                               |
                   +---- all tokens so far, a seed of its own, what is left of the budget ---------+

The engine is asked with the ids of the stored row up to there, and nothing else: what it sampled is never decoded and
tokenised again. While tools work, the engine answers others. A row's environment begins while the first turn is
sampled. One that is held, at a border of the weights or because the engine gave it back, is a row that can go on, at
whichever engine gets it next: its environment is brought to where it was by the calls that the row has.
mrl.schedule.conversation decides, mrl.data.dialects reads and writes, mrl.environments acts, mrl.schedule.segments puts
together; here they meet.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from mrl.data.dialects import ToolCall, dialect_of
from mrl.data.samples import CALL_REASONS, STOP_REASONS, Samples, TurnCall, with_outcome, with_turns
from mrl.environments.acting import Acting
from mrl.environments.environment_pool import CallAnswer, EnvironmentPool, Step, reply_digest
from mrl.environments.tool import TurnsSpec
from mrl.exercised import rehearses
from mrl.flow.kept_tokens import going_on
from mrl.flow.made_up_calls import made_up_calls
from mrl.flow.turn_gate import TurnGate
from mrl.schedule.conversation import Budgets, Conversation, ConversationState, Stop
from mrl.schedule.segments import joined, with_context
from mrl.vllm.requests import Request, Sampling

_NONE: Mapping[int, Samples] = MappingProxyType({})
UNANSWERED = "unanswered"


class Generates(Protocol):
    """What is needed of an engine."""

    def generate(self, requests: list[Request], sampling: Sampling) -> AsyncIterator[Samples]:
        """Yields responses as they finish."""


@dataclass
class _Record:
    """The outcomes of a response's calls: a list a turn."""

    calls: list[list[TurnCall]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, kept: Samples) -> "_Record":
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
        """Of a turn, with answers of those calls that were made; `known`: names that can be called."""
        self.calls.append([_call(call, answers.get(i), known) for i, call in enumerate(calls)])
        self.rewards.append(math.fsum(answers[i].reward for i in sorted(answers)))
        for i in sorted(answers):
            self.parts |= answers[i].parts


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


class Conversations:
    """The conversations of one engine.

    Raises ConfigError where the tokenizer's family, tools or environments are not known.
    """

    def __init__(
        self, spec: TurnsSpec, tokenizer: Any, log_path: Path | None = None,
        clock: Callable[[], float] = time.monotonic, seats: int | None = None,
        environment: Mapping[str, str] | None = None,
    ):  # fmt: skip
        """Starts a first process for tools and environments; what they print goes to `log_path`. `seats`: requests that
        the engine has at most. `environment`: see EnvironmentPool.
        """
        self.spec = spec
        self._clock = clock
        self._gate = TurnGate(seats)
        self._pool = EnvironmentPool(spec.tools, spec.num_workers, spec.timeout_s, log_path, environment=environment)
        schemas = list(self._pool.offer.all_schemas)
        try:
            self._dialect = dialect_of(tokenizer, {**spec.template_arguments, "tools": schemas})
        except BaseException:
            self._pool.close()
            raise
        self._under_way: dict[asyncio.Task, int | None] = {}  # and the handles of their requests
        self._waiting = 0  # of them that wait for tools or environments

    @property
    def all_act(self) -> bool:
        """Whether there are some, and the engine has nothing to do for any of them."""
        return 0 < len(self._under_way) == self._waiting

    async def generate(
        self, engine: Generates, requests: Sequence[Request], sampling: Sampling, kept: Mapping[int, Samples] = _NONE
    ) -> AsyncIterator[Samples]:
        """Yields whole responses as they finish, one row each, what there is of those that are held, and nothing of
        those that were ended. `kept`: by sample_id, the row that a response goes on from.

        Raises what the engine raises, and EnvironmentFault where no process for tools starts.
        """
        tasks = [self._started(engine, request, sampling, kept.get(request.sample_id)) for request in requests]
        try:
            for task in asyncio.as_completed(map(_unless_ended, tasks)):
                made = await task
                if made is not None:
                    yield made
        finally:
            for task in tasks:
                task.cancel()

    def _started(self, engine: Generates, request: Request, sampling: Sampling, kept: Samples | None) -> asyncio.Task:
        task = asyncio.create_task(self._whole(engine, request, sampling, kept))
        self._under_way[task] = request.handle
        task.add_done_callback(self._under_way.pop)
        return task

    async def end(self, handles: Collection[int] | None = None) -> None:
        """Ends conversations by the handles of their requests, all for None, whatever they are at: the engine is asked
        for nothing more, and tools that work for them are killed. Nothing is yielded of them.
        """
        ended = [task for task, handle in self._under_way.items() if handles is None or handle in handles]
        for task in ended:
            task.cancel()
        if ended:
            await asyncio.wait(ended)

    async def _whole(self, engine: Generates, request: Request, sampling: Sampling, kept: Samples | None) -> Samples:
        acting = Acting(self._pool, request.row, request.prompt_id)
        try:
            acting.begin(() if kept is None else self._steps(kept, acting))
            return await self._acting(engine, request, sampling, acting, kept)
        finally:
            acting.close()

    def _steps(self, kept: Samples, acting: Acting) -> list[Step]:
        """What was done to the environment, in order: the calls are read again from what was sampled."""
        turns = enumerate(_sampled_turns(kept)[:-1], start=1)
        read = [call for number, turn in turns for call in self._calls(number, turn, acting)]
        pairs = zip(read, _calls_of(kept), strict=True)
        return [
            (call.name, call.arguments, told.reply)
            for call, told in pairs
            if call.name in acting.actions and told.reply
        ]

    def _calls(self, number: int, turn: np.ndarray, acting: Acting) -> list[ToolCall]:
        """What a turn, counted from 1, calls."""
        if not rehearses():
            return self._dialect.calls(turn, _parameters(acting))
        is_last = number >= self.spec.max_turns
        if is_last:
            return []
        return made_up_calls(acting.functions, number, self.spec.max_calls)

    def _begun(self, request: Request, sampling: Sampling, kept: Samples | None) -> Conversation:
        spec = self.spec
        budgets = Budgets(
            sampling.max_tokens, spec.max_turns, spec.max_calls, spec.max_seconds, spec.max_answer_characters
        )
        if kept is None:
            return Conversation(budgets, request.max_tokens)
        tokens = int(kept.response_lengths[0])
        border = None
        if request.max_tokens is not None:
            border = tokens + request.max_tokens
        acted_s = float(kept.turn_seconds.sum())
        return Conversation(budgets, border, tokens=tokens, turn=int(kept.turn_counts[0]), acted_s=acted_s)

    async def _acting(
        self, engine: Generates, request: Request, sampling: Sampling, acting: Acting, kept: Samples | None
    ) -> Samples:
        talk = self._begun(request, sampling, kept)
        record = _Record(parts=dict(acting.parts)) if kept is None else _Record.of(kept)
        made = kept
        while talk.state is ConversationState.SAMPLING:
            asked = replace(request, max_tokens=talk.max_tokens)
            before = talk.tokens
            async with self._gate.seat(is_first=made is kept):
                made = await _added(engine, asked, made, sampling)
            cut_off = bool(made.truncated[0])
            turn = _last_turn(made)
            calls = self._calls(talk.turn, turn, acting)
            added = int(made.response_lengths[0]) - before
            talk = talk.sampled(added, self._clock(), [call.problem for call in calls], cut_off)
            talk = await self._acted(talk, calls, acting, record)
            if talk.state is ConversationState.TELLING:
                talk, made = self._told(talk, made, turn)
        with self._counted():
            talk = await _with_environment(talk, acting)
        if len(record.calls) < with_turns(made).turn_counts[0]:  # the turn that it is at has called nothing yet
            record.add((), {}, acting.functions)
        made = with_outcome(made, record.calls, record.rewards, record.parts, talk.acting_s)
        stop = Stop.LENGTH if talk.state is ConversationState.HELD else talk.stop
        return replace(made, stop_reason=_numbers([STOP_REASONS.index(stop)], made.stop_reason))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Among those that wait for tools or environments."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    async def _acted(
        self, talk: Conversation, calls: Sequence[ToolCall], acting: Acting, record: _Record
    ) -> Conversation:
        """After all open calls are made and answered, or time is up; the turn is recorded once it has ended."""
        if talk.state is ConversationState.HELD:
            return talk
        if talk.state is ConversationState.ENDED:
            looked_at = ()
            if talk.stop is not Stop.LENGTH:
                looked_at = calls
            record.add(looked_at, {}, acting.functions)
            return talk
        with self._counted():
            talk, answers = await self._answered(talk, calls, acting)
        record.add(calls, answers, acting.functions)
        if any(answer.failed for answer in answers.values()):
            return talk.failed()
        if any(answer.end for answer in answers.values()):
            return talk.closed()
        return talk

    async def _answered(
        self, talk: Conversation, calls: Sequence[ToolCall], acting: Acting
    ) -> tuple[Conversation, dict[int, CallAnswer]]:
        """With the answers of the calls that were made, by their numbers; UNANSWERED where time was up before."""
        waiting: dict[asyncio.Future[CallAnswer], int] = {}
        answers: dict[int, CallAnswer] = {}
        for number in talk.open_calls:
            answer = acting.call(calls[number].name, calls[number].arguments)
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
            is_action = calls[number].name in acting.actions
            answers[number] = CallAnswer(UNANSWERED, "", seconds=talk.acting_s, failed=is_action)
        return talk, answers

    def _told(self, talk: Conversation, made: Samples, turn: np.ndarray) -> tuple[Conversation, Samples]:
        """Appends the answers to the response, where they leave room for more."""
        context = np.array(self._dialect.context(turn.tolist(), talk.answers), np.int32)
        after = talk.told(len(context))
        if after.stop is Stop.CONTEXT:
            return after, made
        return after, with_context(made, [context], np.array([len(talk.answers)]), np.array([talk.acting_s]))

    def close(self) -> None:
        """Ends the processes of tools and environments. Safe to call twice."""
        self._pool.close()


async def _unless_ended(task: asyncio.Task[Samples]) -> Samples | None:
    await asyncio.wait([task])
    if task.cancelled():
        return None
    return task.result()


def _parameters(acting: Acting) -> dict[str, Any]:
    return {name: function["parameters"]["properties"] for name, function in acting.functions.items()}


async def _with_environment(talk: Conversation, acting: Acting) -> Conversation:
    """The conversation, ended with the reason `environment` where the environment never began.

    The model may not have acted on it then.
    """
    if acting.ready is None:
        return talk
    begun = await asyncio.wrap_future(acting.ready)
    if begun.failed:
        return talk.failed()
    return talk


async def _added(engine: Generates, request: Request, made: Samples | None, sampling: Sampling) -> Samples:
    """The response with what one more request adds to it."""
    rows = [batch async for batch in engine.generate([going_on(request, made)], sampling)]
    (more,) = rows
    if made is None:
        return more
    return joined(made, more)


def _last_turn(made: Samples) -> np.ndarray:
    """int32: what was sampled of the last turn."""
    return _sampled_turns(made)[-1]


def _sampled_turns(made: Samples) -> list[np.ndarray]:
    """int32: what was sampled of each turn."""
    made = with_turns(made)
    (response,) = made.responses()
    starts = made.turn_starts[1:]
    parts = zip(np.split(response, starts), np.split(made.sampled, starts), strict=True)
    return [ids[sampled] for ids, sampled in parts]


def _numbers(values: list[int], like: np.ndarray) -> np.ndarray:
    return np.array(values, like.dtype)
