"""Processes below this one, found by descent, which the kernel tracks, and never by name, which others may share."""

import ctypes
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_LOOK_S = 0.02


@contextmanager
def adopted_orphans() -> Iterator[None]:
    """Makes orphaned descendants children of this process during the block, so that they can be found.

    Linux only.
    """
    if sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    before = ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def reap_orphans(but: int | None = None) -> None:
    """Collects ended children, so that none stays a zombie. `but`: a child that somebody else waits for."""
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == but:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def end_descendants(within_s: float = 5.0) -> int:
    """Kills every process below this one, also those started meanwhile. Returns their number.

    Processes that have not ended after `within_s` are left.
    """
    import psutil

    own = psutil.Process()
    ended: set[psutil.Process] = set()
    deadline = time.monotonic() + within_s
    with adopted_orphans():  # processes whose parent is killed first are still found
        while living := [process for process in ended.union(own.children(recursive=True)) if _lives(process)]:
            for process in living:
                with suppress(psutil.Error):
                    process.kill()
            ended.update(living)
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)
    return len(ended)


def pids_below() -> set[int]:
    """Returns the pids of all processes below this one."""
    import psutil

    return {process.pid for process in psutil.Process().children(recursive=True)}


def end_below(pids: Collection[int], within_s: float = 10.0, own_s: float = 0.0) -> None:
    """Kills those of `pids` that are below this process, also stopped ones, which do not react to other signals.

    They have `own_s` to end by themselves. Returns when they have ended, or after `within_s` more.
    """
    import psutil

    found = [process for process in psutil.Process().children(recursive=True) if process.pid in pids]
    _wait_for(found, own_s)
    for process in found:
        with suppress(psutil.Error):
            process.kill()
    _wait_for(found, within_s)


def _wait_for(processes: Sequence[Any], most_s: float) -> None:
    deadline = time.monotonic() + most_s
    while any(map(_lives, processes)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _lives(process) -> bool:
    import psutil

    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
