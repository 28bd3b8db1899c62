"""Ending a run on a signal: the current phase stops where stopping is safe, the state is saved, the exit code says resumable."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from mrl.errors import Interrupted


class StopFlag:
    """Set by SIGTERM or SIGINT. A second signal ends the process at once, unsaved."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.held = False  # true while something is half-done

    def hold(self) -> None:
        """From here on something is half-done: `raise_if_set` waits for `release`."""
        self.held = True

    def release(self) -> None:
        """Nothing is half-done any more. Raises Interrupted if a signal came meanwhile."""
        self.held = False
        self.raise_if_set()

    def raise_if_set(self) -> None:
        """Raises Interrupted once a signal has come and nothing is half-done."""
        if self.signal is not None and not self.held:
            raise Interrupted(f"stopped by {signal.Signals(self.signal).name}")

    def _receive(self, number: int, _frame) -> None:
        if self.signal is not None:
            os._exit(Interrupted.exit_code)
        self.signal = number


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Handles SIGTERM and SIGINT for the time of the block."""
    flag = StopFlag()
    before = {number: signal.signal(number, flag._receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
