"""The log of a process, and its processors."""

import os
import sys
from pathlib import Path

from mrl.record.lossy_output import lossy


def log_to(path: str) -> None:
    """Redirects stdout and stderr of this process and its children to a file of the run directory.

    A full disk there loses lines.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = lossy(sys.__stdout__)
    sys.stderr = lossy(sys.__stderr__)


def stacks_file(log: Path) -> Path:
    """Returns the file beside a process's log with the stacks of its threads when a deadline was missed."""
    return log.with_suffix(".stacks")


def own_cpus() -> int:
    """Returns the number of CPUs of this process, which is also that of a cluster started by the run."""
    return len(os.sched_getaffinity(0))
