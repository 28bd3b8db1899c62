"""Implements `mrl report`."""

import argparse
from pathlib import Path


def add(commands) -> None:
    """Registers the command."""
    report = commands.add_parser(
        "report",
        help="write one page about a run: verdict, curves, times, memory, proof of the weight sync, samples",
        description="Writes one self-contained HTML file from the run directory, whether the run goes on, has ended or "
        "failed. It uses no network.",
    )
    report.add_argument("run_dir", metavar="RUN", help="a run directory, such as runs/first")
    report.add_argument("-o", "--output", help="file to write; default: RUN/report.html")
    report.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    from mrl.tools.report.write import write_report

    written = write_report(Path(options.run_dir), Path(options.output) if options.output else None)
    print(written.headline)
    print(f"wrote {written.path} ({written.bytes / 1e6:.2f} MB)")
