"""Runs the rows of docs/evidence.md (rows.py) one after the other and keeps what each came to: figures.json."""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from pathlib import Path
from tempfile import TemporaryDirectory

from rows import ROOT, ROWS, STORED, Row
from stamp import changes, facts

MOST_MINUTES = 120.0


def main() -> int:
    """Exit code 1 where a goal was missed that was met before, 2 where files differ from the commit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("keys", nargs="*", metavar="KEY", help="these rows alone")
    options = parser.parse_args()
    if unknown := set(options.keys) - {row.key for row in ROWS}:
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(row.key for row in ROWS)}")
    if changed := changes():
        print(f"commit these first, figures name a commit:\n{changed}", file=sys.stderr)
        return 2
    held = json.loads(STORED.read_text(encoding="utf-8"))
    if not options.keys:
        held["release"] = {name: facts("")[name] for name in ("commit", "date")}
    worse = []
    left = MOST_MINUTES
    for row in ROWS:
        if row.minutes is None or (options.keys and row.key not in options.keys):
            continue
        before = held.pop(row.key, None)
        if row.minutes > left and not options.keys:
            print(f"{row.key}: no time is left", flush=True)
            continue
        began = time.monotonic()
        held[row.key] = made(row)
        minutes = (time.monotonic() - began) / 60
        left -= minutes
        print(f"{row.key}: {held[row.key]['figure']} ({minutes:.1f} minutes)", flush=True)
        if not held[row.key]["met"] and (before is None or before["met"]):
            worse.append(row.key)
        ordered = {key: held[key] for key in ("release", *(one.key for one in ROWS)) if key in held}
        STORED.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"worse than before: {', '.join(worse) or 'none'}")
    return int(bool(worse))


def made(row: Row) -> dict:
    """Runs a row's command. One that fails says so as its figure."""
    stamp = facts(row.command)
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        words = [str(out) if word == "OUT" else word for word in shlex.split(row.command)]
        if words[0] == "pytest":
            words = [sys.executable, "-m", *words, "-m", "long or not long", f"--junitxml={out}"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        told = subprocess.run(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        figure, met = f"exit code {told.returncode}", False
        if row.read is None and out.exists():
            figure, met = of_tests(out)
        elif row.read is not None and told.returncode == 0:
            figure, met = row.read(answer(out.read_text(encoding="utf-8") if out.exists() else told.stdout))
    return (
        {"figure": figure, "met": met} | {name: stamp[name] for name in ("date", "commit")} | {"machine": row.machine}
    )


def answer(text: str) -> object:
    """The JSON, or the last line of a text that is some; else the text."""
    for part in (text, text.rstrip().rpartition("\n")[2]):
        try:
            return json.loads(part)
        except ValueError:
            continue
    return text


def of_tests(report: Path) -> tuple[str, bool]:
    """Of a JUnit report: how many passed, and whether all that ran did."""
    suite = next(xml.parse(report).getroot().iter("testsuite"))
    count, wrong, skipped = (
        sum(int(suite.get(key, 0)) for key in keys) for keys in (("tests",), ("failures", "errors"), ("skipped",))
    )
    passed = count - wrong - skipped
    words = [f"{passed} passed", *([f"{wrong} failed"] if wrong else []), *([f"{skipped} skipped"] if skipped else [])]
    return ", ".join(words), passed > 0 and not wrong


if __name__ == "__main__":
    sys.exit(main())
