"""In an engine's process: responses of several turns, each until it has ended.

    request --> engine: a turn --> its calls --Acting--> answers --> context behind the response --+
                   ^                                                                               |
                   +---- all tokens so far, a seed of its own, what is left of the budget ---------+

The engine is asked with the ids of the stored row up to there, and nothing else: what it sampled is never decoded and
tokenised again. While tools work, the engine answers others. A row's environment begins while the first turn is
sampled. mrl.schedule.conversation decides, mrl.data.dialects reads and writes, mrl.environments acts,
mrl.schedule.segments puts together; here they meet.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mrl.data.dialects import ToolCall, dialect_of
from mrl.data.samples import STOP_REASONS, Samples, TurnCall, with_outcome
from mrl.environments.acting import Acting
from mrl.environments.environment_pool import CallAnswer, EnvironmentPool
from mrl.environments.tool import TurnsSpec
from mrl.flow.kept_tokens import going_on
from mrl.schedule.conversation import Budgets, Conversation, ConversationState, Stop
from mrl.schedule.segments import joined, with_context
from mrl.vllm.requests import Request, Sampling

UNANSWERED = "unanswered"


class Generates(Protocol):
    """What is needed of an engine."""

    def generate(self, requests: list[Request], sampling: Sampling) -> AsyncIterator[Samples]:
        """Yields responses as they finish."""


@dataclass
class _Record:
    """What the calls of a response came to: a list a turn."""

    calls: list[list[TurnCall]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, calls: Sequence[ToolCall], answers: Mapping[int, CallAnswer], known: Collection[str]) -> None:
        """Of a turn, with answers of those calls that were made; `known`: names that can be called."""
        self.calls.append([_call(call, answers.get(i), known) for i, call in enumerate(calls)])
        self.rewards.append(math.fsum(answers[i].reward for i in sorted(answers)))
        for i in sorted(answers):
            self.parts |= answers[i].parts


def _call(call: ToolCall, answer: CallAnswer | None, known: Collection[str]) -> TurnCall:
    name = call.name if call.name in known else ""
    if call.problem is not None:
        return TurnCall(name, "unread")
    if answer is None:
        return TurnCall(name, "not_called")
    return TurnCall(name, answer.reason, answer.seconds)


class Conversations:
    """Of one engine. Raises ConfigError where the tokenizer's family, tools or environments are not known."""

    def __init__(
        self, spec: TurnsSpec, tokenizer: Any, log_path: Path | None = None,
        clock: Callable[[], float] = time.monotonic, environment: Mapping[str, str] | None = None,
    ):  # fmt: skip
        """Starts a first process for tools and environments; what they print goes to `log_path`. `environment`: see
        EnvironmentPool.
        """
        self.spec = spec
        self._clock = clock
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
        self, engine: Generates, requests: Sequence[Request], sampling: Sampling
    ) -> AsyncIterator[Samples]:
        """Yields whole responses as they finish, one row each; nothing of those that were ended. Raises what the engine
        raises, and EnvironmentFault where no process for tools starts.
        """
        tasks = [self._started(engine, request, sampling) for request in requests]
        try:
            for task in asyncio.as_completed(map(_unless_ended, tasks)):
                made = await task
                if made is not None:
                    yield made
        finally:
            for task in tasks:
                task.cancel()

    def _started(self, engine: Generates, request: Request, sampling: Sampling) -> asyncio.Task:
        task = asyncio.create_task(self._whole(engine, request, sampling))
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

    async def _whole(self, engine: Generates, request: Request, sampling: Sampling) -> Samples:
        acting = Acting(self._pool, request.row, request.prompt_id)
        try:
            return await self._acting(engine, request, sampling, acting)
        finally:
            acting.close()

    async def _acting(self, engine: Generates, request: Request, sampling: Sampling, acting: Acting) -> Samples:
        spec, limit = self.spec, request.max_tokens or sampling.max_tokens
        budgets = Budgets(limit, spec.max_turns, spec.max_calls, spec.max_seconds, spec.max_answer_characters)
        talk = Conversation(budgets)
        record = _Record(parts=dict(acting.parts))
        made = None
        while talk.state is not ConversationState.ENDED:
            asked = replace(request, max_tokens=talk.max_tokens)
            before = talk.tokens
            made = await _added(engine, asked, made, sampling)
            cut_off = bool(made.truncated[0])
            turn = _last_turn(made)
            calls = self._dialect.calls(turn, _parameters(acting))
            added = int(made.response_lengths[0]) - before
            talk = talk.sampled(added, self._clock(), [call.problem for call in calls], cut_off)
            talk = await self._acted(talk, calls, acting, record)
            if talk.state is ConversationState.TELLING:
                talk, made = self._told(talk, made, turn)
        with self._counted():
            talk = await _with_environment(talk, acting)
        made = with_outcome(made, record.calls, record.rewards, record.parts, talk.acting_s)
        return replace(made, stop_reason=_numbers([STOP_REASONS.index(talk.stop)], made.stop_reason))

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
        if talk.state is ConversationState.SAMPLING:  # it was cut off, and goes on
            return talk
        if talk.state is ConversationState.ENDED:
            looked_at = calls if talk.stop is not Stop.LENGTH else ()
            record.add(looked_at, {}, acting.functions)
            return talk
        with self._counted():
            talk, answers = await self._answered(talk, calls, acting)
        record.add(calls, answers, acting.functions)
        if any(answer.failed for answer in answers.values()):
            return talk.failed()
        return talk.closed() if any(answer.end for answer in answers.values()) else talk

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
        """With the answers behind the response, where they leave room for more."""
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
    return None if task.cancelled() else task.result()


def _parameters(acting: Acting) -> dict[str, Any]:
    return {name: function["parameters"]["properties"] for name, function in acting.functions.items()}


async def _with_environment(talk: Conversation, acting: Acting) -> Conversation:
    """With the reason `environment` where it never began, though the model may not have acted on it."""
    if acting.ready is None:
        return talk
    begun = await asyncio.wrap_future(acting.ready)
    return talk.failed() if begun.failed else talk


async def _added(engine: Generates, request: Request, made: Samples | None, sampling: Sampling) -> Samples:
    """The response with what one more request adds to it."""
    rows = [batch async for batch in engine.generate([going_on(request, made)], sampling)]
    (more,) = rows
    return more if made is None else joined(made, more)


def _last_turn(made: Samples) -> np.ndarray:
    """int32: what was sampled of the last turn."""
    start = 0 if made.turn_starts is None else int(made.turn_starts[-1])
    (response,) = made.responses()
    return response[start:]


def _numbers(values: list[int], like: np.ndarray) -> np.ndarray:
    return np.array(values, like.dtype)
