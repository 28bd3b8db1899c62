"""Which of vLLM's processes died first, and whether of itself: so that of ranks that fall together the lost one is
named.

A rank that loses another one fails in its collectives: vLLM says so, then ends its processes. One whose process is
killed loses it first. Nobody below tells the two apart, so exits are watched here.

And vLLM's core watches nobody above it: an engine whose Ray actor is killed, or leaves at once because its node's Ray
is gone, would go on with device memory and cores in hand.
"""

import multiprocessing
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import psutil

# of multiprocessing, which computes nothing, and above tools and agents, which end and die as they may
_HELPERS = ("resource_tracker", "mrl.reward.keeper")
_ENDING = "end_with_parent"
_SAME_S = 1.0  # between two looks at the start of one process: clocks are set
GONE_S = 10.0  # for a killed process to leave


def stopped_below() -> list[str]:
    """Processes below this one that were stopped, and answer nobody: whoever computes with them waits as if it hung."""
    stopped = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                stopped.append(f"{_command(process)} (process {process.pid}) is stopped")
    return stopped


def processes_here() -> list[tuple[int, float]]:
    """This process and all below it: number, and second of its start, which tells it from a later one."""
    own = psutil.Process()
    found = [(own.pid, own.create_time())]
    for process in own.children(recursive=True):
        with suppress(psutil.Error):
            found.append((process.pid, process.create_time()))
    return found


def end_processes(processes: Sequence[tuple[int, float]]) -> None:
    """Kills these where they still are, and returns once they are gone: also such as are stopped, or hang."""
    ended = []
    for pid, begun in processes:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if abs(process.create_time() - begun) < _SAME_S:
                process.kill()
                ended.append(process)
    deadline = time.monotonic() + GONE_S
    while any(map(_is_there, ended)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_there(process: psutil.Process) -> bool:
    """One that nobody has asked for its exit holds nothing any more."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _command(process: psutil.Process) -> str:
    """The process's program and first arguments. Raises psutil.Error when it has ended."""
    program, *arguments = process.cmdline() or [""]
    return " ".join([os.path.basename(program), *arguments])[:60].strip()  # a title is padded to what stood there


def _below(process: psutil.Process) -> Iterator[tuple[psutil.Process, str]]:
    """All that are below a process, with their commands; helpers are left out, and what is below them."""
    with suppress(psutil.Error):
        for child in process.children():
            with suppress(psutil.Error):
                command = _command(child)
                if not any(name in command for name in _HELPERS):
                    yield child, command
                    yield from _below(child)


def end_with_parent() -> None:
    """Ends this process, a core of vLLM, as soon as the one that spawned it is gone. Twice is once.

    Does nothing in other processes: vLLM's workers watch their core, and what multiprocessing did not spawn is no core.
    """
    parent = multiprocessing.parent_process()
    if (
        parent is None
        or parent.name != "MainProcess"
        or any(thread.name == _ENDING for thread in threading.enumerate())
    ):
        return
    try:
        watched = os.pidfd_open(parent.pid)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_end_after, args=(watched,), daemon=True, name=_ENDING).start()


def _end_after(watched: int) -> None:
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    os._exit(1)


class ProcessWatch:
    """Watches all processes below this one until the first of them exits."""

    def __init__(self, has_given_up: Callable[[], bool]):
        """`has_given_up`: whether vLLM has said that it stops, for whatever reason."""
        self.lost: str | None = None  # command of the process that exited first, of itself
        self.has_seen = False  # an exit
        self._has_given_up = has_given_up
        # a core that was forked (forking.py) is below the server, as its workers are
        started = (*psutil.Process().children(), *multiprocessing.active_children())
        self._cores = {child.pid for child in started}
        watched = {}
        for process, command in _below(psutil.Process()):
            with suppress(ProcessLookupError):
                watched[os.pidfd_open(process.pid)] = (process.pid, command)
        threading.Thread(target=self._wait, args=(watched,), daemon=True, name="ProcessWatch").start()

    def _wait(self, watched: Mapping[int, tuple[int, str]]) -> None:
        poll = select.poll()
        for descriptor in watched:
            poll.register(descriptor, select.POLLIN)
        exits = [watched[descriptor] for descriptor, _ in poll.poll()]
        pid, command = min(exits, key=lambda exited: exited[0] in self._cores)
        # vLLM's client sees a core exit as soon as this does; one that gives up has said so, and ended its workers,
        # before
        if pid in self._cores or not self._has_given_up():
            self.lost = command or str(pid)
        self.has_seen = True
        for descriptor in watched:
            os.close(descriptor)
