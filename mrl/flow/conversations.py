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
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
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

    def add(
        self, calls: Sequence[ToolCall], most: int, answers: Mapping[int, CallAnswer], known: Collection[str]
    ) -> None:
        """Records a turn whose calls were made, at `most` of them; `known`: names that can be called."""
        self.calls.append([_call(call, i < most, answers.get(i), known) for i, call in enumerate(calls)])
        self.rewards.append(math.fsum(answers[i].reward for i in sorted(answers)))
        for i in sorted(answers):
            self.parts |= answers[i].parts

    def add_none(self) -> None:
        """Records a turn in which no call was made."""
        self.calls.append([])
        self.rewards.append(0.0)


def _call(call: ToolCall, is_made: bool, answer: CallAnswer | None, known: Collection[str]) -> TurnCall:
    name = ""
    if call.name in known:
        name = call.name
    if call.problem is not None:
        return TurnCall(name, "unread")
    if answer is None:
        return TurnCall(name, "unanswered" if is_made else "not_called")
    return TurnCall(name, answer.reason, answer.seconds)


class Conversations:
    """The conversations of one engine.

    Raises ConfigError where the tokenizer's family, tools or environments are not known.
    """

    def __init__(
        self, spec: TurnsSpec, tokenizer: Any, log_path: Path | None = None, clock: Callable[[], float] = time.monotonic
    ):
        """Starts a first process for tools and environments; what they print goes to `log_path`."""
        self.spec = spec
        self._clock = clock
        self._pool = EnvironmentPool(spec.tools, spec.num_workers, spec.timeout_s, log_path)
        schemas = list(self._pool.offer.all_schemas)
        self._dialect = dialect_of(tokenizer, {**spec.template_arguments, "tools": schemas})

    async def generate(
        self, engine: Generates, requests: Sequence[Request], sampling: Sampling
    ) -> AsyncIterator[Samples]:
        """Yields whole responses as they finish, one row each. Raises what the engine raises, and EnvironmentFault
        where no process for tools starts.
        """
        tasks = [asyncio.create_task(self._whole(engine, request, sampling)) for request in requests]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()

    async def _whole(self, engine: Generates, request: Request, sampling: Sampling) -> Samples:
        acting = Acting(self._pool, request.row, request.prompt_id)
        try:
            return await self._acting(engine, request, sampling, acting)
        finally:
            acting.close()

    async def _acting(self, engine: Generates, request: Request, sampling: Sampling, acting: Acting) -> Samples:
        spec = self.spec
        limit = request.max_tokens or sampling.max_tokens
        budgets = Budgets(limit, spec.max_turns, spec.max_calls, spec.max_seconds, spec.max_answer_characters)
        talk = Conversation(budgets, request.seed, self._clock())
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
        talk = await _with_environment(talk, acting)
        made = with_outcome(made, record.calls, record.rewards, record.parts, talk.acting_s)
        return replace(made, stop_reason=_numbers([STOP_REASONS.index(talk.stop)], made.stop_reason))

    async def _acted(
        self, talk: Conversation, calls: Sequence[ToolCall], acting: Acting, record: _Record
    ) -> Conversation:
        """The conversation once all open calls are made and answered, or time is up.

        The turn is recorded once it has ended.
        """
        if talk.state is ConversationState.SAMPLING:  # it was cut off, and goes on
            return talk
        if talk.state is ConversationState.ENDED:
            record.add_none()
            return talk
        most = talk.budgets.calls
        talk, answers = await self._answered(talk, calls, acting)
        record.add(calls, most, answers, acting.functions)
        if any(answer.failed for answer in answers.values()):
            return talk.failed()
        if any(answer.end for answer in answers.values()):
            return talk.closed()
        return talk

    async def _answered(
        self, talk: Conversation, calls: Sequence[ToolCall], acting: Acting
    ) -> tuple[Conversation, dict[int, CallAnswer]]:
        """The conversation with the answers that came in time, and these by the numbers of their calls."""
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
        return replace(talk, stop=Stop.ENVIRONMENT)
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
    start = 0
    if made.turn_starts is not None:
        start = int(made.turn_starts[-1])
    (response,) = made.responses()
    return response[start:]


def _numbers(values: list[int], like: np.ndarray) -> np.ndarray:
    return np.array(values, like.dtype)
