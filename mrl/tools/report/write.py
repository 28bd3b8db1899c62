"""Writes pages as files."""

from dataclasses import dataclass
from pathlib import Path

from mrl.errors import EnvironmentFault
from mrl.plain_files import check_output
from mrl.record.run_dir import RunDir, write_text
from mrl.tools.report.html import BEGINS, page_html
from mrl.tools.report.page import Page
from mrl.tools.report.run_record import read_run
from mrl.tools.report.sections import run_page


@dataclass(frozen=True)
class Written:
    """A written report and its first statement."""

    path: Path
    bytes: int
    headline: str


def write_report(run_dir: Path, output: Path | None = None) -> Written:
    """Reads the run and writes its page, completely or not at all, to `output` (by default RUN/report.html).

    Raises ConfigError for an unreadable run directory, and what `write_page` raises.
    """
    run = read_run(run_dir)
    target = output or RunDir(run.path).report
    page = run_page(run)
    return Written(target, write_page(page, target), page.headline)


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
