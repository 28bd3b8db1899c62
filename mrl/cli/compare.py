"""Implements `mrl compare`."""

import argparse
import json
from pathlib import Path


def add(commands) -> None:
    """Registers the command."""
    compare = commands.add_parser(
        "compare",
        help="compare runs: settings that differ, curves, and whether validation scores differ by more than chance",
        description="Compares every further run with the first one and writes one self-contained HTML file.",
    )
    compare.add_argument("run_dirs", metavar="RUN", nargs="+", help="two run directories or more")
    compare.add_argument("-o", "--output", default="compare.html", help="file to write; default: compare.html")
    compare.add_argument("--json", action="store_true", help="print one JSON object and write no page")
    compare.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> None:
    from mrl.tools.report.comparison import compare
    from mrl.tools.report.sections_compare import compare_page
    from mrl.tools.report.write import write_page

    comparison = compare([Path(path) for path in options.run_dirs])
    if options.json:
        print(json.dumps(comparison.to_json()))
        return
    page = compare_page(comparison)
    size = write_page(page, Path(options.output))
    print(page.headline)
    for test in comparison.tests:
        print(f"  {test.words()}")
    for note in comparison.notes:
        print(f"  note: {note}")
    print(f"{len(comparison.settings)} settings differ; wrote {options.output} ({size / 1e6:.2f} MB)")
