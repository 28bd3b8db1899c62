"""Drawn runs whose writes to disk are late by a drawn time or cut, and which are killed and go on: 10,000 of them.

python scripts/evidence/late_writes.py --out docs/results/late_writes.json [--cases 10000]

Real are generation, spool, ledger and the files of groups; tests/unit/late_writes.py says what must hold of each. With
--from N it goes on where it was stopped.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import Pool
from pathlib import Path
from traceback import format_exc

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
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    options = parser.parse_args()
    began = time.monotonic()
    seen: Counter = Counter()
    failed = {}
    with Pool(os.cpu_count(), initializer=in_memory_stores) as pool:
        for number, saw, problem in pool.imap_unordered(one, range(options.first, options.cases)):
            seen.update(saw)
            if problem:
                failed[number] = problem
                print(f"case {number}: {problem}", flush=True)
    found = facts("python scripts/evidence/late_writes.py --out docs/results/late_writes.json") | {
        "cases": options.cases - options.first,
        "failed": sorted(failed),
        "seen": dict(seen),
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    print(json.dumps(found))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
