"""Tracks requests under way at engines, and responses as they come back: numbers, and references to blocks.

    driver                                              engine's process
    requests                     -- generate -------->
    numbers of what finished     <-- take_finished --   held a while for more: Outbox
    references to their blocks   <-- blocks ---------   objects of the engine's node; see ResponseStore

Where a response continues from earlier tokens, the engine's process fetches these by reference and returns both
together. Waking the driver for each single engine would take most of its time in a large step. So responses that have
come back wait for more, for a hundredth of their own time, and are taken together.
"""

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import ray

from mrl.cluster.calls import LostPeer, blame, unwrap
from mrl.cluster.process_logs import concerning, processes_of
from mrl.data.samples import SampleRows
from mrl.engine.outbox import FinishedRows
from mrl.engine.requests import EngineReading, Request, Sampling, engine_of
from mrl.errors import LostProcess, MrlError
from mrl.schedule.progress import ProgressWatch
from mrl.schedule.rate import Observation
from mrl.store.response_store import ResponseBlock, ResponseStore

REST_S = 0.5  # longest rest between two takes; each take costs the driver a few milliseconds
PHASE = "generation"
_CLIENTS = itertools.count()  # numbers of the clients in this process


class FinishedResponses(NamedTuple):
    """Responses of one engine that finished together."""

    samples: ResponseStore
    engine: str
    held_s: float = 0.0  # most seconds that their engine held them for others


class Server(Protocol):
    """A process that has requests, or may get some."""

    epoch: int  # of its engine
    worker: ray.actor.ActorHandle


class ServingEngines(Protocol):
    """The engines that there are. mrl.cluster.engine_fleet implements it."""

    def serving(self) -> Mapping[str, Server]:
        """Returns the processes that have requests or may get some, by name."""

    def loses(self, error: BaseException, asked: Mapping[str, int]) -> bool:
        """Whether the run can continue without the engines that an error names."""

    def late(self, engine: str, epoch: int, answers: int) -> None:
        """Counts answers that nobody reads."""


class FleetChange(NamedTuple):
    """Names of engines that were lost or came back. An engine that was restarted is in both lists."""

    gone: list[str]
    back: list[str]


class RequestStreams:
    """The requests that were sent to engines, by engine, and are not yet answered completely."""

    def __init__(
        self,
        fleet: ServingEngines,
        all_there: Callable[[], dict[str, ray.ObjectRef]],
        nodes: Mapping[str, str],
        limit_s: float,
    ):
        """`all_there` asks each engine whether all of it lives, and returns references to answers by name.

        `nodes` maps engines to their nodes. `limit_s` is the longest time that an engine may produce no token.
        """
        self._fleet = fleet
        self._all_there = all_there
        self._nodes = nodes
        self._serving = fleet.serving()
        self.progress = EngineProgress(lambda engine: self._worker(engine).reading.remote(), limit_s)
        self._client = next(_CLIENTS)
        self._numbers = itertools.count()
        self._calls: dict[str, dict[int, ray.ObjectRef]] = {}  # calls under way, by engine and number
        self._asked: dict[ray.ObjectRef, str] = {}  # open questions to engines about what finished
        # blocks that are being made, by the reference that says that they are complete
        self._coming: dict[ray.ObjectRef, FinishedResponses] = {}
        self._rests_until = 0.0  # in time.monotonic
        self._of_lost: dict[ray.ObjectRef, tuple[str, int]] = {}  # questions to lost engines, with engine and epoch

    @property
    def names(self) -> list[str]:
        """Engines that may be sent requests."""
        return list(self._serving)

    def _worker(self, engine: str) -> ray.actor.ActorHandle:
        return self._serving[engine].worker

    def follow(self) -> FleetChange:
        """Notices engines that were lost, whose answers are no longer awaited, and engines that are back."""
        for ref in self._there(list(self._of_lost)):
            self._count_late(ref, *self._of_lost.pop(ref))
        before = self._serving
        self._serving = self._fleet.serving()
        epochs = {name: serving.epoch for name, serving in self._serving.items()}
        gone = [name for name, serving in before.items() if epochs.get(name) != serving.epoch]
        for name in gone:
            self._drop(name, before[name].epoch)
        return FleetChange(gone, [name for name in epochs if name not in before or name in gone])

    def _drop(self, engine: str, epoch: int) -> None:
        self._calls.pop(engine, None)
        for ref in [ref for ref, name in self._asked.items() if name == engine]:
            del self._asked[ref]
            self._of_lost[ref] = (engine, epoch)
        self._coming = {ref: arrived for ref, arrived in self._coming.items() if arrived.engine != engine}

    def _there(self, refs: list[ray.ObjectRef], timeout_s: float = 0.0) -> list[ray.ObjectRef]:
        if refs:
            return ray.wait(refs, num_returns=len(refs), timeout=timeout_s, fetch_local=False)[0]
        return []

    def _count_late(self, ref: ray.ObjectRef, engine: str, epoch: int) -> None:
        with suppress(MrlError, ray.exceptions.RayError):
            finished = FinishedRows(*unwrap(ref, engine, PHASE))
            self._fleet.late(engine, epoch, sum(finished.sizes))

    @property
    def waiting_for(self) -> list[str]:
        """Engines that have requests, or responses that are not taken yet, each once."""
        made_by = (arrived.engine for arrived in self._coming.values())
        return list(dict.fromkeys([*self._calls, *made_by]))

    def send(
        self,
        engine: str,
        requests: Sequence[Request],
        sampling: Sampling,
        kept: Mapping[int, ResponseStore] | None = None,
    ) -> None:
        """Sends requests to one engine. `kept` maps a sample_id to the row that its response continues."""
        if not requests:
            return
        if engine not in self.waiting_for:
            self.progress.begin(engine)
        before = {number: (row.blocks[0], int(row.block_row[0])) for number, row in (kept or {}).items()}
        calls = self._calls.setdefault(engine, {})
        number = next(self._numbers)
        generate = self._worker(engine).generate
        calls[number] = generate.remote(self._client, number, list(requests), sampling, before)
        if len(calls) == 1:
            self._ask(engine)

    def _ask(self, engine: str) -> None:
        """Asks an engine for what finished. The answer comes with a finished response, or with the end of the last
        call.
        """
        self._asked[self._worker(engine).take_finished.remote(self._client, tuple(self._calls[engine]))] = engine

    def take(self, timeout_s: float) -> list[FinishedResponses]:
        """Returns all responses that have come back. It waits for the first, and rests a little after the previous
        take.

        Where an engine was lost that the run can do without, returns what came before; `follow` then reports it.
        Raises Interrupted where the run cannot do without it, because it died or produced no token for too long.
        """
        try:
            return self._finished_ones(timeout_s)
        except LostProcess as error:
            asked = {engine_of(name): serving.epoch for name, serving in self._serving.items()}
            arrived = self._rescued({engine_of(name) for name in processes_of(error)})
            if not self._fleet.loses(error, asked):
                raise
            return arrived

    def _rescued(self, lost: Collection[str]) -> list[FinishedResponses]:
        """Returns what lost engines have finished, of all their ranks, before their processes are ended."""
        for ref in self._there([ref for ref, name in self._asked.items() if engine_of(name) in lost], REST_S):
            engine = self._asked.pop(ref)
            with suppress(MrlError, ray.exceptions.RayError):
                finished = FinishedRows(*unwrap(ref, engine, PHASE))
                if finished.sizes:
                    self._fetch(engine, finished)
        rescued = []
        for ref in self._there([ref for ref, made in self._coming.items() if engine_of(made.engine) in lost], REST_S):
            arrived = self._coming.pop(ref)
            with suppress(MrlError, ray.exceptions.RayError):
                unwrap(ref, arrived.engine, PHASE)
                rescued.append(arrived)
        return rescued

    def _finished_ones(self, timeout_s: float) -> list[FinishedResponses]:
        self.progress.check(self.waiting_for)
        time.sleep(max(0.0, self._rests_until - time.monotonic()))
        for ref in self._ready(0.0) or self._ready(timeout_s):
            if ref in self._asked:
                self._hear(ref)
        return self._arrived(timeout_s)

    def _ready(self, timeout_s: float) -> list[ray.ObjectRef]:
        every = [*self._asked, *self._coming]
        return ray.wait(every, num_returns=1 if timeout_s else len(every), timeout=timeout_s, fetch_local=False)[0]

    def _hear(self, ref: ray.ObjectRef) -> None:
        """Takes an engine's answer, then asks for its blocks and for what finishes next."""
        engine = self._asked.pop(ref)
        finished = FinishedRows(*self._answer(ref, engine))
        self._rests_until = time.monotonic() + min(REST_S, finished.held_s)
        calls = self._calls[engine]
        for number in finished.ended:
            del calls[number]
        if finished.sizes:
            self._fetch(engine, finished)
        if calls:
            self._ask(engine)
        else:
            del self._calls[engine]

    def _fetch(self, engine: str, finished: FinishedRows) -> None:
        each = 1 + finished.routed
        blocks = self._worker(engine).blocks.options(num_returns=1 + each * len(finished.sizes))
        there, *made = blocks.remote(self._client, finished.ticket, finished.routed)
        responses = [ResponseBlock(*made[i : i + each], node=self._nodes[engine]) for i in range(0, len(made), each)]
        stored = ResponseStore.of_blocks(SampleRows.from_bytes(finished.rows), finished.sizes, responses)
        self._coming[there] = FinishedResponses(stored, engine, finished.held_s)

    def _arrived(self, timeout_s: float) -> list[FinishedResponses]:
        """Returns responses whose blocks are complete. From then on these outlive the engine's process.

        Blocks take a moment to make. An engine that hangs meanwhile does not delay those of others.
        """
        if not self._coming:
            return []
        every = list(self._coming)
        limit_s = min(timeout_s, REST_S)
        for ref in (ready := ray.wait(every, num_returns=len(every), timeout=limit_s, fetch_local=False)[0]):
            self._answer(ref, self._coming[ref].engine)
        return [self._coming.pop(ref) for ref in ready]

    def _answer(self, ref: ray.ObjectRef, engine: str) -> Any:
        try:
            return unwrap(ref, engine, PHASE)
        except LostPeer as error:  # the front end of the lost peer knows who it is, even if it had no request
            raise blame(error, self._all_there(), PHASE) from error


ASK_S = 5.0  # longest time between two questions to an engine
NONE_YET = -1


class EngineProgress:
    """When each engine last produced a token."""

    def __init__(
        self, ask: Callable[[str], ray.ObjectRef], limit_s: float, clock: Callable[[], float] = time.monotonic
    ):
        """`ask` requests the EngineReading of an engine, and returns a reference to it."""
        self._ask = ask
        self._clock = clock
        self._watch = ProgressWatch(limit_s)
        self._every = min(ASK_S, limit_s / 4)
        self._asked: dict[str, float] = {}
        self._to_come: dict[str, ray.ObjectRef] = {}
        self._readings: dict[str, EngineReading] = {}  # newest of each engine since `observed` last returned one
        self._observed_at = clock()
        self._preemptions: dict[str, int] = {}  # by engine, as far as `observed` has reported them
        self._is_paused = False
        self._resumed_at: float | None = None  # after the last `check`

    def begin(self, engine: str) -> None:
        """Starts the time of an engine that gets its first requests."""
        if engine in self._asked:
            self._forget(engine)

    def check(self, holding: Iterable[str]) -> None:
        """Raises LostProcess naming engines that produced no token for too long.

        `holding` are the engines that have requests.
        """
        if self._is_paused:
            return
        now = self._clock()
        if self._resumed_at is not None:
            self._watch.excuse(self._resumed_at)
            self._resumed_at = None
        holding = set(holding)
        for engine in self._asked.keys() - holding:
            self._forget(engine)
        for engine in holding - self._asked.keys():
            self._asked[engine] = now
            self._watch.note(engine, NONE_YET, True, now)
        self._take_answers(now)
        for engine in holding:
            if engine not in self._to_come and now - self._asked[engine] >= self._every:
                self._to_come[engine] = self._ask(engine)
                self._asked[engine] = now
        if late := self._watch.late(now):
            silent = LostProcess(f"generation: no token within {self._watch.limit_s:g} s from {', '.join(late)}")
            raise concerning(silent, *late)

    def observed(self, under_way: int) -> Observation | None:
        """Returns what the engines' meters said since the last report, or None where there is nothing to report.

        It reports at most once in the time in which each engine is asked, so a full cache counts once. `under_way` is
        the number of responses.
        """
        now = self._clock()
        readings = self._readings
        if self._is_paused or not readings or now - self._observed_at < self._every:
            return None
        preempted = {name: each.preemptions for name, each in readings.items()}
        more = sum(count - self._preemptions.get(name, 0) for name, count in preempted.items())
        fullest = max(each.cache_share for each in readings.values())
        self._preemptions |= preempted
        self._readings = {}
        self._observed_at = now
        return Observation(fullest, more, under_way)

    def pause(self) -> None:
        """Stops watching until `resume`, because all engines stand still for a known reason."""
        self._is_paused = True

    def resume(self) -> None:
        """Restarts the engines' time."""
        self._resumed_at = self._clock()  # the thread that checks excuses them, since it uses the watch
        self._is_paused = False

    def _forget(self, engine: str) -> None:
        del self._asked[engine]
        self._to_come.pop(engine, None)
        self._readings.pop(engine, None)
        self._watch.forget(engine)

    def _take_answers(self, now: float) -> None:
        """Takes the readings that have arrived. Failed engines are reported by other calls, with better messages."""
        for engine, answer in list(self._to_come.items()):
            if ray.wait([answer], timeout=0)[0]:
                del self._to_come[engine]
                try:
                    reading = ray.get(answer)
                except ray.exceptions.RayError:
                    continue
                self._watch.note(engine, reading.tokens, not reading.all_act, now)
                self._readings[engine] = reading
