"""Scores in processes that can be killed: a sample that hangs, crashes or exhausts memory affects only itself.

Threads and alarms are not enough: a regular expression with exponential time holds the interpreter lock, and no
exception interrupts it.
"""

import atexit
import json
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mrl.errors import ConfigError, EnvironmentFault
from mrl.reward.items import OK, OUT_OF_MEMORY, RewardItem, RewardResult, RewardSpec
from mrl.reward.process import ForeignLine, WorkerFailure, WorkerProcess, parsed

ITEMS_AT_ONCE = 64  # sent to a worker together; with more, a slow item would delay others
START_ATTEMPTS = 3
POLL_S = 0.5


def check_function(spec: RewardSpec, timeout_s: float = 60.0) -> None:
    """Loads the function in a child process, which then ends.

    Raises ConfigError with the reason if that fails or takes too long.
    """
    worker = WorkerProcess(spec)
    try:
        worker.wait_ready(timeout_s)
    except WorkerFailure as failure:
        raise ConfigError(f"the reward function ({_origin(spec)}) could not be loaded: {failure.detail}") from failure
    finally:
        worker.close()


@dataclass(frozen=True)
class _Job:
    position: int
    sample_id: int
    data_source: str
    ticket: str  # known to the worker alone; its answer begins with it
    request: bytes


class _Closed(Exception):
    """The pool is being closed. Its threads end."""


class RewardPool:
    """`num_workers` scoring processes, each controlled by one thread.

    `timeout_s` is the only deadline of a sample, counted from when its worker begins it. A failed sample gets
    `failure_score` and a reason. With `submit` and `drain`, scoring overlaps generation; `score` does both. Use it as a
    context manager, from one thread at a time.
    """

    def __init__(
        self,
        spec: RewardSpec,
        num_workers: int = 2,
        timeout_s: float = 10.0,
        failure_score: float = 0.0,
        log_path: Path | None = None,
        start_timeout_s: float = 60.0,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
    ):
        """Returns when every worker is ready. `environment` and `folder` of the workers are by default those of this
        process.

        Raises ConfigError if the function cannot be loaded, EnvironmentFault if no worker starts.
        """
        self._environment = environment
        self._folder = folder
        self.spec = spec
        self.timeout_s = timeout_s
        self.failure_score = failure_score
        self.start_timeout_s = start_timeout_s
        self._log = log_path.open("ab", buffering=0) if log_path else None
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._results: dict[int, RewardResult] = {}
        self._submitted = 0
        self._collected = 0  # of the submitted items
        self._ready = 0
        self._closed = False
        self._error: BaseException | None = None
        self._workers: list[WorkerProcess | None] = [None] * num_workers
        self._threads = [threading.Thread(target=self._serve, args=(slot,), daemon=True) for slot in range(num_workers)]
        atexit.register(self.close)
        for thread in self._threads:
            thread.start()
        try:
            self._wait_for(lambda: self._ready == num_workers)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, item: RewardItem) -> None:
        """Queues an item, and scoring begins at once. Values that JSON lacks reach the function as text."""
        ticket = secrets.token_hex(8)
        request = json.dumps(
            [ticket, item.data_source, item.response_text, item.ground_truth, dict(item.extra_info)], default=str
        )
        with self._changed:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            self._queue.append(
                _Job(self._submitted, item.sample_id, item.data_source, ticket, request.encode() + b"\n")
            )
            self._submitted += 1
            self._changed.notify()

    def drain(self, poll: Callable[[], None] = lambda: None, max_failures: int | None = None) -> list[RewardResult]:
        """Waits for everything submitted since the last drain. Returns results in the order of submission.

        `poll` is called about twice a second and may raise. After more than `max_failures` failed samples it returns
        early with the results so far. The caller then refuses them, and can only close the pool.
        """
        self._wait_for(lambda: not self._awaited or self._failed_more_than(max_failures), poll)
        with self._changed:
            results = [self._results[i] for i in sorted(self._results)]
            if not self._awaited:
                self._results = {}
                self._submitted = 0
                self._collected = 0
        return results

    def collect(self, wait_s: float = 0.0) -> list[RewardResult]:
        """Returns new results in the order of submission, each only once.

        Waits for all submitted items, at most `wait_s` seconds. It is for callers that submit without end; `drain`
        waits for the rest. Raises what made scoring impossible.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._closed or not self._awaited, timeout=wait_s)
            if self._error:
                raise self._error
            results = [self._results.pop(i) for i in sorted(self._results)]
            self._collected += len(results)
        return results

    @property
    def _awaited(self) -> int:
        """Number of items without a result."""
        return self._submitted - self._collected - len(self._results)

    def _failed_more_than(self, limit: int | None) -> bool:
        return limit is not None and sum(r.reason != OK for r in self._results.values()) > limit

    def score(self, items: Iterable[RewardItem]) -> list[RewardResult]:
        """Returns results in the order of `items`. Do not mix it with submitted items that are not yet drained."""
        if self._submitted:
            raise RuntimeError(f"{self._submitted} items were submitted and not drained; drain them before score")
        for item in items:
            self.submit(item)
        return self.drain()

    def close(self) -> None:
        """Kills and collects the workers, even during work. May be called twice."""
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for worker in filter(None, self._workers):
                worker.kill()
        for thread in self._threads:
            thread.join()
        if self._log:
            self._log.close()

    def _wait_for(self, condition: Callable[[], bool], poll: Callable[[], None] = lambda: None) -> None:
        over = False
        while not over:
            poll()
            with self._changed:
                over = self._changed.wait_for(lambda: self._error or self._closed or condition(), timeout=POLL_S)
                if self._error:
                    raise self._error
                if self._closed:
                    raise RuntimeError("the reward pool is closed")

    def _serve(self, slot: int) -> None:
        """Runs in a thread: keeps one worker alive and takes jobs for it."""
        try:
            self._start(slot)
            with self._changed:
                self._ready += 1
                self._changed.notify_all()
            while True:
                self._work(slot, self._take())
        except _Closed:
            pass
        except BaseException as error:  # any error must reach the thread that waits in drain
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._discard(slot)

    def _take(self) -> list[_Job]:
        """Returns the next jobs: a share of the queue, so that the last ones spread over all workers."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if self._closed:
                raise _Closed
            share = -(-len(self._queue) // (2 * len(self._workers)))
            return [self._queue.popleft() for _ in range(min(ITEMS_AT_ONCE, share))]

    def _work(self, slot: int, jobs: list[_Job], alone: bool = False) -> None:
        """Lets the slot's worker answer the jobs.

        After a failure, the current job ends with the reason, and the others go to a fresh worker. With `alone`, one
        job has a fresh worker to itself. Then lack of memory, or a line that is not its answer, is this sample's own
        fault.
        """
        if not self._workers[slot].alive():  # killed while idle, which is no sample's fault
            self._start(slot)
        unanswered = deque(jobs)
        requests = b"".join(job.request for job in jobs)
        try:
            for line in self._workers[slot].exchange(requests, len(jobs), self.timeout_s):
                answer = _answer(line, unanswered[0].ticket)
                if answer[0] == OUT_OF_MEMORY and not alone:
                    return self._work_alone(slot, unanswered)
                self._finish(unanswered[0], *answer)
                unanswered.popleft()
                # what filled the memory may still be there, and every later sample would fail too
                if answer[0] == OUT_OF_MEMORY:
                    return self._start_again(slot, unanswered)
        except WorkerFailure as failure:
            if self._closed:
                raise _Closed from failure
            if isinstance(failure, ForeignLine) and not alone:
                return self._work_alone(slot, unanswered)
            self._finish(unanswered.popleft(), failure.reason, None, {}, failure.detail)
            self._start_again(slot, unanswered)

    def _work_alone(self, slot: int, unanswered: deque[_Job]) -> None:
        """Runs the first job again in a fresh worker, because earlier samples may have caused the old one's fault."""
        job = unanswered.popleft()
        self._start_again(slot, unanswered)
        self._work(slot, [job], alone=True)

    def _start_again(self, slot: int, unanswered: deque[_Job]) -> None:
        """Starts a fresh worker and puts its jobs back into the queue."""
        with self._changed:
            self._queue.extendleft(reversed(unanswered))
            self._changed.notify_all()
        self._start(slot)

    def _finish(self, job: _Job, reason: str, score: float | None, parts: dict, detail: str) -> None:
        value = score if reason == OK else self.failure_score
        with self._changed:
            self._results[job.position] = RewardResult(job.sample_id, value, parts, reason, detail, job.data_source)
            if not self._awaited:
                self._changed.notify_all()

    def _start(self, slot: int) -> None:
        """Replaces the worker in the slot by a fresh one.

        The user's file could be loaded before, so a failure is retried.
        """
        for attempt in range(START_ATTEMPTS):
            self._discard(slot)
            with self._changed:
                if self._closed:
                    raise _Closed
                self._workers[slot] = WorkerProcess(self.spec, self._log, self._environment, self._folder)
            try:
                return self._workers[slot].wait_ready(self.start_timeout_s)
            except WorkerFailure as failure:
                if self._closed:
                    raise _Closed from failure
                if attempt == START_ATTEMPTS - 1:
                    message = (
                        f"no scoring process starts ({_origin(self.spec)}), {START_ATTEMPTS} attempts: {failure.detail}"
                    )
                    raise EnvironmentFault(message) from failure

    def _discard(self, slot: int) -> None:
        with self._changed:
            worker, self._workers[slot] = self._workers[slot], None
        if worker:
            worker.close()


def _answer(line: bytes, ticket: str) -> list:
    """Returns reason, score, parts and detail. Raises ForeignLine for a line that does not answer this ticket."""
    answer = parsed(line)
    if not isinstance(answer, list) or len(answer) != 5 or answer[0] != ticket:
        raise ForeignLine(line)
    return answer[1:]


def _origin(spec: RewardSpec) -> str:
    if spec.path:
        return f"{spec.name} in {spec.path}"
    return spec.function
