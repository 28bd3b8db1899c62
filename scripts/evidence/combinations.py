"""Features beside each other: rows in which every legal pair of values of the table of axes occurs, and every legal
triple of schedule, placement, end and what follows.

python scripts/evidence/combinations.py --work runs/combinations --out docs/results/combinations.json

A row is a run of four tiny steps, its end and what follows; combination_run.py says what must hold of it. Rows that
hold most of what no row has held yet come first, and last those that were run with another mrl than this commit's. What
was done is kept in the file of --out: the next call goes on there, on another machine too. --for SECONDS begins no row
after so many; a failed row is repeated with --row VALUES.
"""

import argparse
import json
import shutil
import sys
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from traceback import format_exc

sys.path.append(str(Path(__file__).resolve().parents[1]))
import claims
from combination_axes import AXES, TRIPLED, refusal
from combination_run import RowRun
from combination_world import make_world
from covering import Array, Row, covering_array, most_first, wanted
from own_memory import is_possible
from stamp import facts

SEED = 0
SOURCES = ("mrl",)  # what makes a row old
COMMAND = "scripts/evidence/combinations.sh"


def main() -> int:
    """Exit code 1 where a row did not hold, 2 where none can be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--row", action="append", help="this row alone, by its values as they are printed; repeatable")
    parser.add_argument("--for", type=float, default=float("inf"), dest="seconds", help="begin no row after so many")
    parser.add_argument("--list", action="store_true", help="print the rows")
    options = parser.parse_args()
    if not is_possible():
        print("a row needs a shared memory of its own: root, or namespaces of users (unshare)", file=sys.stderr)
        return 2
    work = options.work.resolve()
    world = make_world(work / "world")
    array = covering_array(AXES, lambda row: refusal(row, world), TRIPLED, SEED)
    done = stored(options.out)
    rows = [array.rows[number] for number in still_to_do(array, done)]
    if options.row:
        rows = [row_of(text) for text in options.row]  # of an older array too
    if options.list:
        print(*map(words, rows), sep="\n")
        return 0
    deadline = time.monotonic() + options.seconds
    for row in rows:
        if time.monotonic() > deadline:
            break
        found = one(row, world, work)
        done = [known for known in done if known["row"] != found["row"]] + [found]
        options.out.write_text(json.dumps(results(array, done), indent=1) + "\n")
    return int(any(known["problems"] for known in done))


def words(row: Row) -> str:
    """A row in the order of the axes."""
    return " | ".join(row[axis] for axis in AXES)


def row_of(text: str) -> Row:
    """The row that `words` has written."""
    return dict(zip(AXES, text.split(" | "), strict=True))


def stored(file: Path) -> list[dict]:
    """What was done of rows of these axes; nothing where the file has others, which is said.

    Rows from before an axis was added, or a value of one, have the axis's first value: what runs were without it.
    """
    if not file.exists():
        return []
    held = json.loads(file.read_text())
    if all(set(values) <= set(AXES.get(axis, ())) for axis, values in held["axes"].items()):
        return [known | {"row": words(_with_new_axes(known["row"], held["axes"]))} for known in held["done"]]
    print(f"{file}: {len(held['done'])} rows of other axes count for nothing", file=sys.stderr)
    return []


def _with_new_axes(text: str, axes: Iterable[str]) -> Row:
    return {axis: values[0] for axis, values in AXES.items()} | dict(zip(axes, text.split(" | "), strict=True))


def _axes() -> dict[str, list[str]]:
    return {axis: list(values) for axis, values in AXES.items()}


def still_to_do(array: Array, done: list[dict]) -> list[int]:
    """Numbers of rows that were not done, with most that is new first; then those that were with another mrl."""
    at = claims.head()
    old = {one["row"] for one in done if claims.changed_lines(one["commit"], at, SOURCES) != 0}
    known = {one["row"] for one in done}
    order = most_first(array.rows, _legal(array), [row_of(text) for text in known])
    return [
        *(number for number in order if words(array.rows[number]) not in known),
        *(number for number in order if words(array.rows[number]) in old),
    ]


def _legal(array: Array) -> list[frozenset]:
    return [values for values in wanted(AXES, TRIPLED) if values not in array.illegal]


def one(row: Row, world: Path, work: Path) -> dict:
    """Runs a row; its folder stays where something did not hold. The moment of its end is drawn by its number."""
    number = zlib.crc32(words(row).encode())
    folder = work / f"row-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    run = RowRun(number, row, world, folder, work / "wholes" / claims.head()[:12])
    try:
        run.do()
    except Exception:  # whatever it is, the row did not hold, and the next one is run
        run.problems.append(format_exc())
    seconds = round(time.monotonic() - began, 1)
    said = f"{words(row)}: {seconds} s {run.seconds}"
    if run.problems:
        again = f"{COMMAND} --row '{words(row)}'"
        print(f"{said}\n  DOES NOT HOLD: {run.problems}\n  again: {again}", flush=True)
    else:
        again = ""
        shutil.rmtree(folder)
        print(f"{said}: holds", flush=True)
    stamp = facts(COMMAND)
    known = {"row": words(row), "commit": stamp["commit"], "date": stamp["date"], "seconds": seconds}
    found = known | {"commands": run.seconds, "problems": run.problems}
    return found | {"again": again} if again else found


def results(array: Array, done: list[dict]) -> dict:
    """What goes to the results file."""
    legal = _legal(array)
    rows = [frozenset(row_of(known["row"]).items()) for known in done if not known["problems"]]
    held = [values for values in legal if any(values <= row for row in rows)]
    return facts(COMMAND) | {
        "axes": _axes(),
        "rows": len(array.rows),
        "rows_done": len(done),
        "rows_failed": sum(bool(known["problems"]) for known in done),
        "minutes": round(sum(known["seconds"] for known in done) / 60, 1),
        "pairs_legal": sum(len(values) == 2 for values in legal),
        "pairs_held": sum(len(values) == 2 for values in held),
        "triples_legal": sum(len(values) == 3 for values in legal),
        "triples_held": sum(len(values) == 3 for values in held),
        "illegal": sorted([sorted(map(list, values)), why] for values, why in array.illegal.items()),
        "done": done,
    }


if __name__ == "__main__":
    sys.exit(main())
