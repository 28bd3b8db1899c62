"""What every stored result says of itself: commit, command, date, cores and load."""

import json
import os
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def facts(command: str) -> dict[str, Any]:
    """The load is the mean of five minutes."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "command": command,
        "date": date.today().isoformat(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[1], 2),
    }


def with_rows(found: dict[str, Any], name: str, rows: list[dict[str, Any]]) -> str:
    """Returns JSON of `found` with `rows` as its last entry, a row a line."""
    lines = ",\n".join(map(json.dumps, rows))
    return f"{json.dumps(found | {name: []}, indent=1)[:-4]}[\n{lines}\n]}}\n"


def changes() -> str:
    """Files that differ from the commit, a line each, but for docs and the figures that release.py has just written."""
    return _git("status", "--porcelain", "--", ".", ":!docs", ":!scripts/evidence/figures.json")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
