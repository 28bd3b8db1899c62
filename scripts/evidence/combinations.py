"""Features beside each other: rows in which every legal pair of values of the table of axes occurs, and every legal
triple of schedule, placement, end and what follows.

python scripts/evidence/combinations.py --work runs/combinations --out docs/results/combinations.json

A row is a run of four tiny steps, its end and what follows; combination_run.py says what must hold of it. What was done
is kept in the work folder: with --for SECONDS the next call goes on there, and a failed row is repeated with --row N.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from combination_axes import AXES, TRIPLED, refusal
from combination_run import RowRun
from combination_world import make_world
from covering import Array, covering_array, wanted
from stamp import facts

SEED = 0


def main() -> int:
    """Exit code 1 where a row did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row", type=int, action="append", help="this row alone, again; repeatable")
    parser.add_argument("--for", type=float, default=float("inf"), dest="seconds", help="begin no row after so many")
    parser.add_argument("--list", action="store_true", help="print the rows")
    options = parser.parse_args()
    work = options.work.resolve()
    world = make_world(work / "world")
    array = covering_array(AXES, lambda row: refusal(row, world), TRIPLED, SEED)
    if options.list:
        for number, row in enumerate(array.rows):
            print(number, " | ".join(row[axis] for axis in AXES))
        return 0
    done = _done(work)
    deadline = time.monotonic() + options.seconds
    for number in options.row or range(len(array.rows)):
        if time.monotonic() > deadline:
            break
        if options.row or str(number) not in done:
            done[str(number)] = _do(number, array, world, work)
            (work / "done.json").write_text(json.dumps(done, indent=1))
    if options.out:
        options.out.write_text(json.dumps(results(array, done), indent=1) + "\n")
    return int(any(one["problems"] for one in done.values()))


def _done(work: Path) -> dict[str, dict]:
    path = work / "done.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _do(number: int, array: Array, world: Path, work: Path) -> dict:
    """One row; its folder stays where something did not hold."""
    folder = work / f"row-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    run = RowRun(number, array.rows[number], world, folder, work / "wholes")
    run.do()
    found = {"row": array.rows[number], "seconds": round(time.monotonic() - began, 1), "problems": run.problems}
    if run.problems:
        print(f"row {number}: {run.problems}\n  again: {Path(__file__).name} --work {work} --row {number}", flush=True)
    else:
        shutil.rmtree(folder)
        print(f"row {number}: holds, {found['seconds']} s", flush=True)
    return found


def results(array: Array, done: dict[str, dict]) -> dict:
    """What goes to the results file."""
    legal = [values for values in wanted(AXES, TRIPLED) if values not in array.illegal]
    rows = [frozenset(one["row"].items()) for one in done.values() if not one["problems"]]
    held = [values for values in legal if any(values <= row for row in rows)]
    return facts("scripts/evidence/combinations.sh") | {
        "axes": {axis: list(values) for axis, values in AXES.items()},
        "rows": len(array.rows),
        "rows_done": len(done),
        "rows_failed": sum(bool(one["problems"]) for one in done.values()),
        "minutes": round(sum(one["seconds"] for one in done.values()) / 60, 1),
        "pairs_legal": sum(len(values) == 2 for values in legal),
        "pairs_held": sum(len(values) == 2 for values in held),
        "triples_legal": sum(len(values) == 3 for values in legal),
        "triples_held": sum(len(values) == 3 for values in held),
        "illegal": sorted([sorted(map(list, values)), why] for values, why in array.illegal.items()),
        "problems": {number: one for number, one in done.items() if one["problems"]},
    }


if __name__ == "__main__":
    sys.exit(main())
