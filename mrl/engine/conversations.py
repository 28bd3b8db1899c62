"""Runs conversations (responses of several turns) in an engine's process, each until it has ended.

    request --> engine: a turn --> its calls --Acting--> answers --> context behind the response --+
                   ^                                                                               |
                   +---- all tokens so far, a seed of its own, what is left of the budget ---------+

Each request has exactly the token ids of the row so far. Sampled tokens are never decoded and tokenized again. While
tools work, the engine answers other requests. A row's environment starts while the first turn is sampled. A response
can be held: at a weight version boundary, because the engine gave it back, or because vLLM's processes died. Then the
turn under way is lost. Any engine can continue the response later. Its environment is rebuilt by repeating the
calls in the row.

This file connects other parts: mrl.schedule.conversation decides, mrl.acting.dialects reads and writes,
mrl.acting acts, mrl.schedule.segments joins. The model talks with tools and environments (partners.py), or with an
agent at the endpoint (agents.py).
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from mrl.acting.answering import Acting
from mrl.acting.dialects import Dialect, dialect_of
from mrl.acting.environment import IMAGES
from mrl.acting.environment_pool import EnvironmentPool
from mrl.acting.tool import TurnsSpec
from mrl.data.samples import STOP_REASONS, KnownImage, Samples, with_outcome
from mrl.engine.agents import Agents, AgentSession
from mrl.engine.call_reader import CallReader, DialectReader
from mrl.engine.engine_calls import DEATH
from mrl.engine.partners import Eyes, Line, ToolPartner
from mrl.engine.requests import Request, Sampling
from mrl.schedule.conversation import Budgets, Conversation, ConversationState, Stop
from mrl.schedule.segments import joined

_NONE: Mapping[int, Samples] = MappingProxyType({})
Returned = TypeVar("Returned")
LAST_S = 1.0  # how long tools and environments may still answer once the engine is lost


class Generates(Protocol):
    """The part of an engine that conversations need."""

    def generate(self, requests: list[Request], sampling: Sampling) -> AsyncIterator[Samples]:
        """Yields responses as they finish."""


class EngineLoss:
    """The loss of an engine, from the first conversation on that notices it."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.over = asyncio.get_running_loop().create_future()  # done LAST_S later: nothing is awaited any more

    def note(self, error: Exception) -> None:
        """Remembers the first error of a lost engine."""
        if self.error is None:
            self.error = error
            asyncio.get_running_loop().call_later(LAST_S, self.over.set_result, None)


class Conversations:
    """The conversations of one engine.

    Raises ConfigError where the tokenizer's family, a tool or an environment is unknown.
    """

    def __init__(
        self,
        spec: TurnsSpec,
        tokenizer: Any,
        log_path: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        slots: int | None = None,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        reader: Callable[[Dialect, TurnsSpec], CallReader] = DialectReader,
        eyes: Eyes | None = None,
    ):
        """Starts a first process for tools, environments or agents, which prints to `log_path`.

        `slots` is the most requests that the engine computes at once. `environment` and `folder` go to EnvironmentPool.
        `reader` builds the reader of calls. `eyes`: how the model reads images; None: it reads none.
        """
        self._eyes = eyes
        self.spec = spec
        self._clock = clock
        self._gate = TurnGate(slots)
        self._agents: Agents | None = None
        self._pool = EnvironmentPool(
            spec.tools,
            spec.num_workers,
            spec.step_s,
            log_path,
            environment=environment,
            folder=folder,
            see=None if eyes is None else self._see,
        )
        try:
            schemas = list(self._pool.offer.all_schemas)
            self._dialect = dialect_of(tokenizer, {**spec.template_arguments, "tools": schemas})
            self._reader = reader(self._dialect, spec)
            if spec.tools.has_agent:
                self._agents = Agents(spec, self._pool, self._dialect, tokenizer, clock, eyes)
        except BaseException:
            self._pool.close()
            raise
        self._under_way: dict[asyncio.Task, int | None] = {}  # task -> handle of its request
        self._sessions: set[AgentSession] = set()
        self._waiting = 0  # tasks that wait for tools or environments
        self._losses: WeakKeyDictionary[Generates, EngineLoss] = WeakKeyDictionary()

    def _see(self, images: Sequence[bytes]) -> list[KnownImage]:
        """Reads images of an answer, and stores them. Raises BadRow for one that is not read, and where the template
        writes none into answers.
        """
        written = self._dialect.encoded([(self._dialect.image or "", True)])
        if written.count(self._eyes.image_token) != 1 or len(written) == 1:
            from mrl.data.row_files import BadRow

            raise BadRow("the model's chat template has no form for an image in an answer of a tool")
        return self._eyes.take(images)

    @property
    def all_act(self) -> bool:
        """Whether conversations are under way and all of them wait for tools, environments or agents."""
        waiting = self._waiting + sum(not session.is_sampling for session in self._sessions)
        return 0 < len(self._under_way) == waiting

    async def generate(
        self, engine: Generates, requests: Sequence[Request], sampling: Sampling, kept: Mapping[int, Samples] = _NONE
    ) -> AsyncIterator[Samples]:
        """Yields whole responses as they finish, one row each.

        A held response is yielded as far as it got. One that was ended yields nothing. `kept` maps a sample_id to the
        row that its response continues. Raises what the engine raises, and EnvironmentFault where no process for tools
        starts. The loss of an engine is raised after all that could be held.
        """
        loss = self._losses.setdefault(engine, EngineLoss())
        tasks = [self._started(engine, request, sampling, kept.get(request.sample_id)) for request in requests]
        try:
            for task in asyncio.as_completed(map(_unless_ended, tasks)):
                made = await task
                if made is not None:
                    yield made
        finally:
            for task in tasks:
                task.cancel()
        if loss.error is not None:
            raise loss.error

    def _started(self, engine: Generates, request: Request, sampling: Sampling, kept: Samples | None) -> asyncio.Task:
        task = asyncio.create_task(self._whole(engine, request, sampling, kept))
        self._under_way[task] = request.handle
        task.add_done_callback(self._under_way.pop)
        return task

    async def end(self, handles: Collection[int] | None = None) -> None:
        """Ends the conversations of the given request handles, or all for None. They yield nothing.

        The engine gets no more requests of theirs, and tools that work for them are killed.
        """
        ended = [task for task, handle in self._under_way.items() if handles is None or handle in handles]
        for task in ended:
            task.cancel()
        if ended:
            await asyncio.wait(ended)

    async def _whole(
        self, engine: Generates, request: Request, sampling: Sampling, kept: Samples | None
    ) -> Samples | None:
        """Returns the response. None where the engine was lost and it has no turn more than the row it continues."""
        turns = _Turns(engine, sampling, self._gate)
        try:
            if self._agents is not None:
                return await self._with_agent(self._agents, turns, replace(request, row=self._row_of(request)))
            acting = Acting(self._pool, self._row_of(request), request.prompt_id)
            partner = ToolPartner(acting, self._reader, self._dialect, self._clock, kept, self._eyes)
            try:
                return await self._talked(turns, request, partner, kept)
            finally:
                partner.close()
        except DEATH as error:
            self._losses[engine].note(error)
            return None

    def _row_of(self, request: Request) -> Mapping[str, Any] | None:
        """Returns the request's row, with the files of its prompt's images."""
        if request.row is None or not request.images:
            return request.row
        return {**request.row, IMAGES: [str(self._eyes.file_of(image.name)) for image in request.images]}

    async def _with_agent(self, agents: Agents, turns: "_Turns", request: Request) -> Samples | None:
        """Returns the response that an agent brings about. It cannot be continued: None where the engine was lost."""
        session = agents.session(request, turns.sampling, turns)
        self._sessions.add(session)
        try:
            if await _unless_done(session.run(), self._losses[turns.engine].over) is None:
                return None
        finally:
            self._sessions.discard(session)
            session.close()
        return session.row() or await self._unspoken(turns, request)

    def _begun(self, request: Request, sampling: Sampling, kept: Samples | None) -> Conversation:
        spec = self.spec
        budgets = Budgets(
            sampling.max_tokens, spec.max_turns, spec.max_calls, spec.max_seconds, spec.max_answer_characters
        )
        if kept is None:
            return Conversation(budgets, request.max_tokens)
        tokens = int(kept.response_lengths[0])
        version_boundary = None
        if request.max_tokens is not None:
            version_boundary = tokens + request.max_tokens
        acted_s = float(kept.turn_seconds.sum())
        return Conversation(budgets, version_boundary, tokens=tokens, turn=int(kept.turn_counts[0]), acted_s=acted_s)

    async def _talked(
        self, turns: "_Turns", request: Request, partner: ToolPartner, kept: Samples | None
    ) -> Samples | None:
        talk = self._begun(request, turns.sampling, kept)
        line = partner.begin(Line(request, kept))
        while talk.state is ConversationState.SAMPLING:
            after = await self._turn(turns, partner, talk, line, is_first=line.made is kept)
            if after is None:
                is_new = line.made is not kept and request.max_tokens is not None and partner.can_go_on
                return _row(partner, talk.held(), line) if is_new else None
            talk, line = after
        with self._counted():
            ended = await _unless_done(partner.ended(talk), self._losses[turns.engine].over)
        if ended is None:
            return None
        return _row(partner, ended, line)

    async def _turn(
        self, turns: "_Turns", partner: ToolPartner, talk: Conversation, line: Line, is_first: bool
    ) -> tuple[Conversation, Line] | None:
        """Returns conversation and response after one more turn. None where the engine was lost during it."""
        loss = self._losses[turns.engine]
        try:
            line = await turns.added(partner.asked(talk, line), line, is_first)
        except DEATH as error:
            loss.note(error)
            return None
        talk = partner.sampled(talk, line)
        with self._counted():
            acted = await _unless_done(partner.acted(talk), loss.over)
        if acted is None:
            return None
        if acted.state is ConversationState.ANSWERED:
            return partner.appended(acted, line)
        return acted, line

    async def _unspoken(self, turns: "_Turns", request: Request) -> Samples:
        """Returns the row of a conversation that failed before it began. It has one token, because every row needs a
        version.
        """
        line = await turns.added(replace(request, max_tokens=1), Line(request), is_first=True)
        return _with_stop(with_outcome(line.made, [()], [0.0], {}, 0.0), Stop.ENVIRONMENT)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts a conversation among those that wait for tools or environments."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Ends the processes of tools, environments and agents. Safe to call twice."""
        if self._agents is not None:
            self._agents.close()
        self._pool.close()


async def _unless_ended(task: asyncio.Task[Samples | None]) -> Samples | None:
    await asyncio.wait([task])
    if task.cancelled():
        return None
    return task.result()


async def _unless_done(call: Coroutine[Any, Any, Returned], end: asyncio.Future) -> Returned | None:
    """Returns what the call returns, or None once `end` is done. The call is then cancelled."""
    task = asyncio.ensure_future(call)
    try:
        if not end.done():
            await asyncio.wait([task, end], return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
    if task.cancelled():
        return None
    return task.result()


def _row(partner: ToolPartner, talk: Conversation, line: Line) -> Samples:
    made = partner.whole(line)
    record = partner.record
    made = with_outcome(made, record.calls, record.rewards, record.parts, talk.acting_s)
    return _with_stop(made, Stop.LENGTH if talk.state is ConversationState.HELD else talk.stop)


class _Turns:
    """One engine, which samples turns of one conversation."""

    def __init__(self, engine: Generates, sampling: Sampling, gate: "TurnGate"):
        self.engine = engine
        self.sampling = sampling
        self._gate = gate

    async def added(self, asked: Request, line: Line, is_first: bool) -> Line:
        """Returns the response with what one more request adds to it. Waits for a slot of the engine."""
        async with self._gate.slot(is_first=is_first):
            rows = [batch async for batch in self.engine.generate([asked], self.sampling)]
        (more,) = rows
        if line.made is None:
            own_seed = np.array([line.request.seed], more.seed.dtype)
            return line._replace(made=replace(more, seed=own_seed))
        return line._replace(made=joined(line.made, more))


def _with_stop(made: Samples, stop: Stop) -> Samples:
    return replace(made, stop_reason=np.array([STOP_REASONS.index(stop)], made.stop_reason.dtype))


class TurnGate:
    """Slots for requests of one engine. Later turns go first, then earlier arrivals."""

    def __init__(self, slots: int | None):
        """`slots` is their number; None sets no limit."""
        self._free = slots
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def slot(self, is_first: bool) -> AsyncIterator[None]:
        """Waits for a slot. `is_first` says that this engine has sampled nothing of the conversation yet."""
        if self._free is None:
            yield
            return
        await self._take(is_first)
        try:
            yield
        finally:
            self._give()

    async def _take(self, is_first: bool) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (is_first, next(self._numbers), turn))
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # cancelled after it got a slot
                self._give()
            raise

    def _give(self) -> None:
        """Gives the slot to the next request that still waits."""
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
