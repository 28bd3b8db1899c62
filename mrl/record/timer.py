"""Wall time of a step's phases."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType


class PhaseTimer:
    """Seconds by phase: `with timer("gen"): ...`. A phase entered again adds up; phases may nest, each counts its own whole time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Times the block, also when it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - start

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of the phases that have ended, in the order in which they first did; a live, read-only view."""
        return MappingProxyType(self._seconds)

    def metrics(self) -> dict[str, float]:
        """`timing_s/PHASE` of every phase that has ended."""
        return timing_metrics(self._seconds)


def timing_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    """`timing_s/PHASE` for seconds by phase."""
    return {f"timing_s/{phase}": value for phase, value in seconds.items()}
