"""Engines that hold requests and make no tokens.

A response of twenty thousand tokens is not late; an engine that stands still is. One whose responses all wait for tools
has none to make.

Each engine that has requests is asked from time to time for its meters: how many tokens it has made (one that does not
answer has made none), and how full its KV cache is, which is what the rate of requests goes by.
"""

import time
from collections.abc import Callable, Iterable

import ray

from mrl.errors import LostProcess
from mrl.remote.process_logs import concerning
from mrl.schedule.progress import ProgressWatch
from mrl.schedule.rate import Observation
from mrl.vllm.requests import EngineReading

ASK_S = 5.0  # between two questions, where the limit is longer than some of them
NONE_YET = -1


class EngineProgress:
    """When each engine last made a token."""

    def __init__(
        self, ask: Callable[[str], ray.ObjectRef], limit_s: float, clock: Callable[[], float] = time.monotonic
    ):
        """`ask`: an engine for its EngineReading, an answer to come."""
        self._ask = ask
        self._clock = clock
        self._watch = ProgressWatch(limit_s)
        self._every = min(ASK_S, limit_s / 4)
        self._asked: dict[str, float] = {}
        self._to_come: dict[str, ray.ObjectRef] = {}
        self._readings: dict[str, EngineReading] = {}  # of engines that have requests, since `observed` said something
        self._observed_at = clock()
        self._preemptions: dict[str, int] = {}  # of each engine, that were told
        self._is_paused = False

    def begin(self, engine: str) -> None:
        """Begins an engine's time: it gets requests and had none."""
        if engine in self._asked:
            self._forget(engine)

    def check(self, holding: Iterable[str]) -> None:
        """`holding`: engines that have requests. Raises LostProcess naming those that made no token for too long."""
        if self._is_paused:
            return
        now = self._clock()
        holding = set(holding)
        for engine in self._asked.keys() - holding:
            self._forget(engine)
        for engine in holding - self._asked.keys():
            self._asked[engine] = now
            self._watch.note(engine, NONE_YET, True, now)
        self._take_answers(now)
        for engine in holding:
            if engine not in self._to_come and now - self._asked[engine] >= self._every:
                self._to_come[engine], self._asked[engine] = self._ask(engine), now
        if late := self._watch.late(now):
            silent = LostProcess(f"generation: no token within {self._watch.limit_s:g} s from {', '.join(late)}")
            raise concerning(silent, *late)

    def observed(self, under_way: int) -> Observation | None:
        """What engines' meters said since this was last told; None where nothing is to be told.

        It is told at most once in the time in which each of them is asked: a cache that is full counts once.
        `under_way`: responses.
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
        """All engines stand still for a reason, and are not watched until `resume`."""
        self._is_paused = True

    def resume(self) -> None:
        """Begins the engines' time anew."""
        self._is_paused = False
        self._watch.excuse(self._clock())

    def _forget(self, engine: str) -> None:
        del self._asked[engine]
        self._to_come.pop(engine, None)
        self._readings.pop(engine, None)
        self._watch.forget(engine)

    def _take_answers(self, now: float) -> None:
        """An engine that failed tells so where it is asked what finished, and better there."""
        for engine, answer in list(self._to_come.items()):
            if ray.wait([answer], timeout=0)[0]:
                del self._to_come[engine]
                try:
                    reading = ray.get(answer)
                except ray.exceptions.RayError:
                    continue
                self._watch.note(engine, reading.tokens, not reading.all_act, now)
                self._readings[engine] = reading
