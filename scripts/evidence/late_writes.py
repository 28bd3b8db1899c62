"""Drawn runs whose writes to disk are late by a drawn time or cut, and which are killed and go on: 10,000 of them.

python scripts/evidence/late_writes.py --out docs/results/late_writes.json [--cases 10000]

Real are generation, spool, ledger and the files of groups; tests/unit/late_writes.py says what must hold of each. The
file is written after every 500; a call on the same commit goes on there, one on another or behind the last begins anew.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import Pool
from multiprocessing.pool import Pool as Workers
from pathlib import Path
from traceback import format_exc

PIECE = 500
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit"))

from late_writes import Case, in_memory_stores  # noqa: E402
from stamp import facts  # noqa: E402


def one(number: int) -> tuple[int, Counter, str | None]:
    """Case `number`: what was seen in it, and what did not hold."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="late-writes-") as folder:
        try:
            case = Case(number, Path(folder)).run()
        except Exception:  # whatever it is, the case did not hold
            return number, Counter(), format_exc()
    return number, case.seen + Counter([case.kind]), None


def main() -> int:
    """Exit code 1 where a case did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=10_000)
    options = parser.parse_args()
    stamp = facts("python scripts/evidence/late_writes.py --out docs/results/late_writes.json")
    found = stored(options.out, stamp["commit"], options.cases)
    with Pool(os.cpu_count(), initializer=in_memory_stores) as pool:
        while found["cases"] < options.cases:
            last = min(found["cases"] + PIECE, options.cases)
            found = stamp | with_piece(found, pool, last)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{last} of {options.cases}, {found['minutes']} min", flush=True)
    return int(bool(found["failed"]))


def stored(file: Path, commit: str, cases: int) -> dict:
    """What the file has of this commit, unless that is all of them; else nothing done yet."""
    held = json.loads(file.read_text()) if file.exists() else {}
    if held.get("commit") == commit and held["cases"] < cases:
        return held
    return {"cases": 0, "failed": [], "seen": {}, "minutes": 0.0}


def with_piece(found: dict, pool: Workers, last: int) -> dict:
    """What was found, and what is in the cases up to `last`."""
    began = time.monotonic()
    seen, failed = Counter(found["seen"]), list(found["failed"])
    for number, saw, problem in pool.imap_unordered(one, range(found["cases"], last)):
        seen.update(saw)
        if problem:
            failed.append(number)
            print(f"case {number}: {problem}", flush=True)
    minutes = round(found["minutes"] + (time.monotonic() - began) / 60, 1)
    return {"cases": last, "failed": sorted(failed), "seen": dict(sorted(seen.items())), "minutes": minutes}


if __name__ == "__main__":
    sys.exit(main())
