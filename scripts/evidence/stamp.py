"""Puts one JSON object from standard input into a stored result, with commit, command, date, cores and load.

    COMMAND | scripts/evidence/stamp.py docs/results/NAME.json "COMMAND" [--at PART]
    scripts/evidence/stamp.py --clean     exit code 2 where files that no commit names would be measured

What stands in docs alone is measured by nobody, so that results may be renewed one after the other.
"""

import argparse
import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("command", nargs="?", help="what made it")
    parser.add_argument("--at", metavar="PART", help="of a file of several: the others stay")
    parser.add_argument("--clean", action="store_true", help="look at the tree alone")
    options = parser.parse_args()
    if changed := changes():
        print(f"commit these first, results name a commit:\n{changed}", file=sys.stderr)
        return 2
    if not options.clean:
        result = facts(options.command) | json.loads(sys.stdin.read())
        held = json.loads(options.file.read_text(encoding="utf-8")) if options.at and options.file.exists() else {}
        stored = held | {options.at: result} if options.at else result
        options.file.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return 0


def facts(command: str) -> dict[str, Any]:
    """What every stored result says of itself; the load is the mean of five minutes."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "command": command,
        "date": date.today().isoformat(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[1], 2),
    }


def changes() -> str:
    """Files outside of docs that differ from the commit, a line each; empty where none does."""
    return _git("status", "--porcelain", "--", ".", ":!docs")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
