"""Features beside each other: rows in which every legal pair of values of the table of axes occurs, and every legal
triple of schedule, placement, end and what follows.

A row is a run of four tiny steps, its end and what follows; combination_run.py says what must hold of it. test_kills.py
runs them all, `python tests/proofs/combinations.py --work WORK --row VALUES` one by its values as they are printed.
"""

import argparse
import shutil
import sys
import zlib
from pathlib import Path
from traceback import format_exc

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))  # what makes worlds

from combination_axes import AXES, TRIPLED, refusal
from combination_run import RowRun
from combination_world import make_world
from covering import Row, covering_array

SEED = 0


def main() -> int:
    """Exit code 1 where a row did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--row", action="append", required=True, help="repeatable")
    options = parser.parse_args()
    work = options.work.resolve()
    world = make_world(work / "world")
    problems = [problem for text in options.row for problem in one(row_of(text), world, work)]
    print("\n".join(problems) or "holds")
    return int(bool(problems))


def words(row: Row) -> str:
    """A row in the order of the axes."""
    return " | ".join(row[axis] for axis in AXES)


def row_of(text: str) -> Row:
    """The row that `words` has written."""
    return dict(zip(AXES, text.split(" | "), strict=True))


def all_rows(world: Path) -> tuple[Row, ...]:
    """The covering array over the rules of the configuration."""
    return covering_array(AXES, lambda row: refusal(row, world), TRIPLED, SEED).rows


def one(row: Row, world: Path, work: Path) -> list[str]:
    """Runs a row, and says what did not hold; its folder stays then. The moment of its end is drawn by its number."""
    number = zlib.crc32(words(row).encode())
    folder = work / f"row-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    run = RowRun(number, row, world, folder, work / "wholes")
    try:
        run.do()
    except Exception:  # whatever it is, the row did not hold, and the next one is run
        run.problems.append(format_exc())
    if run.problems:
        return [f"{words(row)}: {problem}" for problem in run.problems]
    shutil.rmtree(folder)
    return []


if __name__ == "__main__":
    sys.exit(main())
