"""The last log lines of ranks and engines, shown with their errors, so that nobody has to search many logs.

Errors get the names of their processes where they are received (`concerning`). The run, which knows its folder, reads
the logs (`with_log_tails`).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from mrl.engine.requests import log_name

# limits for a log, a line, an error
LINES = 15
CHARACTERS = 300
FILES = 3
_READ = 64 * 1024  # bytes from the end of a log
# colours and cursor moves, because other programs write logs
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")

Raised = TypeVar("Raised", bound=BaseException)


def concerning(error: Raised, *names: str) -> Raised:
    """Adds the names of the processes concerned to the error, in order, and returns it."""
    error.processes = tuple(dict.fromkeys((*processes_of(error), *names)))
    return error


def processes_of(error: BaseException) -> tuple[str, ...]:
    """Returns the names of ranks and engines that `concerning` added."""
    return getattr(error, "processes", ())


def log_file(name: str) -> str:
    """Returns the file in logs/ with the output of a rank, an engine, an engine's rank, or a scorer's processes."""
    kind, _, number = name.partition(" ")
    if kind == "scorer":
        if number == "0":
            return "reward.log"
        return f"reward-{number}.log"
    return f"{log_name(f'actor {name}' if kind == 'rank' else name)}.log"


@contextmanager
def with_log_tails(logs: Path) -> Iterator[None]:
    """Adds the last log lines of the processes to an error as notes, which are printed below it."""
    try:
        yield
    except Exception as error:
        for name in processes_of(error)[:FILES]:
            if tail := log_tail(logs / log_file(name)):
                error.add_note(f"last lines of {logs / log_file(name)}:\n" + "\n".join(f"  | {line}" for line in tail))
        raise


def log_tail(file: Path) -> list[str]:
    """Returns the last non-empty lines without control characters; nothing if the file is absent (another node may have
    it).
    """
    try:
        with file.open("rb") as log:
            log.seek(max(log.seek(0, 2) - _READ, 0))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [_CONTROL.sub("", line).rstrip() for line in re.split(r"[\r\n]+", text)]
    return [line if len(line) <= CHARACTERS else f"{line[:CHARACTERS]}..." for line in lines if line][-LINES:]
