"""What libraries import while an agent runs. The process that forks agents imports it once, for all that come later.

A client's package imports much of itself at its first use (openai 3.57: 125 modules and a tenth of a second of a
processor), so that each agent would do so again. A forked agent tells the names through a pipe, and the process that it
came from imports them before it forks the next one:

    agent     library's function --import--> ImportWitness --name--+
    forking   LaterImports.made  <---------------------------------+   first on trial, in a process of its own

What the agent's own code imports stays with each agent: that code may have set variables which a module reads when it
is imported.
"""

import gc
import importlib
import importlib.util
import inspect
import os
import select
import signal
import stat
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from types import FrameType

_TRIAL_S = 30.0  # within which a trial of imports has to end
_READ_BYTES = 65536
_LIBRARIES = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})
_PACKAGES = ("/site-packages/", "/dist-packages/")  # of this environment, and of those that it includes
_IMPORTLIB = os.path.join(os.path.dirname(importlib.__file__), "")
_CAME_WELL = b"+"


class ImportWitness(MetaPathFinder):
    """Tells what functions of libraries import. Finds nothing itself."""

    def __init__(self, channel: int):
        """`channel` is the end of a pipe that does not block."""
        self.channel = channel

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Tells a name that is about to be imported."""
        if is_librarys_own(sys._getframe(1)):
            with suppress(OSError):  # full, or closed by the agent
                if stat.S_ISFIFO(os.fstat(self.channel).st_mode):
                    os.write(self.channel, f"{name}\n".encode())

    def keep_open_as(self, number: int) -> None:
        """Moves the channel to another descriptor, which no other program inherits."""
        if number != self.channel:
            os.dup2(self.channel, number, inheritable=False)
            self.channel = number


def witness() -> ImportWitness | None:
    """Returns that of this process."""
    return next((each for each in sys.meta_path if isinstance(each, ImportWitness)), None)


def is_librarys_own(frame: FrameType | None) -> bool:
    """Tells whether an import, seen from the frame that finds it, is made by a function of a library.

    An import by a module that is being imported itself is not: it comes with that module.
    """
    callers = list(_outwards(frame))
    first = next((each for each in callers if not _imports(each)), None)
    if first is None or not _is_library(first.f_code.co_filename):
        return False
    return not any(_is_imported(each) and _is_library(each.f_code.co_filename) for each in callers)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _imports(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(("<frozen importlib", _IMPORTLIB))


def _is_imported(frame: FrameType) -> bool:
    """Whether it is the body of a module that is being imported, and not that of the program."""
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    return not is_function and frame.f_back is not None and _imports(frame.f_back)


def _is_library(file: str | None) -> bool:
    if file in (None, "built-in", "frozen") or file.startswith(("<frozen", *_LIBRARIES)):
        return True
    return any(each in file for each in _PACKAGES)


class LaterImports:
    """The receiving end, in the process that forks agents."""

    def __init__(self) -> None:
        self._names, self._channel = os.pipe()
        for end in (self._names, self._channel):
            os.set_blocking(end, False)
        self._known: set[str] = set()
        self._rest = b""

    def made(self) -> None:
        """Imports what was told since the last call, unless that begins a thread or takes too long."""
        names = self._new_names()
        if names and _come_well(names):
            _import(names)
            gc.freeze()  # else a collection would copy what forks share

    def leave_channel(self) -> int:
        """Returns the end by which a fork tells names, and closes the other one. Called in the fork."""
        os.close(self._names)
        return self._channel

    def _new_names(self) -> list[str]:
        with suppress(BlockingIOError):
            while data := os.read(self._names, _READ_BYTES):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        names = dict.fromkeys(line.decode("utf-8", "replace") for line in lines)
        names = [name for name in names if name not in self._known and name not in sys.modules]
        self._known.update(names)
        return names


def _come_well(names: Sequence[str]) -> bool:
    """Imports in a process of its own. Returns whether it ends in time, and has one thread."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            _import(names)
            if len(os.listdir("/proc/self/task")) == 1:
                os.write(write, _CAME_WELL)
        os._exit(0)
    os.close(write)
    try:
        poll = select.poll()
        poll.register(read, select.POLLIN)
        if poll.poll(_TRIAL_S * 1000):
            return os.read(read, len(_CAME_WELL)) == _CAME_WELL
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        return False
    finally:
        os.close(read)


def _import(names: Sequence[str]) -> None:
    """Imports modules of libraries. What cannot be imported is passed over."""
    for name in names:
        with suppress(Exception):
            spec = importlib.util.find_spec(name)
            if spec is not None and _is_library(spec.origin):
                importlib.import_module(name)
