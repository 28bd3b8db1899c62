"""Restarts `mrl train` after ends from which it can continue. Each start is a process of its own.

    exit code 5, or death by a signal    it is started again from the newest checkpoint, at most `restarts` times
    exit code 1 without an `ended` line  the same: Ray ends a process like this, below Python, when its GCS is lost
    0 to 4, 6, DEFECT (which is said 1)  it ends: a restart would not help
    SIGTERM or Ctrl-C                    passed on to the run; it ends when the run has ended
    three ends without a finished step   a crash loop: it ends with an error that lists the three

Between two starts, nothing of the earlier one remains. Its processes are found by descent, because orphans below a
supervisor become its children. Ray's folder and shared memory are found by the owner that they name.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.cluster.ray_folder import remove_folders_of_the_dead
from mrl.engine.leftovers import remove_noted
from mrl.errors import ConfigError, Interrupted
from mrl.platforms.process_tree import adopted_orphans, end_descendants, reap_orphans
from mrl.record.attempts import Attempt, read_attempts
from mrl.record.run_dir import RunDir, read_metrics
from mrl.tools.own_command import DEFECT, SUPERVISED, started_mrl

CRASH_LOOP = 3  # ends in a row without a finished step
_LOOK_S = 0.1


@dataclass(frozen=True)
class RunEnd:
    """How one start ended. `code` as in subprocess, negative for a signal; `was_ended`: Ray ended it below Python."""

    code: int
    why: str
    has_finished_a_step: bool
    was_ended: bool = False

    @property
    def is_resumable(self) -> bool:
        """Tells whether another start may continue."""
        return self.code == Interrupted.exit_code or self.code < 0 or self.was_ended

    def __str__(self) -> str:
        how = f"killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"
        if self.why:
            return f"{how}: {self.why}"
        return how


class SignalRelay:
    """Passes SIGTERM and SIGINT on to the current run."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._process: subprocess.Popen | None = None

    def watch(self, process: subprocess.Popen) -> None:
        """Makes the process the receiver of signals, including one that came just before."""
        self._process = process
        if self.signal is not None:
            process.send_signal(self.signal)

    def receive(self, number: int, _frame: Any) -> None:
        """Passes a signal on to the current process."""
        self.signal = number
        if self._process is not None:
            self._process.send_signal(number)


def supervise(arguments: Sequence[str], folder: Path, restarts: int) -> int:
    """Runs `mrl train ARGUMENTS` until it is done or must not be restarted. Returns the exit code.

    `folder` is the run directory. Raises ConfigError below another supervisor, Interrupted for a crash loop.
    """
    if SUPERVISED in os.environ:
        raise ConfigError(
            f"--restarts: process {os.environ[SUPERVISED]} starts this run again already; leave it out of one of them"
        )
    ends: list[RunEnd] = []
    with adopted_orphans(), _handed_on() as stop:
        while True:
            ends.append(_one_start(arguments, folder, stop, is_first=not ends))
            if not _goes_on(ends, restarts, stop):
                if ends[-1].code < 0 or ends[-1].was_ended:
                    return Interrupted.exit_code
                return ends[-1].code
            print(f"supervisor: {ends[-1]}; start {len(ends) + 1} of {restarts + 1}", flush=True)


def _goes_on(ends: Sequence[RunEnd], restarts: int, stop: SignalRelay) -> bool:
    """Tells whether the run is started again. Raises Interrupted for a crash loop."""
    if stop.signal is not None or not ends[-1].is_resumable:
        return False
    in_a_row = ends[-CRASH_LOOP:]
    if len(in_a_row) == CRASH_LOOP and not any(end.has_finished_a_step for end in in_a_row):
        listed = "".join(f"\n  {end}" for end in in_a_row)
        raise Interrupted(f"--restarts: {CRASH_LOOP} ends with no finished step between them, a crash loop:{listed}")
    if len(ends) > restarts:
        print(f"supervisor: {ends[-1]}; it is not started again: --restarts {restarts} are used up", flush=True)
        return False
    return True


@contextmanager
def _handed_on() -> Iterator[SignalRelay]:
    stop = SignalRelay()
    before = {number: signal.signal(number, stop.receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _one_start(arguments: Sequence[str], folder: Path, stop: SignalRelay, is_first: bool) -> RunEnd:
    """Starts the run as requested, later starts with resume, waits for its end, and removes what it left."""
    run = RunDir(folder)
    starts = len(read_attempts(folder))
    newest = _newest_line(run)
    resumes = not is_first and run.config.is_file() and "--resume" not in arguments
    own = [*arguments, "--resume"] if resumes else arguments
    with started_mrl(["train", *own], environment=os.environ | {SUPERVISED: str(os.getpid())}) as process:
        stop.watch(process)
        while process.poll() is None:
            reap_orphans(but=process.pid)
            time.sleep(_LOOK_S)
    _clean_up(run)
    attempt = _newest_attempt(folder, starts)
    now = _newest_line(run)
    has_finished = attempt is not None and now != newest and now.get("training/global_step", 0) > attempt.step
    why = "" if attempt is None else attempt.message.split("\n")[0]
    was_ended = process.returncode == 1 and attempt is not None and attempt.exit_code is None
    why = "its process was ended from below" if was_ended else why
    code = process.returncode
    if code == DEFECT:
        code = 1
    return RunEnd(code, why, has_finished, was_ended)


def _clean_up(run: RunDir) -> None:
    """Removes what the ended start left on this machine: processes, Ray's folder, shared memory."""
    if left := end_descendants():
        print(f"supervisor: ended {left} processes that the run had left", flush=True)
    reap_orphans()
    remove_folders_of_the_dead()
    remove_noted(run.logs)


def _newest_attempt(folder: Path, before: int) -> Attempt | None:
    """Returns the record of the newest start; None if it wrote none. `before`: number of earlier starts."""
    attempts = read_attempts(folder)
    if len(attempts) > before:
        return attempts[-1]
    return None


def _newest_line(run: RunDir) -> Mapping[str, Any]:
    rows = []
    with suppress(ConfigError):  # a damaged file, which the run itself refuses
        rows = read_metrics(run.metrics)
    if rows:
        return rows[-1]
    return {}
