"""Engines of a run as processes. Lost engines are ended and started again, by the states of mrl/schedule/fleet.py.

    generation's thread   loses                 others, or the restarted engine, repeat its requests
    the loop              loses, collect        notices engines that have started
                          proven, committed     syncs them to the ranks' weights: cluster/weight_sync.py

Both threads may report the same loss, one of them after the engine was started again. So each error is compared with
the epochs at the time of the call.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import ray

from mrl.cluster.calls import unwrap
from mrl.cluster.process_logs import concerning, processes_of
from mrl.engine.requests import engine_of
from mrl.errors import LostProcess, MrlError
from mrl.schedule.fleet import DEAD, REACHED, READY, STALE, Fleet

PHASE = "starting an engine again"
LOOK_S = 0.1  # between two checks whether an engine has started
# records a restarted engine: its name, the version, why it was lost
Note = Callable[[str, int, str], None]


def _nowhere(engine: str, version: int, why: str) -> None:
    """Does nothing, for a run that is never resumed."""


class ServingProcess(NamedTuple):
    """A process that has requests, or may get some."""

    epoch: int  # of its engine
    worker: ray.actor.ActorHandle


class EngineProcesses(Protocol):
    """The processes of engines, by the engines' numbers. RolloutGroup implements it."""

    names: list[str]
    workers: list[ray.actor.ActorHandle]
    engine_ranks: int

    def end(self, engine: int) -> None:
        """Kills the engine's processes, and those below them."""

    def start_again(self, engine: int) -> dict[str, ray.ObjectRef]:
        """Makes new processes. Returns references, by name, to answers that come once they serve."""

    def note_devices(self, engine: int) -> None:
        """Records an engine's node and devices, because new processes may be elsewhere.

        Raises EnvironmentFault if that node has other software.
        """


class EngineFleet:
    """The engines of a run and their states.

    Until `restart` is called, no engine is started again, and every loss ends the run.
    """

    def __init__(self, processes: EngineProcesses, start_s: float, clock: Callable[[], float] = time.monotonic):
        """`start_s` is the time limit for an engine's start."""
        self._processes = processes
        self._start_s = start_s
        self._clock = clock
        self._lock = threading.RLock()
        self._engines = list(dict.fromkeys(map(engine_of, processes.names)))
        self.states = Fleet(self._engines, limit=0)
        self._note: Note = _nowhere
        self.may_start = True  # False while ranks use the engines' devices
        self._starts: dict[str, tuple[float, dict[str, ray.ObjectRef]]] = {}  # deadline and answers of each start
        self._away: dict[str, float] = {}  # engines that do not serve, and the time from which this is not counted yet
        self._seconds = 0.0
        self._counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()

    def restart(self, limit: int, least: int, note: Note = _nowhere) -> None:
        """Allows restarts of lost engines, as Fleet counts them. A `limit` of 0 allows none.

        `note` records each restart.
        """
        self.states.limit = limit
        self.states.least = least
        self._note = note

    def spent_at(self, restarts: Iterable[tuple[str, int]]) -> None:
        """Counts restarts in earlier starts of the run, each with its version. A new start grants no further ones."""
        for engine, version in restarts:
            if engine in self._engines:
                self.states.spent_at(engine, version)

    def continue_from(self, before: "EngineFleet") -> None:
        """Takes over the counts of `before`, whose engines these replace.

        Engines that were retired there stay retired.
        """
        self.states.spent_before(before.states)
        self._away = dict(before._away)
        self._seconds = before._seconds
        self._counts = before._counts
        self._reported = before._reported

    def charge(self, error: BaseException) -> None:
        """Starts the engines that the error names together with everything else, which counts as a restart of each.

        Raises the error if one has no restart left.
        """
        with self._lock:
            for engine in dict.fromkeys(map(engine_of, processes_of(error))):
                if engine in self._engines and not self._charge(engine, str(error)):
                    raise error

    def _charge(self, engine: str, why: str) -> bool:
        before = self.states.epoch(engine)
        may_start = self.states.charge(engine, why)
        if self.states.epoch(engine) != before:
            self._note_start(engine)
        return may_start

    def _note_start(self, engine: str) -> None:
        self._note(engine, self.states.version, self.states.why(engine))

    # ------------------------------------------------------------ which engines are present

    def epochs(self) -> dict[str, int]:
        """Returns the current epoch of each engine, for `loses`."""
        with self._lock:
            return {engine: self.states.epoch(engine) for engine in self._engines}

    def starts(self, engines: Iterable[int]) -> dict[int, int]:
        """Returns the current epoch of these engines. A restarted engine has no former connections."""
        with self._lock:
            return {engine: self.states.epoch(self._engines[engine]) for engine in engines}

    def serving(self) -> dict[str, ServingProcess]:
        """Returns the processes that have requests or may get some, by name."""
        with self._lock:
            epochs = self.states.serving()
            each = zip(self._processes.names, self._processes.workers, strict=True)
            found = ((name, engine_of(name), worker) for name, worker in each)
            return {name: ServingProcess(epochs[engine], worker) for name, engine, worker in found if engine in epochs}

    def reached(self) -> set[int]:
        """Returns the numbers of engines that answer and take part in weight syncs."""
        with self._lock:
            return self._numbers(self.states.those(*REACHED))

    def stale(self) -> set[int]:
        """Returns the numbers of engines that need the current weights."""
        with self._lock:
            return self._numbers(self.states.those(STALE))

    @property
    def none_ready(self) -> bool:
        """Tells whether no engine generates."""
        with self._lock:
            return not self.states.those(READY)

    @property
    def version(self) -> int:
        """The version of the current weights."""
        return self.states.version

    def _numbers(self, engines: Iterable[str]) -> set[int]:
        return {self._engines.index(engine) for engine in engines}

    # ------------------------------------------------------------ losses and starts

    def loses(self, error: BaseException, asked: Mapping[str, int]) -> bool:
        """Ends the engines that an error names and starts them again. Returns whether the run can go on meanwhile.

        `asked` are the epochs at the time of the call. Raises LostProcess if too few engines are left.
        """
        names = list(dict.fromkeys(map(engine_of, processes_of(error))))
        if not self.states.limit or not isinstance(error, LostProcess) or not names:
            return False
        if not set(names) <= set(self._engines):
            return False
        with self._lock:
            for engine in names:
                if asked.get(engine) == self.states.epoch(engine):
                    self._lose(engine, str(error))
        return True

    def _lose(self, engine: str, why: str) -> None:
        epoch = self.states.epoch(engine)
        if not self.states.error(engine, epoch, why):
            return
        self._away.setdefault(engine, self._clock())
        self._starts.pop(engine, None)
        print(f"{engine} is lost: {why}", flush=True)
        self._processes.end(self._engines.index(engine))
        self.states.exit(engine, epoch)
        if self.may_start:
            self._start(engine)

    def _start(self, engine: str) -> None:
        if self.states.start(engine) is None:
            print(f"{engine} was lost {self.states.limit + 1} times, and is not started again", flush=True)
            if why := self.states.shortage():
                raise concerning(LostProcess(why), engine)
            return
        self._note_start(engine)
        answers = self._processes.start_again(self._engines.index(engine))
        self._starts[engine] = (self._clock() + self._start_s, answers)

    def collect(self) -> None:
        """Notices engines that have started, and starts those that may start. Called by the loop's thread.

        Raises LostProcess if too few are left.
        """
        with self._lock:
            if self.may_start:
                for engine in self.states.those(DEAD):
                    self._start(engine)
            for engine, (late_at, answers) in list(self._starts.items()):
                self._look_at(engine, late_at, answers)

    def hold_starts(self, poll: Callable[[], None]) -> None:
        """Waits until no engine is starting. After that none is started until `allow_starts`.

        `poll` may raise, which ends the wait. Raises LostProcess if too few are left.
        """
        while True:
            with self._lock:
                self.collect()
                if not self._starts:
                    self.may_start = False
                    return
            poll()
            time.sleep(LOOK_S)

    def end_starts(self) -> None:
        """Ends engines that are starting. None is started until `allow_starts`."""
        with self._lock:
            self.may_start = False
            for engine in list(self._starts):
                del self._starts[engine]
                self._processes.end(self._engines.index(engine))
                self.states.exit(engine, self.states.epoch(engine))

    def allow_starts(self) -> None:
        """Frees the engines' devices for engines, so that `collect` starts those that were lost meanwhile."""
        with self._lock:
            self.may_start = True

    @property
    def none_starts(self) -> bool:
        """Tells whether no engine is starting."""
        with self._lock:
            return not self._starts

    def _look_at(self, engine: str, late_at: float, answers: dict[str, ray.ObjectRef]) -> None:
        refs = list(answers.values())
        there = ray.wait(refs, num_returns=len(refs), timeout=0)[0]
        try:
            for name, ref in answers.items():
                if ref in there:
                    unwrap(ref, name, PHASE)
            if len(there) == len(refs):
                self._processes.note_devices(self._engines.index(engine))
                del self._starts[engine]
                self.states.started(engine, self.states.epoch(engine))
                print(f"{engine} has started again", flush=True)
            elif self._clock() > late_at:
                self._lose(engine, f"it did not start within {self._start_s:g} s")
        except (MrlError, ray.exceptions.RayError) as error:
            self._lose(engine, str(error))

    # ------------------------------------------------------------ weights

    def proven(self, engines: Iterable[int], version: int) -> None:
        """Records that digests have verified the weights of `version` in these engines."""
        with self._lock:
            for engine in map(self._engines.__getitem__, engines):
                self.states.verified(engine, self.states.epoch(engine), version)

    def committed(self, engines: Iterable[int], version: int) -> None:
        """Records that these engines serve `version`, which becomes current even if no engine is left."""
        with self._lock:
            self.states.advance(version)
            for engine in map(self._engines.__getitem__, engines):
                if self.states.committed(engine, self.states.epoch(engine), version) and engine in self._away:
                    self._seconds += self._clock() - self._away.pop(engine)
                    print(f"{engine} serves again, with the weights of step {version}", flush=True)

    def rewind(self, version: int) -> None:
        """Records that ranks hold the weights of `version` again, and that every engine has dropped its requests."""
        with self._lock:
            self.states.rewind(version)

    # ------------------------------------------------------------ what is counted

    def count(self, what: str, number: int) -> None:
        """Counts requests_again or quarantined of the step."""
        with self._lock:
            self._counts[what] += number

    def late(self, engine: str, epoch: int, answers: int) -> None:
        """Counts answers of an engine that was lost, which are ignored."""
        with self._lock:
            self.states.progress(engine_of(engine), epoch, answers)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call."""
        with self._lock:
            now = self._clock()
            seconds = self._seconds + sum(now - since for since in self._away.values())
            self._away = dict.fromkeys(self._away, now)
            self._seconds = 0.0
            counts = self._counts + self.states.counts - self._reported
            self._reported = Counter(self.states.counts)
            self._counts = Counter()
            return {
                "fleet/lost": float(counts["lost"]),
                "fleet/restarted": float(counts["restarted"]),
                "fleet/requests_again": float(counts["requests_again"]),
                "fleet/late_answers": float(counts["late"]),
                "fleet/quarantined": float(counts["quarantined"]),
                "fleet/engines_ready": float(len(self.states.those(READY))),
                "fleet/seconds_lost": seconds,
            }
