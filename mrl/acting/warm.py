"""A process that has loaded an agent with all that it imports, and forks one for each response.

    WarmProcess  --"fork", two pipes-->  this process  --fork-->  keeper  --fork-->  the agent's process
                 <--the keeper--------

An interpreter and the imports of an agent's framework take seconds of a processor, a fork takes milliseconds, and what
was imported stands in memory once. What libraries import while an agent runs is imported here for those after it
(lazy_imports.py). Each agent still has a keeper of its own, and is confined and ended as one that was
started. A process that has several threads once it has loaded does not fork: its agents are started, as before.
"""

import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from mrl.acting.environment_worker import load
from mrl.acting.lazy_imports import ImportWitness, LaterImports
from mrl.acting.tool import ToolsSpec
from mrl.reward import keeper
from mrl.reward.confine import without_writing
from mrl.reward.process import ForkedWorker, WorkerFailure, WorkerProcess
from mrl.reward.worker import answer_all, serve

MODULE = "mrl.acting.warm"
_CHANNEL = "MRL_FORKS"  # variable: the descriptor by which this process is asked
_FORK = b"fork"
_NO = b"no"


class WarmProcess:
    """The process, as seen from the pool. Threads may share it."""

    def __init__(self, spec: ToolsSpec, log: Any, environment: Any, folder: str | None):
        """Starts it without waiting."""
        ours, theirs = socket.socketpair()
        self._channel = ours
        self._lock = threading.Lock()
        given = dict(os.environ if environment is None else environment)
        with theirs:
            number = theirs.fileno()
            given[_CHANNEL] = str(number)
            self._process = WorkerProcess(spec, log, given, folder, MODULE, (number,))

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """As WorkerProcess.wait_ready."""
        return self._process.wait_ready(timeout_s)

    def fork(self) -> ForkedWorker | None:
        """Returns a new process; None where it does not fork. Raises WorkerFailure where it has died."""
        asked, requests = os.pipe()
        results, answered = os.pipe()
        with self._lock:
            try:
                socket.send_fds(self._channel, [_FORK], [asked, answered])
                message, descriptors, _, _ = socket.recv_fds(self._channel, len(_FORK), 1)
            except OSError:
                message, descriptors = b"", []
            finally:
                os.close(asked)
                os.close(answered)
        if descriptors:
            return ForkedWorker(descriptors[0], requests, results)
        os.close(requests)
        os.close(results)
        if message == _NO:
            return None
        raise WorkerFailure("died", "the process that forks agents has ended")

    def kill(self) -> None:
        """Makes its keeper end it. Any thread may call it."""
        self._process.kill()

    def close(self) -> None:
        """Ends it, with all that it forked."""
        self._channel.close()
        self._process.close()


def main(requests_fd: int, results_fd: int) -> None:
    """Serves until its channel ends."""
    folders: list[str] = []

    def loaded(spec: ToolsSpec, _: None) -> tuple[Any, Callable[..., Any]]:
        folders.extend(spec.folders)
        return load(spec, None)

    serve(
        requests_fd,
        results_fd,
        ToolsSpec,
        loaded,
        then=lambda requests, message, answer: _fork_on_demand(requests, message, answer, tuple(folders)),
    )


def _fork_on_demand(requests: BinaryIO, results_fd: int, answer: Callable[..., Any], folders: tuple[str, ...]) -> None:
    channel = socket.socket(fileno=int(os.environ.pop(_CHANNEL)))
    os.close(results_fd)
    may_fork = hasattr(os, "pidfd_open") and threads() == 1
    if not may_fork:
        print(f"agents are started, not forked: {threads()} threads were begun by what is imported", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers here
    gc.freeze()  # else a collection would copy what the forks share
    later = LaterImports()
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, len(_FORK), 2)
        if not message:
            return
        if may_fork:
            later.made()
        if not may_fork:
            channel.send(_NO)
        elif (child := os.fork()) == 0:
            channel.close()
            requests.close()
            sys.meta_path.insert(0, ImportWitness(later.leave_channel()))
            _become(*descriptors, answer, folders)
        else:
            process = os.pidfd_open(child)
            socket.send_fds(channel, [_FORK], [process])
            os.close(process)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(requests_fd: int, results_fd: int, answer: Callable[..., Any], folders: tuple[str, ...]) -> None:
    """Becomes a keeper and, below it, a process that answers."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    try:
        keeper.main(requests_fd, results_fd)
        without_writing(folders)  # again: a domain of its own keeps it from what others of the same origin have
        with os.fdopen(requests_fd, "rb") as requests:
            answer_all(requests, results_fd, answer)
    except BrokenPipeError:  # the run ended while an answer was being written
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def threads() -> int:
    """Returns how many threads this process has, those of libraries too."""
    return len(os.listdir("/proc/self/task"))
