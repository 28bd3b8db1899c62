"""Finds which of vLLM's processes died first by itself, so that the lost one of several failing ranks is named.

A rank that loses another one fails in its collectives: vLLM says so, then ends its processes. A rank whose process is
killed loses that process first. Nothing below distinguishes the two cases, so exits are watched here.

vLLM's core watches no process above it. Its engine's Ray actor may be killed, or leave because the Ray of its node is
gone. The core would then go on holding device memory and cores.
"""

import multiprocessing
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import psutil

# multiprocessing's helper, which computes nothing, and the parent of tools and agents, which may end at any time
_HELPERS = ("resource_tracker", "mrl.reward.keeper")
_ENDING = "end_with_parent"
_SAME_S = 1.0  # tolerance between two readings of one start time, since clocks are adjusted
GONE_S = 10.0  # until a killed process has left


def stopped_below() -> list[str]:
    """Returns the stopped processes below this one. They answer nobody, so a rank that waits for them seems to hang.

    Processes of tools and agents are left out.
    """
    stopped = []
    for process, command in _below(psutil.Process()):
        with suppress(psutil.Error):
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                stopped.append(f"{command} (process {process.pid}) is stopped")
    return stopped


def processes_here() -> list[tuple[int, float]]:
    """Returns this process and all below it, as (number, start time in seconds). The time identifies a reused
    number.
    """
    this = psutil.Process()
    processes = [(this.pid, this.create_time())]
    for process in this.children(recursive=True):
        with suppress(psutil.Error):
            processes.append((process.pid, process.create_time()))
    return processes


def end_processes(processes: Sequence[tuple[int, float]]) -> None:
    """Kills these processes where they still exist, stopped or hanging ones too, and returns once they are gone."""
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
    """Returns whether a process still exists. A zombie does not count: it holds nothing."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _command(process: psutil.Process) -> str:
    """Returns the process's program and first arguments. Raises psutil.Error when it has ended."""
    program, *arguments = process.cmdline() or [""]
    return " ".join([os.path.basename(program), *arguments])[:60].strip()  # a changed title is padded with spaces


def _below(process: psutil.Process) -> Iterator[tuple[psutil.Process, str]]:
    """Yields all processes below one, with their commands. Helpers and their descendants are left out."""
    with suppress(psutil.Error):
        for child in process.children():
            with suppress(psutil.Error):
                command = _command(child)
                if not any(name in command for name in _HELPERS):
                    yield child, command
                    yield from _below(child)


def end_with_parent() -> None:
    """Ends this process, a core of vLLM, as soon as the process that spawned it is gone. A second call changes nothing.

    Does nothing in other processes. vLLM's workers watch their core, and a process that multiprocessing did not spawn
    is no core.
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
        """`has_given_up`: returns whether vLLM has said that it stops, for whatever reason."""
        self.lost: str | None = None  # command of the process that exited first, by itself
        self.has_seen = False  # an exit was seen
        self._has_given_up = has_given_up
        # a forked core (forking.py) is a child of the server, and so are its workers
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
        # vLLM's client sees the exit of a core as soon as this thread does. A core that gives up says so, and ends
        # its workers, before that.
        if pid in self._cores or not self._has_given_up():
            self.lost = command or str(pid)
        self.has_seen = True
        for descriptor in watched:
            os.close(descriptor)
