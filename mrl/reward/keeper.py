"""The parent of a scoring process: it stores what the function prints, and ends all that the function started.

    python -m mrl.reward.keeper REQUESTS RESULTS MODULE    forks; the child serves, as `main` of the module does

The keeper also removes the folder that the variable MRL_SCRATCH names. Every descendant of the child becomes the
keeper's child when its own parent ends, also in another session. Only Linux supports this; elsewhere just the child's
session is ended. Uses the standard library and this package only.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LOG_BYTES = 64 * 2**20  # limit of one log; later output of the function is read and dropped
READ_BYTES = 65536
DAEMON_S = 10.0  # for a daemon to remove a container
HTTP_NOT_FOUND = 404
NOTICE = b"\n[the log is full: what the reward function prints from here on is not kept]\n"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SCRATCH = "MRL_SCRATCH"  # variable: a folder that a child may create, and that its keeper removes at the end
# variable: a descriptor into which a child writes containers to remove, as lines [address of a daemon, path, is made]
FAREWELL = "MRL_FAREWELL"


def main(requests_fd: int, results_fd: int) -> None:
    """Returns only in the child, which then serves. The keeper ends with its child's status."""
    wake = _woken_by(signal.SIGTERM, signal.SIGCHLD)
    ask_kernel(PR_SET_CHILD_SUBREAPER, 1)
    ask_kernel(PR_SET_PDEATHSIG, signal.SIGTERM)
    output, printed = os.pipe()
    keeper = os.getpid()
    # below that of a keeper above, which kills this one with all else and removes what is left of it, too
    scratch = Path(os.environ.get(SCRATCH, tempfile.gettempdir())) / f"mrl-scratch-{os.urandom(8).hex()}"
    os.environ[SCRATCH] = str(scratch)
    farewell = None
    if sys.platform == "linux":
        farewell = os.memfd_create("farewell")
        os.environ[FAREWELL] = str(farewell)
    child = os.fork()
    if child == 0:
        _begin_child(keeper, printed)
        for descriptor in (output, printed, wake):
            os.close(descriptor)
        return
    for descriptor in (requests_fd, results_fd, printed):
        os.close(descriptor)
    os.set_blocking(output, False)
    status = _keep(child, wake, output)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # it may have been collected already
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.kill(child, signal.SIGKILL)  # it may have had no group of its own yet
        os.waitpid(child, 0)
    _copy(output)  # before the search, which whoever waits for the end may interrupt
    _end_descendants()
    _copy(output)
    if farewell is not None:
        _remove_containers(os.pread(farewell, LOG_BYTES, 0))
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(scratch)
    _end_as(status)


def ask_kernel(option: int, value: int) -> None:
    """Sets an attribute of this process by prctl(2), on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _woken_by(*signals: signal.Signals) -> int:
    """Returns a descriptor from which the numbers of these signals can be read as they arrive."""
    read, write = os.pipe()
    for descriptor in (read, write):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, lambda *_: None)
    return read


def _begin_child(keeper: int, printed: int) -> None:
    """Starts a session of its own, so that a function that signals its group does not reach the keeper."""
    os.close(signal.set_wakeup_fd(-1))
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    ask_kernel(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:  # the keeper has ended meanwhile
        os._exit(1)
    for standard in (1, 2):
        os.dup2(printed, standard)


def _keep(child: int, wake: int, output: int) -> int:
    """Copies output until the child ends. Returns its status, or that of SIGKILL if the keeper is told to end it."""
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(output, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if wake in ready:
            if signal.SIGTERM in os.read(wake, READ_BYTES):
                return signal.SIGKILL
            if (status := _reaped(child)) is not None:
                return status
        if output in ready and not _copy(output):
            poll.unregister(output)


def _reaped(child: int) -> int | None:
    """Collects all ended children. Returns the child's status if it is one of them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


def _copy(output: int) -> bool:
    """Moves available output into the log. Returns False once nobody can print any more."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(64):  # then signals are checked again
            data = os.read(output, READ_BYTES)
            if not data:
                return False
            _write(data)
    return True


_written = 0  # by this keeper


def _write(data: bytes) -> None:
    global _written
    log = os.fstat(1)
    size = log.st_size if stat.S_ISREG(log.st_mode) else _written
    if size >= LOG_BYTES + len(NOTICE):
        return
    kept = data[: max(0, LOG_BYTES - size)]
    if len(kept) < len(data):
        kept += NOTICE
    with contextlib.suppress(OSError):  # a full disk drops output, which is not the sample's fault
        while kept:
            done = os.write(1, kept)
            _written += done
            kept = kept[done:]


def _end_descendants() -> None:
    """Kills descendants until none is left, because a killed one may have started another."""
    while _has_children() and (descendants := list(_below(os.getpid()))):
        for process in descendants:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)  # their children become this process's


def _has_children() -> bool:
    """Tells whether anything is left below this process: whose parent has ended is a child of its own. A search of all
    processes of the host, which takes 20 ms of a processor, is only made where there is something to find.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _below(process: int) -> Iterator[int]:
    """Yields all descendants of a process, including zombies; none without /proc."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
    waiting = [process]
    while waiting:
        children = parents.get(waiting.pop(), [])
        yield from children
        waiting += children


def _remove_containers(noted: bytes) -> None:
    """Removes containers that the child had made, or was about to make. Most are gone already."""
    wanted = {}
    for line in noted.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            address, path, is_made = json.loads(line)
            wanted[address, path] = is_made
    end = time.monotonic() + DAEMON_S
    for (address, path), is_made in wanted.items():
        # a daemon still makes what was asked for by a process that has died since
        while not _removed(address, path) and not is_made and time.monotonic() < end:
            time.sleep(0.2)


def _removed(address: str, path: str) -> bool:
    """Asks a daemon to remove a container. Returns whether there was one."""
    from http.client import HTTPConnection, HTTPException  # here: most keepers have no containers

    connection = HTTPConnection("localhost" if address.startswith("/") else address.partition("//")[2])
    connection.timeout = DAEMON_S
    try:
        if address.startswith("/"):
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(DAEMON_S)
            connection.sock.connect(address)
        connection.request("DELETE", path)
        return connection.getresponse().status != HTTP_NOT_FOUND
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _end_as(status: int) -> None:
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    from importlib import import_module

    pipes = int(sys.argv[1]), int(sys.argv[2])
    serve = import_module(sys.argv[3]).main
    main(*pipes)
    with contextlib.suppress(BrokenPipeError):  # the run ended while an answer was being written
        serve(*pipes)
