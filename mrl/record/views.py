"""Views of metrics, each in its own thread.

A view that raises or hangs is left out, and training never waits for it.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

log = logging.getLogger(__name__)

Metrics = Mapping[str, float]
Rows = Sequence[Mapping[str, Any]]  # validation responses: `input`, `output`, `score`, `gts`, ...


class View:
    """Shows metrics somewhere. All methods of one view are called from one thread, and each may raise."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Shows the metrics of a finished step."""
        raise TypeError(f"{type(self).__name__} shows no metrics")

    def progress(self, phase: str, done: int, total: int) -> None:
        """Shows the progress of a long phase. Called often; by default it does nothing."""

    def generations(self, step: int, rows: Rows) -> None:
        """Shows a few validation responses; by default it does nothing."""

    def close(self) -> None:
        """Finishes. The view is not used afterwards."""


class ViewThread:
    """Runs one view's calls in order in a daemon thread, which contains all errors of the view."""

    def __init__(self, name: str, view: View, timeout_s: float) -> None:
        self.name = name
        self._view = view
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[Callable[[View], None] | None] = queue.SimpleQueue()
        self._since: float | None = None  # when the current call began
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._left_out = False
        threading.Thread(target=self._serve, name=f"view-{name}", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Tells whether the view still gets calls.

        A view that has spent too long on a single call is given up here.
        """
        since = self._since
        if since is not None and time.monotonic() - since > self._timeout_s:
            self._leave_out(f"was busy with one call for more than trainer.logger_timeout_s ({self._timeout_s:g} s)")
        return not self._left_out

    def call(self, job: Callable[[View], None], droppable: bool = False) -> None:
        """Queues `job` for the view.

        A droppable job is dropped while another one runs or waits.
        """
        if not (droppable and (self._since is not None or not self._jobs.empty())):
            self._jobs.put(job)

    def ask_to_close(self) -> None:
        """Lets the view close after its waiting jobs."""
        self._jobs.put(lambda view: view.close())
        self._jobs.put(None)

    def wait_closed(self, deadline: float) -> None:
        """Waits until the view has closed, was left out, or the deadline (of time.monotonic) passes.

        After the deadline the view is abandoned.
        """
        while not self._ended.wait(min(0.2, max(deadline - time.monotonic(), 0.0))):
            if not self.alive:
                return
            if time.monotonic() >= deadline:
                return self._leave_out("did not finish in time at the end of the run")

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None and not self._left_out:
            self._since = time.monotonic()
            try:
                job(self._view)
            except BaseException as error:  # SystemExit too: a service's client must not end the run
                self._leave_out(f"failed: {type(error).__name__}: {error}", error)
            self._since = None
        self._ended.set()

    def _leave_out(self, reason: str, error: BaseException | None = None) -> None:
        with self._lock:
            first = not self._left_out
            self._left_out = True
        if first:
            log.error(
                "trainer.logger: %s %s; it is left out from now on; metrics.jsonl continues",
                self.name,
                reason,
                exc_info=error,
            )
