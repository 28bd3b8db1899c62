"""What ranks and engines wrote last, beside the error that they ended with: a person need not know which of many logs
to open.

Errors of a process bear its name from where they are received (`concerning`); the run, which knows its folder, reads
(`with_log_tails`).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from mrl.vllm.requests import log_name

# of a log, of a line, of an error
LINES = 15
CHARACTERS = 300
FILES = 3
_READ = 64 * 1024  # bytes from the end of a log
# colours, cursor moves: a log is text of others
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")

Raised = TypeVar("Raised", bound=BaseException)


def concerning(error: Raised, *names: str) -> Raised:
    """The error with the names of the processes that it is of, in the order in which they are told."""
    error.processes = tuple(dict.fromkeys((*processes_of(error), *names)))
    return error


def processes_of(error: BaseException) -> tuple[str, ...]:
    """Names of ranks and engines, as in `concerning`."""
    return getattr(error, "processes", ())


def log_file(name: str) -> str:
    """File in logs/ that the output of a rank, an engine or an engine's rank goes to; of a scorer, its processes'."""
    kind, _, number = name.partition(" ")
    if kind == "scorer":
        if number == "0":
            return "reward.log"
        return f"reward-{number}.log"
    return f"{log_name(f'actor {name}' if kind == 'rank' else name)}.log"


def stacks_file(log: Path) -> Path:
    """The file beside a process's log that says where its threads were when somebody missed a deadline."""
    return log.with_suffix(".stacks")


@contextmanager
def with_log_tails(logs: Path) -> Iterator[None]:
    """An error of processes gets the last lines of their logs as notes, which a traceback and `mrl` print below it."""
    try:
        yield
    except Exception as error:
        for name in processes_of(error)[:FILES]:
            if tail := log_tail(logs / log_file(name)):
                error.add_note(f"last lines of {logs / log_file(name)}:\n" + "\n".join(f"  | {line}" for line in tail))
        raise


def log_tail(file: Path) -> list[str]:
    """The last lines that are not empty, control characters taken out; none of a file that is not there
    (another node may have it).
    """
    try:
        with file.open("rb") as log:
            log.seek(max(log.seek(0, 2) - _READ, 0))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [_CONTROL.sub("", line).rstrip() for line in re.split(r"[\r\n]+", text)]
    return [line if len(line) <= CHARACTERS else f"{line[:CHARACTERS]}..." for line in lines if line][-LINES:]
