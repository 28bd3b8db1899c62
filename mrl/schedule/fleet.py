"""Which engines may be sent requests, and which of those that are lost are started again.

               silence, error           exit                start
    READY -----------------> SUSPECT ---------> DEAD ------------------> STARTING
     ^  |                                        |                          |
     |  | another version                        | past the limit           | started
     |  v                                        v                          |
    STALE <-------------------+                RETIRED                      |
     |  ^                     +--------------------------------------------- +
     +--+ verified; then READY by the commit of that version, and by nothing else

An engine that is silent past its deadline is SUSPECT until its processes have ended: whatever it still says is late.
Every start of an engine is an epoch of its own; what an earlier one says is dropped, and counted. One that failed to
start is as lost as one that died.

An example, of two engines and a limit of 1: engine 1 dies at version 4, is started (epoch 1), is brought to version 5
with engine 0, and dies again at version 6. That is twice within 100 versions: it is RETIRED, and engine 0 goes on.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

WINDOW = 100  # finished steps in which restarts of an engine are counted


class EngineStatus(Enum):
    """What an engine is at. The value says what it means."""

    READY = "it serves the current weights"
    SUSPECT = "it is taken for lost, and its processes are being ended"
    DEAD = "its processes have ended"
    STARTING = "it was started again"
    STALE = "it lives, and holds no weights that may be sampled from"
    RETIRED = "it was lost too often, and is not started again"


READY, SUSPECT, DEAD, STARTING, STALE, RETIRED = EngineStatus
REACHED = (READY, STALE)  # they answer, and take part in weight syncs
LOSABLE = (READY, STALE, STARTING)


@dataclass
class _Engine:
    """What is known of one."""

    status: EngineStatus = READY
    epoch: int = 0
    has_served: bool = True  # in this epoch: requests of it may be under way there
    verified: int | None = None  # version that its digests were those of, since it served one
    restarts: list[int] = field(default_factory=list)  # the version at each
    why: str = ""  # it was lost last


class Fleet:
    """The engines of a run. A call that its engine's status does not allow raises ValueError."""

    def __init__(self, engines: Iterable[str], limit: int, least: int = 1, version: int = 0):
        """All are READY with `version`. `limit`: restarts of an engine in WINDOW steps; `least`: engines in use."""
        self._engines = {name: _Engine() for name in engines}
        self.limit = limit
        self.least = least
        self.version = version
        self.counts: Counter[str] = Counter()  # lost, restarted, late

    def spent_before(self, before: "Fleet") -> None:
        """Counts the restarts of `before` on, in whose places these engines stand: no engine gets one more."""
        for name, one in self._engines.items():
            one.restarts = list(before._engines[name].restarts)
            one.why = before._engines[name].why
            if before.status(name) is RETIRED:
                one.status = RETIRED
        self.counts = Counter(before.counts)

    def spent_at(self, engine: str, version: int) -> None:
        """An earlier start of the run started the engine again at this one."""
        self._engines[engine].restarts.append(version)

    def status(self, engine: str) -> EngineStatus:
        """What the engine is at now."""
        return self._engines[engine].status

    def why(self, engine: str) -> str:
        """It was lost last; empty of one that never was."""
        return self._engines[engine].why

    def epoch(self, engine: str) -> int:
        """Starts of it after the first."""
        return self._engines[engine].epoch

    def those(self, *statuses: EngineStatus) -> list[str]:
        """Engines that have one of these."""
        return [name for name, one in self._engines.items() if one.status in statuses]

    def serving(self) -> dict[str, int]:
        """Epochs of engines that hold requests, or may be sent some: also of those that weights change under."""
        return {
            name: one.epoch
            for name, one in self._engines.items()
            if one.status is READY or (one.status is STALE and one.has_served)
        }

    def shortage(self) -> str | None:
        """Why the run cannot go on; None while enough engines are left."""
        left = len(self._engines) - len(self.those(RETIRED))
        if left >= self.least:
            return None
        gone = "; ".join(f"{name}: {self._engines[name].why}" for name in self.those(RETIRED))
        return (
            f"{left} of {len(self._engines)} engines are left, fewer than rollout.min_engines {self.least}: each other "
            f"one was lost more than {self.limit} times in {WINDOW} steps (rollout.restart_limit); {gone}"
        )

    # ------------------------------------------------------------ events; of another epoch they are dropped and counted

    def progress(self, engine: str, epoch: int, answers: int = 1) -> bool:
        """Notes that an engine made tokens or answered, and returns whether that is of the engine as it is now.

        No engine is READY by it.
        """
        if self._is_of(engine, epoch) and self._engines[engine].status in LOSABLE:
            return True
        self.counts["late"] += answers
        return False

    def silence(self, engine: str, epoch: int, why: str = "") -> bool:
        """Notes that an engine made no token, or gave no answer, for too long; see `error`."""
        return self.error(engine, epoch, why)

    def error(self, engine: str, epoch: int, why: str = "") -> bool:
        """Takes an engine for lost and returns whether that is news.

        Its processes are to be ended, then `exit` is to be told.
        """
        one = self._engines[engine]
        if not self._is_of(engine, epoch) or one.status not in LOSABLE:
            return False
        one.why = why
        one.has_served = False
        one.verified = None
        one.status = SUSPECT
        self.counts["lost"] += 1
        return True

    def exit(self, engine: str, epoch: int, why: str = "") -> bool:
        """Notes that an engine's processes have ended."""
        if not self._is_of(engine, epoch) or self._engines[engine].status in (DEAD, RETIRED):
            return False
        self.error(engine, epoch, why)
        self._engines[engine].status = DEAD
        return True

    def start(self, engine: str) -> int | None:
        """The epoch that a DEAD engine is to be started for.

        None where the engine was lost too often: it is RETIRED.
        """
        one = self._in(engine, DEAD)
        one.restarts = [version for version in one.restarts if version > self.version - WINDOW]
        if len(one.restarts) >= self.limit:
            one.status = RETIRED
            return None
        one.restarts.append(self.version)
        one.epoch += 1
        one.status = STARTING
        return one.epoch

    def charge(self, engine: str, why: str) -> bool:
        """Starts an engine with everything else, which is one of its restarts; False where it has none left."""
        if self.status(engine) is STARTING:
            return True
        self.exit(engine, self.epoch(engine), why)
        return self.status(engine) is DEAD and self.start(engine) is not None

    def started(self, engine: str, epoch: int) -> bool:
        """Notes that an engine answers; it is to be brought to the current weights."""
        if not self._is_of(engine, epoch) or self._engines[engine].status is not STARTING:
            return False
        self._engines[engine].status = STALE
        self.counts["restarted"] += 1
        return True

    def verified(self, engine: str, epoch: int, version: int) -> bool:
        """Notes that digests showed the weights of `version` in an engine.

        It serves nothing until they are committed.
        """
        if not self._is_of(engine, epoch) or self._engines[engine].status not in REACHED:
            return False
        if version < self.version:
            raise ValueError(f"{engine} was brought to version {version}, and version {self.version} is current")
        self._engines[engine].status = STALE
        self._engines[engine].verified = version
        return True

    def committed(self, engine: str, epoch: int, version: int) -> bool:
        """Notes that an engine serves `version`, which is current from now on. Raises ValueError where it was not
        verified.
        """
        if not self._is_of(engine, epoch) or self._engines[engine].status is not STALE:
            return False
        one = self._engines[engine]
        if one.verified != version:
            raise ValueError(f"{engine} committed version {version}, and {one.verified} was verified")
        self.advance(version)
        one.status = READY
        one.has_served = True
        one.verified = None
        return True

    def advance(self, version: int) -> None:
        """Makes `version` current. An engine that serves another is STALE: it must not be sampled from."""
        if version < self.version:
            raise ValueError(f"version {version} comes after {self.version}")
        if version == self.version:
            return
        self.version = version
        for one in self._engines.values():
            if one.status is READY:
                one.status = STALE

    def rewind(self, version: int) -> None:
        """Ranks hold `version`, that of a checkpoint. Nobody serves, and all requests are given up.

        It may be later than what engines served last, where ranks went back for engines that were lost before a sync.
        What was counted stays: a restart of ranks gives no engine another one.
        """
        self.version = version
        for one in self._engines.values():
            if one.status in REACHED:
                one.status = STALE
                one.has_served = False
                one.verified = None

    def _is_of(self, engine: str, epoch: int) -> bool:
        """Whether an event is of the engine's last start."""
        return self._engines[engine].epoch == epoch

    def _in(self, engine: str, *statuses: EngineStatus) -> _Engine:
        one = self._engines[engine]
        if one.status not in statuses:
            raise ValueError(f"{engine} is {one.status.name}, not {' or '.join(status.name for status in statuses)}")
        return one
