"""Every start of a run, and how it ended: `attempts.jsonl` in the run directory, which no resume cuts.

A start writes a line with `event` began: `time` (UTC), `command`, `versions`, `host`, `pid`, `step` (of the checkpoint
that it goes on from, 0 for a new run). Its end, unless the process was killed, writes one with `event` ended: `time`,
`exit_code` and `message`, the codes being those of mrl.errors.
"""

import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mrl.errors import MrlError, described
from mrl.record.run_dir import json_line

ATTEMPTS = "attempts.jsonl"


@dataclass(frozen=True)
class Attempt:
    """One start of the run. `exit_code` is None while it goes on, and of one that was killed."""

    began: str
    command: tuple[str, ...]
    versions: dict[str, str]
    host: str
    pid: int
    step: int
    ended: str | None = None
    exit_code: int | None = None
    message: str = ""

    @property
    def is_of_this_process(self) -> bool:
        """Whether this very process made the start."""
        return (self.host, self.pid) == (socket.gethostname(), os.getpid())


@contextmanager
def attempt(folder: Path, step: int, versions: Mapping[str, str]) -> Iterator[None]:
    """Writes that the run was started, and, when the block ends, how. What the disk refuses of it ends no run."""
    began = {
        "command": sys.argv,
        "versions": dict(versions),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "step": step,
    }
    _append(folder, "began", began)
    try:
        yield
    except BaseException as error:
        _append(folder, "ended", {"exit_code": _exit_code(error), "message": _text(error)})
        raise
    _append(folder, "ended", {"exit_code": 0, "message": ""})


def read_attempts(folder: Path) -> list[Attempt]:
    """The starts of a run, in order; none of a run that older versions wrote.

    A line that is no such object is passed over.
    """
    found: list[Attempt] = []
    with suppress(FileNotFoundError):
        for line in (folder / ATTEMPTS).read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                _take(found, json.loads(line))
    return found


def _take(found: list[Attempt], row: dict[str, Any]) -> None:
    if row["event"] == "began":
        versions = {str(name): str(version) for name, version in row["versions"].items()}
        found.append(
            Attempt(
                str(row["time"]),
                tuple(map(str, row["command"])),
                versions,
                str(row["host"]),
                int(row["pid"]),
                int(row["step"]),
            )
        )
    elif found:
        ended = {"ended": str(row["time"]), "exit_code": int(row["exit_code"]), "message": str(row["message"])}
        found[-1] = Attempt(**vars(found[-1]) | ended)


def _append(folder: Path, event: str, row: Mapping[str, Any]) -> None:
    with suppress(OSError), (folder / ATTEMPTS).open("a", encoding="utf-8") as file:
        file.write(json_line({"event": event, "time": datetime.now(UTC).isoformat(timespec="seconds")} | row))


def _exit_code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, MrlError) else 1


def _text(error: BaseException) -> str:
    return described(error) if isinstance(error, Exception) else type(error).__name__
