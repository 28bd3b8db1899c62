"""Ends a run on a signal. The current phase stops where that is safe, and the exit code means resumable.

    first signal     nothing is half-done: the phase under way is given up; else the step is finished
                     then the step is saved, where the last save's time fits into the grace
    second signal    }  all processes of the run are killed, what they left is removed, the driver ends: nothing is
    end of grace     }  written any more, so that no file is torn

The grace is the time that Ray gives a stopped job before it kills it (RAY_JOB_STOP_WAIT_TIME_S). Elsewhere it is
unlimited.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mrl.cluster.job import GRACE
from mrl.errors import Interrupted

END_S = 1.0  # reserve before the end of a grace, for killing the rest


def grace_of_the_job() -> float:
    """Returns the seconds between SIGTERM and SIGKILL in a Ray job; infinite if they are unknown."""
    try:
        seconds = float(os.environ.get(GRACE, "inf"))
    except ValueError:
        return math.inf
    if seconds > 0:
        return seconds
    return math.inf


class StopFlag:
    """Set by SIGTERM or SIGINT. A second signal, or the end of the grace, ends the process at once, unsaved."""

    def __init__(self, grace_s: float = math.inf) -> None:
        self.signal: int | None = None
        self.on_hold = False  # true while something is half-done
        self.leave_nothing: Callable[[], object] = lambda: None  # called before the process ends at once
        self._grace_s = grace_s
        self._ends_at = math.inf  # in time.monotonic
        self._timer: threading.Timer | None = None
        self._is_ending = False

    def defer_signals(self) -> None:
        """Holds signals back while something is half-done: `raise_if_set` waits for `deliver_signals`."""
        self.on_hold = True

    def deliver_signals(self) -> None:
        """Delivers signals again, because nothing is half-done. Raises Interrupted if one has come meanwhile."""
        self.on_hold = False
        self.raise_if_set()

    def raise_if_set(self) -> None:
        """Raises Interrupted if a signal has come and nothing is half-done."""
        if self.signal is not None and not self.on_hold:
            raise Interrupted(f"stopped by {signal.Signals(self.signal).name}")

    def left_s(self) -> float:
        """Returns the seconds until the process is ended at once; infinite before a signal or without a grace."""
        return max(0.0, self._ends_at - time.monotonic())

    def _receive(self, number: int, _frame) -> None:
        if self.signal is not None:
            self._end_at_once()
        self.signal = number
        if self._grace_s < math.inf:
            rest_s = max(0.0, self._grace_s - END_S)
            self._ends_at = time.monotonic() + rest_s
            self._timer = threading.Timer(rest_s, self._end_at_once)
            self._timer.daemon = True
            self._timer.start()

    def _forget_the_grace(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end_at_once(self) -> None:
        if self._is_ending:  # further signals change nothing
            return
        self._is_ending = True
        with suppress(Exception):  # the next start of the run removes the rest
            self.leave_nothing()
        os._exit(Interrupted.exit_code)


@contextmanager
def stop_on_signals(flag: StopFlag) -> Iterator[StopFlag]:
    """Sets the flag on SIGTERM and SIGINT during the block."""
    before = {number: signal.signal(number, flag._receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield flag
    finally:
        flag._forget_the_grace()
        for number, handler in before.items():
            signal.signal(number, handler)
