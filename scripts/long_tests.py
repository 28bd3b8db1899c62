"""The tests marked `long`, in named pieces of at most 20 minutes: `python scripts/long_tests.py [PIECE ...] [-- PYTEST
ARGUMENT ...]`.

Runs the pieces, all of them if none is named, and writes what each came to into docs/results/long_tests.json, beside
the results of the others. `--resume` leaves out those that have passed since the last change of what they run. `--list`
prints the pieces. `tests/unit/test_long_tests.py` holds that each long test is in exactly one.
"""

import argparse
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts" / "evidence"))
from stamp import facts  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "long_tests.json"
RUN = ("mrl", "tests", "parallel_configs", "setup.py")  # what tests run
# piece -> files under tests/real
PIECES = {
    "sync": ("test_sync", "test_engine_slices", "test_engine_routes"),
    "routes": ("test_routes",),
    "memory": ("test_memory_truth", "test_resident_memory", "test_offload_run", "test_engine_sleep", "test_wide_turns"),
    "resume": ("test_resume", "test_guards", "test_lost_worker", "test_full_disk"),
    "conversion": ("test_convert", "test_torch_dist"),
    "placement": ("test_colocated",),
    "ahead": ("test_ahead_runs", "test_weights_in_flight", "test_engine_pressure"),
    "presets": ("test_presets_verified",),
    "rehearsals": ("test_rehearse",),
    "ranks": ("test_dp2", "test_dp_runs", "test_overlap"),
    "rows": ("test_rows",),
    "restarts": ("test_rank_restart", "test_engines_back", "test_supervised", "test_late_ranks"),
    "turns": ("test_turns",),
    "held_turns": ("test_held_turns",),
    "adapters": ("test_lora", "test_lora_run"),
    "critics": ("test_critic",),
    "distillation": ("test_distillation", "test_distillation_run"),
    "runs": (
        "test_runs",
        "test_eval",
        "test_glm_run",
        "test_hybrid_run",
        "test_latent_run",
        "test_recipes",
        "test_submit",
        "test_hosted_loggers",
        "test_quantised_run",
    ),
}
OUTCOMES = {"failed": ("failures", "errors"), "skipped": ("skipped",)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"one of {', '.join(PIECES)}")
    parser.add_argument("--list", action="store_true", help="print the pieces and their files, run nothing")
    parser.add_argument("--resume", action="store_true", help="leave out what has passed and has not changed since")
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    arguments, pytest_arguments = parser.parse_args(given[:end]), given[end + 1 :]
    if unknown := set(arguments.pieces) - set(PIECES):
        parser.error(f"no piece {', '.join(sorted(unknown))}; there are {', '.join(PIECES)}")
    done = done_already() if arguments.resume else set()
    pieces = [piece for piece in arguments.pieces or PIECES if piece not in done]
    for piece in pieces:
        print(f"long:{piece}  {' '.join(PIECES[piece])}", flush=True)
    if arguments.list:
        return 0
    codes = [run(piece, pytest_arguments) for piece in pieces]
    return int(any(codes))


def run(piece: str, pytest_arguments: list[str]) -> int:
    """Pytest's exit status. A run with arguments of its own may be a part of the piece, and is not stored."""
    files = [str(ROOT / "tests" / "real" / f"{name}.py") for name in PIECES[piece]]
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", *files, "-m", "long", f"--junitxml={report}", *pytest_arguments]
        code = subprocess.run(command, cwd=ROOT).returncode
        if report.exists() and not pytest_arguments:
            store(piece, summary(report, time.monotonic() - began, f"scripts/test.sh long:{piece}"))
    return code


def summary(report: Path, seconds: float, command: str) -> dict:
    """Of a JUnit report: tests by outcome, with the commit they were run at, the day and the machine's load."""
    suite = next(xml.parse(report).getroot().iter("testsuite"))
    counts = {name: sum(int(suite.get(key, 0)) for key in keys) for name, keys in OUTCOMES.items()}
    passed = int(suite.get("tests", 0)) - sum(counts.values())
    return facts(command) | {"commit": commit(), "passed": passed} | counts | {"seconds": round(seconds)}


def stored_results() -> dict[str, dict]:
    """By piece; nothing before the first run."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def done_already() -> set[str]:
    """Pieces that need not be run again."""
    passed = {piece: result for piece, result in stored_results().items() if result["passed"] and not result["failed"]}
    return {piece for piece, result in passed.items() if unchanged_since(result["commit"])}


def unchanged_since(commit: str) -> bool:
    """Whether what tests run is that of the commit still; never of one that was run with changes,
    or is unknown here.
    """
    return subprocess.run(["git", "diff", "--quiet", commit, "--", *RUN], cwd=ROOT, capture_output=True).returncode == 0


def store(piece: str, result: dict) -> None:
    """Puts one piece's result beside the others'."""
    stored = stored_results() | {piece: result}
    ordered = {name: stored[name] for name in PIECES if name in stored}  # a piece that is gone takes its result along
    RESULTS.write_text(json.dumps(ordered, indent=2) + "\n")


def commit() -> str:
    """The commit of the files that were run; marked where files differ from it."""
    head = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--", *RUN)
    return f"{head} with changes" if changed else head


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
