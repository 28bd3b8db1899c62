"""What tells one process from every other, to be written down by it and looked for by others."""

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_ENDED = "ZX"  # states of a process that runs no more, of which its parent has not asked yet


@dataclass(frozen=True)
class ProcessMark:
    """A process: where it is, its number there, and when it began, as numbers are given again."""

    host: str
    pid: int
    started: str | None  # clock ticks since boot; None where the system does not say
    boot: str | None = None  # of the kernel: hosts may have one name
    pid_space: int | None = None  # containers of a host may have its name, and number processes each for itself

    @classmethod
    def own(cls) -> "ProcessMark":
        """Returns the mark of this process."""
        return cls(socket.gethostname(), os.getpid(), _stat(os.getpid())[1], _boot(), _pid_space())

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "ProcessMark":
        """Reads a mark; raises KeyError, ValueError or TypeError for another text. Old marks say less of the place."""
        return cls(str(row["host"]), int(row["pid"]), row["started"], row.get("boot"), row.get("pid_space"))

    def to_json(self) -> dict[str, Any]:
        """Returns the mark as plain data."""
        return asdict(self)

    def lives(self) -> bool | None:
        """Says whether the process runs; None of one elsewhere or hidden, of which nothing can be known here."""
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
        if is_others and started is None:  # /proc may hide what other users run
            return None
        return started == self.started and state not in _ENDED

    def _is_here(self) -> bool:
        here = (self.boot in (None, _boot()), self.pid_space in (None, _pid_space()))
        return self.host == socket.gethostname() and all(here)


def _stat(pid: int) -> tuple[str, str | None]:
    """State and start time of a process (fields 3 and 22 of Linux's /proc/PID/stat); nothing where there is no such
    file.
    """
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
