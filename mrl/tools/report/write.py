"""Writes pages as files, and a run's report during training, when no error of a report affects the run."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mrl.errors import EnvironmentFault
from mrl.plain_files import check_output
from mrl.record.attempts import read_attempts
from mrl.record.console import Pace
from mrl.record.goodput import goodput_of
from mrl.record.run_dir import RunDir, write_text
from mrl.record.views import Metrics, View
from mrl.tools.report.html import BEGINS, page_html
from mrl.tools.report.page import Page
from mrl.tools.report.run_record import read_run
from mrl.tools.report.sections import run_page

APART_S = 300.0  # between two reports during a run
_TO_FINISH_S = 20.0
_PROGRAM = "import os; os.nice(19); from mrl.cli.main import main; main()"


@dataclass(frozen=True)
class WrittenReport:
    """A written report and its first statement."""

    path: Path
    bytes: int
    headline: str


def write_report(run_dir: Path, output: Path | None = None) -> WrittenReport:
    """Reads the run and writes its page, completely or not at all, to `output` (by default RUN/report.html).

    Raises ConfigError for an unreadable run directory, and what `write_page` raises.
    """
    run = read_run(run_dir)
    target = output or RunDir(run.path).report
    folder = target.parent / f"{target.stem}-samples"
    page = run_page(run, folder)
    for name, further in page.beside:
        folder.mkdir(exist_ok=True)
        write_page(further, folder / name)
    return WrittenReport(target, write_page(page, target), page.headline)


def write_page(page: Page, target: Path) -> int:
    """Writes a page, completely or not at all. Returns its bytes.

    Raises ConfigError if the target is another kind of file, EnvironmentFault if it cannot be written.
    """
    check_output(target, begins=BEGINS.encode())
    text = page_html(page)
    try:
        write_text(target, text)
    except OSError as error:
        raise EnvironmentFault(f"{target}: cannot be written ({error.strerror})") from error
    return len(text.encode())


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
