"""Implements `mrl data`."""

import argparse
import math

from mrl.data.sources import SOURCES
from mrl.errors import ConfigError


def add(commands) -> None:
    """Registers the command."""
    data = commands.add_parser(
        "data", help="convert a data set on your disk into the parquet files that mrl reads (verl's schema)"
    )
    data.add_argument(
        "source",
        choices=list(SOURCES),
        help="; ".join(f"{s.name}: {s.title}" for s in SOURCES.values()),
        metavar="SOURCE",
    )
    data.add_argument("files", nargs="+", help="your local copy: .parquet, .jsonl or .json", metavar="FILE")
    data.add_argument("-o", "--output", required=True, help="the .parquet file to write; must not exist")
    data.add_argument("--split", default="train", help="written into extra_info.split; default: train")
    data.add_argument(
        "--max-bad-share", type=_share, default=0.01, help="write nothing above this share of bad rows; default: 0.01"
    )
    data.add_argument("--json", action="store_true", help="print the report as one JSON object")
    data.set_defaults(run=_data, parser=data)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no share: give 0 to 1")
    return share


def _data(options: argparse.Namespace) -> None:
    import json
    from pathlib import Path

    from mrl.data.prepare import prepare

    output = Path(options.output)
    if output.suffix != ".parquet" and not output.exists():
        raise ConfigError(f"-o {output}: the name must end in .parquet")
    report = prepare(SOURCES[options.source], options.files, output, options.split, options.max_bad_share)
    print(json.dumps(report.to_json(), ensure_ascii=False) if options.json else f"{report}\nwrote {output}")
