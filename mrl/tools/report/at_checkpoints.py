"""Makes a run's report during training. No error of it affects the run."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mrl.record.attempts import read_attempts
from mrl.record.console import Pace
from mrl.record.goodput import goodput_of
from mrl.record.run_dir import RunDir
from mrl.record.views import Metrics, View
from mrl.tools.report.write import write_report

APART_S = 300.0  # between two reports during a run
_TO_FINISH_S = 20.0
_PROGRAM = "import os; os.nice(19); from mrl.cli.main import main; main()"


class ReportView(View):
    """Writes the report after saved steps in a low-priority process, at most once in APART_S seconds."""

    def __init__(self, folder: Path, saves: Callable[[int], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._saves = saves
        self._pace = Pace(APART_S, clock)
        self._process = None

    def write(self, step: int, metrics: Metrics) -> None:
        """Starts a report, if one is due and none is running."""
        if self._saves(step) and not self._under_way and self._pace.due():
            with (RunDir(self._folder).logs / "report.log").open("wb") as log:
                command = [sys.executable, "-c", _PROGRAM, "report", str(self._folder)]
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
                )

    def close(self) -> None:
        """Ends a running report. The last report is written afterwards."""
        if self._under_way:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_TO_FINISH_S)

    @property
    def _under_way(self) -> bool:
        return self._process is not None and self._process.poll() is None


def report_at_the_end(folder: Path) -> str:
    """Writes the report of a run that this process held. Returns lines about report and time; empty if it held none.

    Any error appears only in these lines.
    """
    try:
        if not any(attempt.is_of_this_process for attempt in read_attempts(folder)[-1:]):
            return ""
        spent = goodput_of(folder)
        return "\n".join([*([str(spent)] if spent else []), f"report: {write_report(folder).path}"])
    except Exception as error:  # a page failed, not the run, whose result stands
        return f"note: no report was written: {type(error).__name__}: {error}"
