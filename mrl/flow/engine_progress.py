"""Watches for engines that hold requests and produce no tokens.

A long response is not late, but an engine that stands still is. An engine whose responses all wait for tools has no
tokens to produce.

Each engine with requests is asked from time to time for its meters. One says how many tokens it has produced; no answer
counts as none. The other says how full its KV cache is, which controls the rate of requests.
"""

import time
from collections.abc import Callable, Iterable

import ray

from mrl.errors import LostProcess
from mrl.remote.process_logs import concerning
from mrl.schedule.progress import ProgressWatch
from mrl.schedule.rate import Observation
from mrl.vllm.requests import EngineReading

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
