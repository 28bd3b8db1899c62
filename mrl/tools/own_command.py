"""Runs `mrl` in a process of its own, which does not outlive its caller."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mrl.errors import Interrupted

SUPERVISED = "MRL_SUPERVISED"  # in the environment of a run: the process that restarts it
# Exit code of a supervised command that ends with an unforeseen error. Its supervisor says 1, which is also how Ray
# ends a process below Python; a line in a file would not tell them apart where the disk is full.
DEFECT = 70
PROGRAM = "from mrl.cli.main import main; main()"
_GRACE_S = 20.0  # seconds between asking a command to stop and killing it
_PR_SET_PDEATHSIG = 1


def run_mrl(
    arguments: Sequence[str], log: Path, timeout_s: float | None = None, environment: Mapping[str, str] | None = None
) -> int | None:
    """Runs `mrl ARGUMENTS` with output into `log`. Returns its exit code; None if it was ended after `timeout_s`.

    `environment` is the complete one, by default the caller's. Whatever ends the wait ends the command, with all that
    it started.
    """
    with log.open("wb") as output, started_mrl(arguments, output, environment) as process:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


@contextmanager
def started_mrl(
    arguments: Sequence[str], output: IO[bytes] | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    """Runs `mrl ARGUMENTS` during the block, then ends it with all that it started. `output` is by default the
    caller's.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        preexec_fn=_stop_with_the_caller,
    )
    try:
        yield process
    finally:
        _end(process)


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the block like Ctrl-C, because a command in another session receives neither signal."""

    def stop(*_) -> None:
        raise Interrupted("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop_with_the_caller() -> None:
    """Makes the kernel stop the command if the caller is killed. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(process: subprocess.Popen) -> None:
    """Asks a running command to stop, then kills it with all that stayed in its session."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
