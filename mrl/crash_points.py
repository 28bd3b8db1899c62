"""Crash points: points of a run where a test lets a process end or stop, or leave out what comes next.

MRL_CRASH_AT names one of them, PLACE:NTH:ACTION:FILE, and all processes of the run inherit it:

    rank 1 update:2:SIGKILL:/tmp/fired        rank 1 is killed when it is asked for its second update
    rank 0 collective:150:skip:/tmp/fired     rank 0 leaves out its 150th collective
    engine 0 commit:3:SIGSTOP:/tmp/fired      the process of engine 0 stops before its third commit
    phase reshard:2:SIGKILL:/tmp/fired        the driver is killed as the sync of its second step begins

Places are those that stand here, with other methods and phases, and "checkpoint written" and "checkpoint renamed".
The driver times the phases of a step. Each process counts its own. FILE is made first, and nothing happens where it
exists: of all processes and starts of a run one crashes, once. Without the variable nothing happens at all.
"""

import os
import signal
from dataclasses import dataclass
from functools import cache

from mrl.errors import EnvironmentFault

VARIABLE = "MRL_CRASH_AT"
SKIP = "skip"
_WANTED = os.environ.get(VARIABLE)


def crash_point(*point: object) -> bool:
    """Crashes here if that is wanted. True: the caller leaves out what comes next, which only collectives can.

    The parts of `point` are joined by blanks. Raises EnvironmentFault for a variable that says nothing.
    """
    if _WANTED is None:
        return False
    return _crash(_read(_WANTED), " ".join(map(str, point)))


def is_wanted_at(*point: object) -> bool:
    """Tells whether this point is named at all. A call that is made very often is left as it is where it is not."""
    return _WANTED is not None and _read(_WANTED).point == " ".join(map(str, point))


@dataclass
class _Wanted:
    point: str
    left: int  # to come to
    action: str
    file: str


@cache
def _read(text: str) -> _Wanted:
    point, nth, action, file = [*text.split(":", 3), "", "", ""][:4]
    known = action == SKIP or action in signal.Signals.__members__
    if not point or not nth.isdecimal() or not known or not file:
        raise EnvironmentFault(
            f"{VARIABLE}={text} is no crash point; write PLACE:NTH:ACTION:FILE with a signal or {SKIP}, or unset it"
        )
    return _Wanted(point, int(nth), action, file)


def _crash(wanted: _Wanted, point: str) -> bool:
    if point != wanted.point:
        return False
    wanted.left -= 1
    if wanted.left != 0 or not _is_first(wanted.file):
        return False
    if wanted.action == SKIP:
        return True
    os.kill(os.getpid(), signal.Signals[wanted.action])
    return False  # a stopped process that was told to go on


def _is_first(file: str) -> bool:
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True
