"""Tracks which engines may be sent requests, and which lost engines are started again.

                   error                exit                start
    READY -----------------> SUSPECT ---------> DEAD ------------------> STARTING
     ^  |                                        |                          |
     |  | another version                        | past the limit           | started
     |  v                                        v                          |
    STALE <-------------------+                RETIRED                      |
     |  ^                     +--------------------------------------------- +
     +--+ verified; then READY by the commit of that version, and by nothing else

An engine that is silent past its deadline is SUSPECT until its processes have ended. Everything that it still says
comes late. Every start of an engine is a new epoch. Events of an earlier epoch are dropped and counted. An engine that
fails to start counts as lost.

Example: two engines and a limit of 1. Engine 1 dies at version 4 and is started (epoch 1). It is synced to version 5
together with engine 0, and dies again at version 6. These are two losses within 100 versions: it is RETIRED, and engine
0 goes on.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

WINDOW = 100  # finished steps within which restarts of an engine are counted


class EngineStatus(Enum):
    """The state of an engine. The value says what it means."""

    READY = "it serves the current weights"
    SUSPECT = "it counts as lost, and its processes are being ended"
    DEAD = "its processes have ended"
    STARTING = "it was started again"
    STALE = "it runs, but holds no weights that may be sampled from"
    RETIRED = "it was lost too often, and is not started again"


READY, SUSPECT, DEAD, STARTING, STALE, RETIRED = EngineStatus
REACHED = (READY, STALE)  # they answer, and take part in weight syncs
LOSABLE = (READY, STALE, STARTING)


@dataclass
class _Engine:
    """The state of one engine."""

    status: EngineStatus = READY
    epoch: int = 0
    has_served: bool = True  # in this epoch: it may have running requests of it
    verified: int | None = None  # version that its digests have verified, since it last served one
    restarts: list[int] = field(default_factory=list)  # the version at each restart
    why: str = ""  # reason of the last loss


class Fleet:
    """The engines of a run. A call that is not allowed in an engine's state raises ValueError."""

    def __init__(self, engines: Iterable[str], limit: int, least: int = 1, version: int = 0):
        """All engines start READY with `version`. `limit`: restarts of an engine in WINDOW steps; `least`: number of
        engines that must stay in use.
        """
        self._engines = {name: _Engine() for name in engines}
        self.limit = limit
        self.least = least
        self.version = version
        self.counts: Counter[str] = Counter()  # lost, restarted, late

    def spent_before(self, before: "Fleet") -> None:
        """Takes over the restarts that `before` counted, so that no engine gets an additional one."""
        for name, one in self._engines.items():
            one.restarts = list(before._engines[name].restarts)
            one.why = before._engines[name].why
            if before.status(name) is RETIRED:
                one.status = RETIRED
        self.counts = Counter(before.counts)

    def spent_at(self, engine: str, version: int) -> None:
        """Counts a restart of the engine in an earlier start of the run."""
        self._engines[engine].restarts.append(version)

    def status(self, engine: str) -> EngineStatus:
        """Returns the engine's state."""
        return self._engines[engine].status

    def why(self, engine: str) -> str:
        """Returns the reason of the engine's last loss; "" if it was never lost."""
        return self._engines[engine].why

    def epoch(self, engine: str) -> int:
        """Returns how often the engine was started after the first start."""
        return self._engines[engine].epoch

    def those(self, *statuses: EngineStatus) -> list[str]:
        """Returns the engines in one of these states."""
        return [name for name, one in self._engines.items() if one.status in statuses]

    def serving(self) -> dict[str, int]:
        """Returns the epochs of engines that have or may get requests, including those whose weights are changing."""
        return {
            name: one.epoch
            for name, one in self._engines.items()
            if one.status is READY or (one.status is STALE and one.has_served)
        }

    def shortage(self) -> str | None:
        """Returns why the run cannot go on; None while enough engines are left."""
        left = len(self._engines) - len(self.those(RETIRED))
        if left >= self.least:
            return None
        gone = "; ".join(f"{name}: {self._engines[name].why}" for name in self.those(RETIRED))
        return (
            f"{left} of {len(self._engines)} engines are left, fewer than rollout.min_engines {self.least}: each of "
            f"the others was lost more than {self.limit} times in {WINDOW} steps (rollout.restart_limit); {gone}"
        )

    # -------------------------------------------------------- events; those of another epoch are dropped and counted

    def progress(self, engine: str, epoch: int, answers: int = 1) -> bool:
        """Records that an engine made tokens or answered. Returns whether its present epoch did.

        This makes no engine READY.
        """
        if self._is_of(engine, epoch) and self._engines[engine].status in LOSABLE:
            return True
        self.counts["late"] += answers
        return False

    def error(self, engine: str, epoch: int, why: str = "") -> bool:
        """Marks an engine as lost: it died, or was silent too long. Returns whether this is new.

        The caller then ends its processes and calls `exit`.
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
        """Records that an engine's processes have ended."""
        if not self._is_of(engine, epoch) or self._engines[engine].status in (DEAD, RETIRED):
            return False
        self.error(engine, epoch, why)
        self._engines[engine].status = DEAD
        return True

    def start(self, engine: str) -> int | None:
        """Returns the epoch for which a DEAD engine is to be started.

        Returns None if it was lost too often; then it is RETIRED.
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
        """Starts an engine together with everything else, which counts as a restart. Returns False if none is left."""
        if self.status(engine) is STARTING:
            return True
        self.exit(engine, self.epoch(engine), why)
        return self.status(engine) is DEAD and self.start(engine) is not None

    def started(self, engine: str, epoch: int) -> bool:
        """Records that an engine answers. It must be synced to the current weights next."""
        if not self._is_of(engine, epoch) or self._engines[engine].status is not STARTING:
            return False
        self._engines[engine].status = STALE
        self.counts["restarted"] += 1
        return True

    def verified(self, engine: str, epoch: int, version: int) -> bool:
        """Records that digests have verified the weights of `version` in an engine.

        It serves nothing until they are committed.
        """
        if not self._is_of(engine, epoch) or self._engines[engine].status not in REACHED:
            return False
        if version < self.version:
            raise ValueError(f"{engine} was brought to version {version}, but version {self.version} is current")
        self._engines[engine].status = STALE
        self._engines[engine].verified = version
        return True

    def committed(self, engine: str, epoch: int, version: int) -> bool:
        """Records that an engine serves `version`, which is current now. Raises ValueError if it was not verified."""
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
        """Makes `version` current. An engine that serves another is STALE and must not be sampled from."""
        if version < self.version:
            raise ValueError(f"version {version} comes after {self.version}")
        if version == self.version:
            return
        self.version = version
        for one in self._engines.values():
            if one.status is READY:
                one.status = STALE

    def rewind(self, version: int) -> None:
        """Sets the version to that of a checkpoint, which ranks now hold. No engine serves, and all requests are
        dropped.

        It may be newer than the version last served, if ranks went back because engines were lost before a sync. Counts
        stay: a restart of ranks gives no engine another restart.
        """
        self.version = version
        for one in self._engines.values():
            if one.status in REACHED:
                one.status = STALE
                one.has_served = False
                one.verified = None

    def _is_of(self, engine: str, epoch: int) -> bool:
        """Tells whether an event belongs to the engine's last start."""
        return self._engines[engine].epoch == epoch

    def _in(self, engine: str, *statuses: EngineStatus) -> _Engine:
        one = self._engines[engine]
        if one.status not in statuses:
            raise ValueError(f"{engine} is {one.status.name}, not {' or '.join(status.name for status in statuses)}")
        return one
