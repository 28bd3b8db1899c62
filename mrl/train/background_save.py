"""The one checkpoint that is written while training goes on: begun by one step, its end asked for at a later one."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from mrl.errors import EnvironmentFault


@dataclass(frozen=True)
class WriteResult:
    """How a write ended."""

    step: int
    seconds: float
    fault: str | None  # what the disk said; None: the checkpoint is complete


class BackgroundWrite:
    """Runs one write at a time in a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._running: tuple[int, Future[WriteResult]] | None = None

    @property
    def step(self) -> int | None:
        """The step whose write was begun and whose end was not asked for."""
        return self._running[0] if self._running else None

    def begin(self, step: int, write: Callable[[], None]) -> None:
        """Starts `write()`. Raises RuntimeError while the end of the one before was not asked for: it would be lost."""
        if self._running is not None:
            raise RuntimeError(f"step {step} is to be saved before it is known how the save of step {self.step} ended")
        self._running = step, self._thread.submit(_timed, step, write)

    def result(self, wait: bool) -> WriteResult | None:
        """How the write ended, once; None when there is none, or without `wait` when it goes on.

        A disk that does not take it is an answer; anything else that `write` raised is raised here.
        """
        if self._running is None or not (wait or self._running[1].done()):
            return None
        future, self._running = self._running[1], None
        return future.result()

    def close(self) -> None:
        """Waits for the write under way: what was begun is worth having, however the run ends. Says so when it fails."""
        try:
            result = self.result(wait=True)
            if result is not None and result.fault:
                print(f"error: step {result.step} is not saved: {result.fault}", flush=True)
        except Exception as error:  # the run is ending, most often for the same reason, and that one is raised
            print(f"error: a checkpoint is not saved: {error}", flush=True)
        self._thread.shutdown()


def _timed(step: int, write: Callable[[], None]) -> WriteResult:
    began, fault = time.perf_counter(), None
    try:
        write()
    except (OSError, EnvironmentFault) as error:
        fault = str(error)
    return WriteResult(step, time.perf_counter() - began, fault)
