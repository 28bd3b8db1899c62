"""Views of metrics, each in its own thread: one that raises or hangs is left out, and training never waits for it."""

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
    """What shows metrics somewhere. All methods of one view are called from one thread; any of them may raise."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Shows the metrics of a finished step."""
        raise TypeError(f"{type(self).__name__} shows no metrics")

    def progress(self, phase: str, done: int, total: int) -> None:
        """Called often while a long phase goes on; shown where somebody looks, so by default not at all."""

    def generations(self, step: int, rows: Rows) -> None:
        """Shows a few validation responses; by default not at all."""

    def close(self) -> None:
        """Finishes; the view is not used any more."""


class ViewThread:
    """Runs one view's calls in order, in a daemon thread. What the view does to itself stays there."""

    def __init__(self, name: str, view: View, timeout_s: float) -> None:
        self.name = name
        self._view = view
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[Callable[[View], None] | None] = queue.SimpleQueue()
        self._since: float | None = None  # when the call under way began
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._left_out = False
        threading.Thread(target=self._serve, name=f"view-{name}", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the view still gets calls.

        One that has been busy with a single call for too long is given up here.
        """
        since = self._since
        if since is not None and time.monotonic() - since > self._timeout_s:
            self._leave_out(f"was busy with one call for more than trainer.logger_timeout_s ({self._timeout_s:g} s)")
        return not self._left_out

    def call(self, job: Callable[[View], None], droppable: bool = False) -> None:
        """Has the view do `job` when it comes to it.

        A job that may be dropped is dropped while another is under way or waits.
        """
        if not (droppable and (self._since is not None or not self._jobs.empty())):
            self._jobs.put(job)

    def ask_to_close(self) -> None:
        """The view closes once it has done what waits."""
        self._jobs.put(lambda view: view.close())
        self._jobs.put(None)

    def wait_closed(self, deadline: float) -> None:
        """Waits until the view has closed, or was left out, or the deadline (of time.monotonic) passes,
        when it is left to itself.
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
            except BaseException as error:  # SystemExit too: a service's client must not decide over the run
                self._leave_out(f"failed: {type(error).__name__}: {error}", error)
            self._since = None
        self._ended.set()

    def _leave_out(self, reason: str, error: BaseException | None = None) -> None:
        with self._lock:
            first = not self._left_out
            self._left_out = True
        if first:
            log.error(
                "trainer.logger: %s %s; it is left out from now on, metrics.jsonl goes on",
                self.name,
                reason,
                exc_info=error,
            )
