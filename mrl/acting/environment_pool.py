"""Tools and environments in processes that can be killed: a hanging or crashing one, or lack of memory, costs one call.

    calls of tools              --> one queue of all slots of tools   --> any free one
    reset, steps of a session   --> the queue of its own slot         --> the process that has it

A slot is a thread with a process, which handles one request at a time. A lost process loses its sessions, so tools run
in other processes than sessions. Sessions of repeatable environments begin again with their next step: they are reset
with the same row and seed, former actions are repeated, and the replies compared. A session that continues from another
process begins in the same way.
"""

import binascii
import hashlib
import json
import secrets
import sys
import threading
import time
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

from mrl.acting.agent import AGENT
from mrl.acting.environment_worker import REFUSED, UNREADABLE
from mrl.acting.offer import Offer, UnknownChoice
from mrl.acting.tool import ToolsSpec
from mrl.acting.warm import WarmProcess
from mrl.data.samples import KnownImage
from mrl.errors import ConfigError, EnvironmentFault
from mrl.reward.items import DIED, FELL, OK
from mrl.reward.process import ForeignLine, WorkerFailure, WorkerProcess, parsed

MODULE = "mrl.acting.environment_worker"
START_ATTEMPTS = 3
_TRIED_SECONDS = 60.0  # for an environment to begin, where that is tried
_ROW = ("data_source", "ground_truth", "extra_info")
ATTEMPTS = 2  # for a step of a repeatable environment
DIFFERS = "differs"  # an environment that declares itself repeatable gave another reply when it was repeated


# reads encoded images and stores them; raises BadRow for one that is not read
See = Callable[[Sequence[bytes]], list[KnownImage]]
# name, arguments and the digest of the reply
Step = tuple[str, Mapping[str, Any], int]


def reply_digest(reply: Sequence[Any]) -> int:
    """Returns a digest of a reply's reason, text, reward, parts, end and images; never 0."""
    names = [image.name for image in reply[5]]
    content = json.dumps([*reply[:5], *names], sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") | 1


class CallAnswer(NamedTuple):
    """The answer to a call. The model reads `text`. `reason` is `ok`, or why there is no result."""

    reason: str
    text: str
    reward: float = 0.0
    parts: Mapping[str, float] = {}
    end: bool = False
    images: Sequence[KnownImage] = ()  # that it reads before the text
    seconds: float = 0.0  # duration of the call
    failed: bool = False  # the environment has failed, so the response gets no reward


@dataclass
class _Slot:
    """One process, and the jobs that wait for it alone."""

    of_sessions: bool  # True: for sessions; False: for tools
    queue: deque[tuple[Callable, Future]] = field(default_factory=deque)
    sessions: int = 0
    process: WorkerProcess | None = None
    at: Future | None = None  # the job that it works on
    is_abandoned: bool = False  # nobody waits for that job any more


class _Call(Future):
    """The future answer of a tool. If cancelled during the work, it kills the process."""

    def __init__(self, abandon: Callable[[Future], None]):
        super().__init__()
        self._abandon = abandon

    def cancel(self) -> bool:
        """Cancels the call like any Future: returns False if it has begun."""
        is_cancelled = super().cancel()
        if not is_cancelled:
            self._abandon(self)
        return is_cancelled


class _Lost(WorkerFailure):
    """The session was lost with its process. The slot's present process is sound."""


class Session:
    """The environment of one response. Steps run in the order in which they are requested."""

    def __init__(
        self,
        pool: "EnvironmentPool",
        slot: _Slot,
        number: int,
        begin: Sequence[Any],
        described: Mapping[str, Any],
        made: Sequence[Step] = (),
    ):
        """`begin`: environment, row and seed. `described` comes from the worker.

        `made` as in EnvironmentPool.session.
        """
        self.parts: Mapping[str, float] = described["parts"]  # declared by the environment
        self.judges: bool = described["judges"]
        self._pool = pool
        self._slot = slot
        self._number = number
        self._begin = list(begin)
        self._attempts = ATTEMPTS if described["repeatable"] else 1
        self._process: WorkerProcess | None = None  # the process that has the session
        self._made = list(made)
        self._over: CallAnswer | None = None
        self.ready: Future[CallAnswer] = pool.submit(self._reset, slot)

    def step(self, name: str, arguments: Mapping[str, Any]) -> "Future[CallAnswer]":
        """Returns a future answer, however the step ends. It raises EnvironmentFault if no process starts."""
        return self._pool.submit(lambda slot: self._step(slot, [name, arguments]), self._slot)

    def judge(self) -> "Future[CallAnswer]":
        """Returns the future last reward, as `step` does. No further action is possible."""
        return self._pool.submit(self._judge, self._slot)

    def close(self) -> None:
        """Closes the session without waiting for running work. No further action is possible."""
        self._pool.submit(self._close, self._slot)

    def _reset(self, slot: _Slot) -> CallAnswer:
        return self._attempted(slot, "reset", lambda process: [OK, "", 0.0, {}, False, ()])

    def _step(self, slot: _Slot, action: Sequence[Any]) -> CallAnswer:
        if self._over is not None:
            return self._over
        answer = self._attempted(slot, action[0], lambda process: self._asked(process, action))
        if answer.end:
            self._over = CallAnswer(REFUSED, f"Error: {action[0]}: it is over")
        return answer

    def _judge(self, slot: _Slot) -> CallAnswer:
        if self._over is not None and self._over.failed:
            return self._over
        return self._attempted(slot, "judge", self._judged)

    def _judged(self, process: WorkerProcess) -> list[Any]:
        seconds = self._pool.timeout_s + self._pool.spec.judge_s
        reply = self._pool.ask(process, "judge", self._number, timeout_s=seconds)
        if reply[0] != OK:
            raise WorkerFailure(reply[0], reply[1])
        return reply

    def _asked(self, process: WorkerProcess, action: Sequence[Any]) -> list[Any]:
        reply = self._pool.ask(process, "step", self._number, *action)
        if reply[0] not in _GOES_ON:
            raise WorkerFailure(reply[0], reply[1])
        self._made.append((*action, reply_digest(reply)))
        return reply

    def _attempted(self, slot: _Slot, what: str, act: Callable[[WorkerProcess], list[Any]]) -> CallAnswer:
        """Acts in a process that has the session. Repeats a failure if the environment allows it."""
        began = time.monotonic()
        for left in reversed(range(self._attempts)):
            try:
                process = self._pool.process_of(slot)
                if process is not self._process:
                    self._begun_in(process)
                return CallAnswer(*act(process), seconds=time.monotonic() - began)
            except WorkerFailure as failure:
                if failure.reason != DIFFERS:  # otherwise an instance is left that must be closed
                    self._process = None
                if failure.reason not in _ANSWERED and not isinstance(failure, _Lost):
                    self._pool.end_for_one(slot)
                self._pool.log(f"environment {self._begin[0]}: {what}: {failure.reason}: {failure.detail}")
                if not left or failure.reason == DIFFERS:
                    text = f"Error: {what}: {failure.detail}"
                    seconds = time.monotonic() - began
                    self._over = CallAnswer(failure.reason, text, seconds=seconds, failed=True)
                    break
        return self._over

    def _begun_in(self, process: WorkerProcess) -> None:
        """Restores the session in this process. Raises WorkerFailure if that fails."""
        if self._made and self._attempts == 1:
            why = FELL if self._pool.was_ended_for_one(self._process) else DIED
            raise _Lost(why, "it would have to be begun anew, and is not repeatable")
        reply = self._pool.ask(process, "reset", self._number, *self._begin)
        if reply[0] != OK:
            raise WorkerFailure(reply[0], reply[1])
        self._process = process
        for name, arguments, before in self._made:
            again = self._pool.ask(process, "step", self._number, name, arguments)
            if reply_digest(again) != before:
                raise WorkerFailure(DIFFERS, f"begun anew it replied {again[1]!r} to {name}, and otherwise before")

    def _close(self, slot: _Slot) -> CallAnswer:
        self._pool.leave(slot)
        process = self._process
        self._process = None
        self._over = self._over or CallAnswer(REFUSED, "Error: it is over")
        if process is not None and process is slot.process:
            try:
                self._pool.ask(process, "close", self._number)
            except WorkerFailure:
                self._pool.end_for_one(slot)
        return CallAnswer(OK, "")


_LOGGED = 2000  # characters of one line of the log, of which one failure must not take all the space
_GOES_ON = (OK, REFUSED, UNREADABLE)  # nothing is lost, and the text says what is wrong
_ANSWERED = ("raised", "out_of_memory", "wrong_type", "not_a_number", DIFFERS)  # reported by a process that continues


class EnvironmentPool:
    """At most `num_workers` processes for tools and as many for environments. Each handles one request at a time.

    Threads may share it. Use it as a context manager. `timeout_s` is the deadline of a call or step, counted from when
    a process begins it.
    """

    def __init__(
        self,
        spec: ToolsSpec,
        num_workers: int,
        timeout_s: float,
        log_path: Path | None = None,
        start_timeout_s: float = 60.0,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        see: See | None = None,
    ):
        """Returns when a first process is ready.

        Processes get parts of `environment` and work in `folder`, by default those of this process. `see` reads images
        of answers, where `spec.sees`. Raises ConfigError if something cannot be loaded, EnvironmentFault if no process
        starts.
        """
        self._see = see
        self.spec = spec
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self._log = log_path.open("ab", buffering=0) if log_path else None
        self._environment = environment
        self._folder = folder
        self._changed = threading.Condition()
        self._shared: deque[tuple[Callable, Future]] = deque()
        self._closed = False
        self._sessions = 0
        self._ended_for_one: WeakSet[WorkerProcess] = WeakSet()
        of_sessions = 0
        if spec.environments or spec.in_sandbox:
            of_sessions = num_workers
        self._slots = [_Slot(number < of_sessions) for number in range(of_sessions + num_workers)]
        self._described: Mapping[str, Any] = {}
        self._warm: WarmProcess | None = None  # of agents
        self._warming = threading.Lock()
        self._threads = [
            threading.Thread(target=self._serve, args=(slot,), name=f"tools {number}", daemon=True)
            for number, slot in enumerate(self._slots)
        ]
        for thread in self._threads:
            thread.start()
        try:
            # by a thread that lives as long as the pool, as a process dies with the thread that started it
            self.submit(self._started, self._slots[0]).result()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def offer(self) -> Offer:
        """What may be called."""
        described = self._described["environments"]
        if self.spec.has_agent:
            return Offer((), agent=True, of_tasks=(AGENT,) if self.spec.in_sandbox else ())
        environments = {name: tuple(each["schemas"]) for name, each in described.items()}
        unrepeatable = tuple(name for name, each in described.items() if not each["repeatable"])
        of_tasks = tuple(name for name, each in described.items() if each["has_task"])
        return Offer(tuple(self._described["schemas"]), environments, unrepeatable, of_tasks=of_tasks)

    def call(self, name: str, arguments: Mapping[str, Any]) -> "Future[CallAnswer]":
        """Returns the future answer of a tool, however the call ends. It raises EnvironmentFault if no process starts.

        Cancelling it frees the process that works on it.
        """
        return self.submit(lambda slot: self._call(slot, name, arguments), future=_Call(self._abandon))

    def _abandon(self, call: Future) -> None:
        with self._changed:
            for slot in self._slots:
                if slot.at is call:
                    slot.is_abandoned = True
                    if slot.process is not None:
                        slot.process.kill()  # the slot's thread gets an answer and ends the process

    def session(self, environment: str, row: Mapping[str, Any], seed: int, made: Sequence[Step] = ()) -> Session:
        """Begins an environment for a response. Session.ready tells whether it has begun.

        `made` are steps that restore a former state, each with the digest of its reply.
        """
        with self._changed:
            slot = min((slot for slot in self._slots if slot.of_sessions), key=lambda each: each.sessions)
            slot.sessions += 1
            self._sessions += 1
            number = self._sessions
        described = self._described["environments"][environment]
        return Session(self, slot, number, [environment, row, seed], described, made)

    def leave(self, slot: _Slot) -> None:
        """Records that a session of the slot has ended."""
        with self._changed:
            slot.sessions -= 1

    def submit(self, job: Callable[[_Slot], Any], slot: _Slot | None = None, future: Future | None = None) -> Future:
        """Lets a slot's thread call `job` with the slot. Returns a future result. Without `slot`, any free slot of
        tools is used.

        `future` receives the result; by default it is new.
        """
        future = future or Future()
        with self._changed:
            if self._closed:
                future.set_exception(EnvironmentFault("the pool of tools is closed"))
                return future
            (self._shared if slot is None else slot.queue).append((job, future))
            self._changed.notify_all()
        return future

    def _serve(self, slot: _Slot) -> None:
        while (entry := self._next(slot)) is not None:
            job, future = entry
            if not future.set_running_or_notify_cancel():
                self._leave(slot)
                continue
            try:
                future.set_result(self._done(slot, job))
            except BaseException as error:  # raised to whoever waits for it
                future.set_exception(error)
        self.end_process(slot)

    def _done(self, slot: _Slot, job: Callable[[_Slot], Any]) -> Any:
        """Runs a job. If its process was killed meanwhile, ends it before the next job."""
        try:
            return job(slot)
        finally:
            if self._leave(slot):
                self.end_process(slot)

    def _leave(self, slot: _Slot) -> bool:
        """Frees a slot of its job. Returns whether the job was abandoned."""
        with self._changed:
            is_abandoned = slot.is_abandoned
            slot.at = None
            slot.is_abandoned = False
        return is_abandoned

    def _next(self, slot: _Slot) -> tuple[Callable, Future] | None:
        """Waits for the next job, and puts it into the slot; None once the pool is closed."""
        with self._changed:
            shared = deque() if slot.of_sessions else self._shared
            while not (self._closed or slot.queue or shared):
                self._changed.wait()
            if self._closed:
                return None
            entry = (slot.queue or shared).popleft()
            slot.at = entry[1]
            return entry

    def _call(self, slot: _Slot, name: str, arguments: Mapping[str, Any]) -> CallAnswer:
        began = time.monotonic()
        process = self.process_of(slot)
        if slot.is_abandoned:
            return CallAnswer(DIED, "")
        try:
            reason, text, *rest = self.ask(process, "step", None, name, arguments)
            if self.spec.has_agent:  # with everything that it started, before it gets another agent's key
                self.end_process(slot)
        except WorkerFailure as failure:
            self.end_process(slot)
            reason = failure.reason
            text = failure.detail
            rest = []
        text = text if reason in _GOES_ON else f"Error: {name}: {text}"
        return CallAnswer(reason, text, *rest, seconds=time.monotonic() - began)

    def ask(self, process: WorkerProcess, *request: Any, timeout_s: float | None = None) -> list[Any]:
        """Returns the answer without its ticket. Raises WorkerFailure. `timeout_s` is by default the pool's."""
        ticket = secrets.token_hex(8)  # known to the process alone
        line = json.dumps([ticket, *request], default=str).encode() + b"\n"
        (line,) = process.exchange(line, 1, timeout_s or self.timeout_s)
        answer = parsed(line)
        if not isinstance(answer, list) or len(answer) != 7 or answer[0] != ticket:
            raise ForeignLine(line)
        if not answer[6]:
            return answer[1:]
        return self._seen(request[2], *answer[1:])  # only steps are answered with images

    def _seen(
        self, called: str, reason: str, text: str, reward: float, parts: Any, end: bool, images: list[str]
    ) -> list[Any]:
        """Returns the answer to a call with its images as the run has stored them; instead of them and the text what is
        wrong with one.
        """
        from mrl.data.row_files import BadRow  # here: it loads what reads files of data

        try:
            if self._see is None:
                raise BadRow("the model reads text alone")
            seen = self._see([b64decode(image) for image in images])
        except (BadRow, binascii.Error) as error:
            reason = UNREADABLE
            text = f"Error: {called}: {error}"
            seen = []
        return [reason, text, reward, parts, end, seen]

    def process_of(self, slot: _Slot) -> WorkerProcess:
        """Returns the slot's process, or a new one if it has none that is alive. Raises EnvironmentFault."""
        if slot.process is not None and slot.process.alive():
            return slot.process
        self.end_process(slot)
        return self._started(slot)

    def _started(self, slot: _Slot) -> WorkerProcess:
        for _ in range(START_ATTEMPTS):
            with self._changed:
                if self._closed:
                    raise EnvironmentFault("the pool of tools is closed")
            try:
                if (forked := self._forked(slot)) is not None:
                    return forked
                with self._changed:
                    if self._closed:
                        raise EnvironmentFault("the pool of tools is closed")
                    spec = replace(self.spec, listed=self._described.get("listed"))
                    slot.process = process = WorkerProcess(
                        spec, self._log, self._environment, self._folder, module=MODULE
                    )
                described = process.wait_ready(self.start_timeout_s)
                self._described = self._described or described
                return process
            except ConfigError:
                self.end_process(slot)
                raise
            except WorkerFailure as failure:
                self.end_process(slot)
                problem = failure
        raise EnvironmentFault(f"no process for tools starts, tried {START_ATTEMPTS} times: {problem.detail}")

    def _forked(self, slot: _Slot) -> WorkerProcess | None:
        """Returns a process for one agent, forked from one that has loaded it; None where agents are not forked.

        Raises as WarmProcess.
        """
        if not self.spec.has_agent or self.spec.in_sandbox or sys.platform != "linux":
            return None
        with self._warming:
            try:
                if self._warm is None:
                    self._warm = WarmProcess(self.spec, self._log, self._environment, self._folder)
                    self._described = self._warm.wait_ready(self.start_timeout_s)
                forked = self._warm.fork()
            except BaseException:
                self._warm.close()
                self._warm = None
                raise
        with self._changed:
            if not self._closed:
                slot.process = forked
                return forked
        if forked is not None:
            forked.close()
        raise EnvironmentFault("the pool of tools is closed")

    def end_process(self, slot: _Slot) -> None:
        """Kills the slot's process and all its sessions. Called by the slot's thread."""
        with self._changed:
            process = slot.process
            slot.process = None
        if process is not None:
            process.close()

    def end_for_one(self, slot: _Slot) -> None:
        """Kills the slot's process because one of its sessions blocks it. The other sessions are lost, too."""
        if slot.process is not None:
            self._ended_for_one.add(slot.process)
        self.end_process(slot)

    def was_ended_for_one(self, process: WorkerProcess | None) -> bool:
        """Tells whether the process was ended by `end_for_one`, and did not die by itself."""
        return process in self._ended_for_one

    def log(self, line: str) -> None:
        """Writes a line into the log of the tools. A full disk loses it."""
        with self._changed, suppress(OSError):
            if self._log is not None:
                self._log.write(f"{line[:_LOGGED]}\n".encode("utf-8", "replace"))

    def close(self) -> None:
        """Kills all processes, even during work. Safe to call twice."""
        with self._changed:
            self._closed = True
            queues = [self._shared, *(slot.queue for slot in self._slots)]
            left = [entry for queue in queues for entry in queue]
            for slot in self._slots:
                if slot.process is not None:
                    slot.process.kill()  # whoever waits for it gets an answer, and its thread ends the process
            self._changed.notify_all()
            if self._warm is not None:
                self._warm.kill()
        for _, future in left:
            future.cancel()
        for thread in self._threads:
            thread.join()
        with self._warming:
            if self._warm is not None:
                self._warm.close()
                self._warm = None
        with self._changed:
            if self._log is not None:
                self._log.close()
                self._log = None


def check_tools(spec: ToolsSpec) -> Offer:
    """Loads tools and environments in a process that then ends. Returns what may be called.

    Raises as EnvironmentPool.
    """
    with EnvironmentPool(spec, 1, 1.0) as pool:
        return pool.offer


def try_environments(spec: ToolsSpec, offer: Offer, rows: Sequence[Mapping[str, Any]]) -> None:
    """Begins each environment that rows name, by the first of them, as a response does.

    `rows` have data_source, ground_truth and extra_info. Raises ConfigError for an environment that cannot begin.
    """
    wanted: dict[str, Mapping[str, Any]] = {}
    if spec.in_sandbox and rows:
        wanted[AGENT] = rows[0]
    for row in rows:
        with suppress(UnknownChoice):  # a bad row, which is told where rows are read
            if (name := offer.environment(row["extra_info"])) is not None:
                wanted.setdefault(name, row)
    if not wanted:
        return
    with EnvironmentPool(spec, 1, _TRIED_SECONDS) as pool:
        for name, row in wanted.items():
            session = pool.session(name, {key: row[key] for key in _ROW}, 0)
            reason, text, *_ = session.ready.result()
            session.close()
            if reason != OK:
                key = "rollout.agent.in_sandbox" if name == AGENT else f"rollout.turns.environments: {name}"
                raise ConfigError(
                    f"{key}: asked to begin with the first row that wants it, it failed ({reason}): {text[:300]}"
                )
