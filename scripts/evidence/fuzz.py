"""Runs the fuzzers of tests/unit/test_fuzz.py over many more cases than continuous integration, and counts them.

    scripts/evidence/fuzz.py [--cases 100000] | scripts/evidence/stamp.py docs/results/fuzz.json "COMMAND"

A case is a file that one reader was given. `slowest_s`: processor seconds of the slowest one, by reader. `peak_bytes`:
what the process held at most beyond what it held after its imports.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "unit" / "test_fuzz.py"
READERS = 11  # of which some are given more than one file a case, and some fewer cases


class Counting:
    """A plug-in of pytest's that counts what each reader is given."""

    def __init__(self):
        self.cases: Counter[str] = Counter()
        self.slowest: defaultdict[str, float] = defaultdict(float)
        self.failed: list[str] = []
        self.held_before = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Puts a counter around the check that every case goes through."""
        module = session.items[0].module
        survives = module.survives
        self.held_before = peak()

        def counted(read: Callable[[], object]) -> None:
            began = time.process_time()
            survives(read)
            self.cases[self.reader] += 1
            self.slowest[self.reader] = max(self.slowest[self.reader], time.process_time() - began)

        module.survives = counted

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Notes whose cases the next ones are."""
        self.reader = item.name

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes failures; the first case of a reader that fails ends it."""
        if report.failed:
            self.failed.append(f"{report.nodeid}: {str(report.longrepr)[-2000:]}")


def peak() -> int:
    """Bytes that this process held at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    """Prints one JSON object; exit code 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000, help="of all readers together, at least")
    options = parser.parse_args()
    os.environ["MRL_FUZZ_CASES"] = str(-(-options.cases // READERS))
    counting = Counting()
    began = time.monotonic()
    with redirect_stdout(sys.stderr):
        pytest.main(["-q", "-p", "no:cacheprovider", "--timeout=0", str(TESTS)], plugins=[counting])
    result = {
        "cases": sum(counting.cases.values()),
        "failed": counting.failed,
        "by_reader": dict(counting.cases),
        "slowest_s": {name: round(seconds, 3) for name, seconds in counting.slowest.items()},
        "peak_bytes": peak() - counting.held_before,
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(result))
    return 1 if counting.failed or not counting.cases else 0


if __name__ == "__main__":
    raise SystemExit(main())
