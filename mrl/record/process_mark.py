"""Identifies a process among all others, in a form that it writes down and others can check."""

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_ENDED = "ZX"  # states of an ended process whose parent has not collected it yet


@dataclass(frozen=True)
class ProcessMark:
    """A process: its host, its number there, and its start time, because numbers are reused."""

    host: str
    pid: int
    started: str | None  # clock ticks since boot; None where the system does not tell
    boot: str | None = None  # id of the kernel's boot, because hosts may share a name
    # id of the PID namespace, because containers may have the host's name and number their processes separately
    pid_space: int | None = None

    @classmethod
    def own(cls) -> "ProcessMark":
        """Returns the mark of this process."""
        return cls(socket.gethostname(), os.getpid(), _stat(os.getpid())[1], _boot(), _pid_space())

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "ProcessMark":
        """Reads a mark. Raises KeyError, ValueError or TypeError for other data. Old marks lack some fields."""
        return cls(str(row["host"]), int(row["pid"]), row["started"], row.get("boot"), row.get("pid_space"))

    def to_json(self) -> dict[str, Any]:
        """Returns the mark as plain data."""
        return asdict(self)

    def lives(self) -> bool | None:
        """Tells whether the process runs; None if it is on another host or hidden, where this cannot be known."""
        if not self._is_here():
            return None
        is_others = False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            is_others = True
        state, started = _stat(self.pid)
        if is_others and started is None:  # /proc may hide processes of other users
            return None
        return started == self.started and state not in _ENDED

    def _is_here(self) -> bool:
        here = (self.boot in (None, _boot()), self.pid_space in (None, _pid_space()))
        return self.host == socket.gethostname() and all(here)


def _stat(pid: int) -> tuple[str, str | None]:
    """Returns state and start time of a process (fields 3 and 22 of Linux's /proc/PID/stat), or "?" and None."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "?", None
    return fields[0], fields[19]


def _boot() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _pid_space() -> int | None:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
