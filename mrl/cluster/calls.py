"""Calls Ray actors and waits for answers. Every wait has a deadline and names those that did not answer."""

import errno
import re
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from typing import Any

import ray

from mrl.cluster.process_logs import concerning, log_file
from mrl.errors import EnvironmentFault, Interrupted, LostProcess, MrlError
from mrl.rank.exchange import FailedElsewhere

_CAUSE_CHARACTERS = 800
ANSWER_S = 4.0  # for a call that any process answers that runs; a hang is named five seconds behind its deadline
SETTLE_S = 5.0  # a rank's peers notice its death before Ray does
_LOST = re.compile(
    r"gloo/transport|connection (closed|reset|refused)|broken pipe|remote process exited|collective operation timeout|"
    r"not in the same collective",
    re.I,
)
_FULL = re.compile(r"no space left on device|disk quota exceeded", re.I)
_GONE = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
)
_STORE_FULL = (ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError)


class Late(LostProcess):
    """A process did not answer in time, but no process died."""


class LostPeer(Interrupted):
    """A rank's connection to another one broke. Only Ray knows which process died."""


def ask(worker: ray.actor.ActorHandle, verbs: Container[str], method: str, *arguments: Any) -> ray.ObjectRef:
    """Calls a method of a worker, or passes one of `verbs` to its `do`. Returns a reference to the answer."""
    if method in verbs:
        return worker.do.remote(method, *arguments)
    return getattr(worker, method).remote(*arguments)


def gather(
    refs: dict[str, ray.ObjectRef], timeout_s: float, phase: str, poll: Callable[[], None] = lambda: None
) -> dict:
    """Waits for all answers and returns them under the same names.

    The first failure ends the wait at once, because the other ranks may hang in a collective. `poll` is called about
    twice a second and may raise, so that a signal ends a long phase. Raises Interrupted for a lost process or a missed
    deadline. Errors that the user can solve are raised again.
    """
    answers = {}
    for name, others in _finished(refs, timeout_s, phase, poll):
        try:
            answers[name] = unwrap(refs[name], name, phase)
        except (LostPeer, ray.exceptions.RayTaskError) as error:
            raise blame(error, others, phase) from error
    return {name: answers[name] for name in refs}


def settle(refs: dict[str, ray.ObjectRef], timeout_s: float, phase: str) -> dict:
    """Waits for all calls and returns their answers under the same names. A failed call answers with its error.

    The error names the process, the whole cause and the log, so both sides of a broken connection are reported.

    Raises what cannot be retried: Interrupted for a lost process or a missed deadline, and errors that the user can
    solve.
    """
    answers = {}
    for name, _ in _finished(refs, timeout_s, phase):
        try:
            answers[name] = unwrap(refs[name], name, phase)
        except (LostPeer, ray.exceptions.RayTaskError) as error:
            answers[name] = RuntimeError(f"{name}: {in_short(error)} (logs/{log_file(name)})")
    return {name: answers[name] for name in refs}


def gather_all(refs: dict[str, ray.ObjectRef], timeout_s: float, phase: str) -> dict:
    """Waits for all answers, and raises a failure only after all have answered.

    Use it for calls that do not wait for each other and that hold a resource. Raises Late for those that have not
    answered in time; they may still be working.
    """
    answers = {}
    failures = []
    for name, _ in _finished(refs, timeout_s, phase):
        try:
            answers[name] = unwrap(refs[name], name, phase)
        except (MrlError, ray.exceptions.RayTaskError) as error:
            failures.append(error)
    if failures:
        # a lost process or a defect ends the run, a full disk does not: the worst is raised
        raise min(failures, key=lambda error: isinstance(error, EnvironmentFault))
    return {name: answers[name] for name in refs}


def answered(refs: dict[str, ray.ObjectRef]) -> dict[str, Any]:
    """Returns what those say who answer within ANSWER_S, by name. Who is silent, or has died, is not in it."""
    if not refs:
        return {}
    ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=ANSWER_S)
    found = {}
    for name, ref in refs.items():
        if ref in ready:
            with suppress(ray.exceptions.RayError):
                found[name] = ray.get(ref)
    return found


def unwrap(ref: ray.ObjectRef, name: str, phase: str):
    """Returns the value of a finished reference, or raises its error without Ray's wrapping.

    Raises Interrupted for a process that died, LostPeer for a broken connection, EnvironmentFault for a full disk.
    Errors of mrl.errors are raised unchanged. A defect is raised as Ray's error with its traceback. Each carries the
    process's name.
    """
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        known = _known(_root(error), name, phase)
        if known is None:
            concerning(error, name)
            raise
        raise concerning(known, name) from None
    except _GONE as error:
        raise concerning(_died(error, name, phase), name) from error


def blame(error: Exception, others: dict[str, ray.ObjectRef], phase: str) -> Exception:
    """Returns the error to raise for a rank's failure. Prefers that of a rank that died or failed for a known reason.

    `others` are pending calls to the other ranks. Their answers within SETTLE_S are considered.
    """
    names = {ref: name for name, ref in others.items()}
    waiting = list(names)
    deadline = time.monotonic() + SETTLE_S
    while waiting and time.monotonic() < deadline:
        ready, waiting = ray.wait(waiting, timeout=0.5)
        for ref in ready:
            try:
                unwrap(ref, names[ref], phase)
            except LostPeer:
                continue
            except MrlError as other:
                return other
            except ray.exceptions.RayTaskError as other:
                error = other if isinstance(error, LostPeer) else error
    return error


def _finished(
    refs: dict[str, ray.ObjectRef], timeout_s: float, phase: str, poll: Callable[[], None] = lambda: None
) -> Iterator[tuple[str, dict[str, ray.ObjectRef]]]:
    """Yields the names of calls as they finish, each with the calls that are still pending.

    Raises Late with their names after `timeout_s`.
    """
    names = {ref: name for name, ref in refs.items()}
    waiting = list(refs.values())
    deadline = time.monotonic() + timeout_s
    while waiting:
        poll()
        ready, waiting = ray.wait(waiting, timeout=0.5)
        others = {names[ref]: ref for ref in waiting}
        for ref in ready:
            yield names[ref], others
        if waiting and time.monotonic() > deadline:
            raise late(phase, sorted(others), timeout_s)


def late(phase: str, names: Sequence[str], timeout_s: float) -> Late:
    """Makes the error that names the processes that missed the deadline."""
    text = f"{phase}: no answer from {', '.join(names)} within {timeout_s:g} s; see logs/ in the run directory"
    return concerning(Late(text), *names)


def _known(cause: Exception, name: str, phase: str) -> MrlError | None:
    if isinstance(cause, MrlError):
        return cause
    if isinstance(cause, ray.exceptions.ObjectLostError):  # what it was to read was lost elsewhere: it lives
        return Interrupted(
            f"{phase}: {name} cannot read what it was given, which is lost with the node that held it "
            f"({_last_line(cause)})"
        )
    if isinstance(cause, _GONE):
        return _died(cause, name, phase)
    if isinstance(cause, _STORE_FULL):
        return Interrupted(
            f"{phase}: {name} found the object store of its node full, and its disk too, to which Ray spills; make "
            "room there, or start Ray with a larger --object-store-memory, and resume: the step is generated again"
        )
    if isinstance(cause, FailedElsewhere):
        return LostPeer(f"{phase}: {name} ends, since {cause}")
    text = str(cause)
    if getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or _FULL.search(text):
        return EnvironmentFault(
            f"{phase}: {name} found no space left to write to ({in_short(cause)}); make room and resume"
        )
    if isinstance(cause, RuntimeError | ConnectionError) and _LOST.search(text):
        return LostPeer(
            f"{phase}: the ranks lost each other, as {name} saw ({in_short(cause)}); their logs are in logs/"
        )
    return None


def _root(error: Exception) -> Exception:
    """Returns what the task raised.

    A task whose argument failed carries the error of the task that made the argument.
    """
    while isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    return error


def _died(error: Exception, name: str, phase: str) -> LostProcess:
    return LostProcess(f"{phase}: {name} died ({_last_line(error)}); its log is in logs/ of the run directory")


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def in_short(error: Exception) -> str:
    """Returns the cause in one line, from its beginning: after a traceback's frames, or before those of a C++ error."""
    error = _root(error)
    lines = str(error).split("\nException raised from")[0].strip().splitlines()
    if isinstance(error, ray.exceptions.RayTaskError):
        frames = [number for number, line in enumerate(lines) if line.startswith((" ", "Traceback"))]
        lines = lines[frames[-1] + 1 :] if frames else lines
    text = " ".join(line.strip() for line in lines if line.strip())
    if not isinstance(error, RuntimeError | ValueError | ray.exceptions.RayTaskError):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    if len(text) <= _CAUSE_CHARACTERS:
        return text
    return f"{text[:_CAUSE_CHARACTERS]}..."
