"""Makes stored results anew, one after the other; scripts/evidence/all.sh says how it is called.

What is run, by which command, how long it takes and what it depends on stands in docs/source/claims.yaml.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "evidence")]
import claims  # noqa: E402
import stamp  # noqa: E402
from claims import Result  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="results, stale or not; none: all that are stale")
    parser.add_argument("--list", action="store_true", help="say what would run and how long it takes, run nothing")
    parser.add_argument("--leave-out", nargs="+", default=[], metavar="NEED", help="results that need this")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "evidence", help="folder of runs and logs")
    options = parser.parse_args()
    known = claims.results(claims.load())
    if unknown := sorted(set(options.names) - known.keys()):
        parser.error(f"no result {', '.join(unknown)}; there are {', '.join(known)}")
    wanted = chosen(known, options.names, options.leave_out)
    print("\n".join(lines(wanted)), flush=True)
    if options.list:
        return 0
    if changed := stamp.changes():
        print(f"commit these first, results name a commit:\n{changed}", file=sys.stderr)
        return 2
    failed = [result.name for result in wanted if not renewed(result, options.work)]
    subprocess.run([sys.executable, "scripts/generate_docs.py"], cwd=ROOT, check=True)
    print(f"{len(wanted) - len(failed)} made anew; failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


def chosen(known: dict[str, Result], names: list[str], left_out: list[str]) -> list[Result]:
    """Those named, or all that are stale and can be made anew, the short ones first."""
    if names:
        return [known[name] for name in names]
    at = claims.head()
    found = [
        result
        for result in known.values()
        if not result.once and not any(need in result.needs for need in left_out) and is_stale(result, at)
    ]
    return sorted(found, key=lambda result: result.minutes)


def is_stale(result: Result, at: str) -> bool:
    """Whether there is none, or one of its commits has other sources than the commit `at`."""
    try:
        stamps = result.stamps()
    except (OSError, KeyError):
        return True
    return not stamps or any(claims.changed_lines(entry["commit"], at, result.sources) != 0 for entry in stamps)


def lines(wanted: list[Result]) -> list[str]:
    """What will run, and the time that it takes on two cores."""
    total = sum(result.minutes for result in wanted)
    told = [f"{len(wanted)} results, about {total / 60:.1f} hours on two cores that do nothing else"]
    for result in wanted:
        needs = f"  (needs {result.needs})" if result.needs else ""
        told.append(f"{result.minutes:6.1f} min  {result.name:24} {command(result, Path('WORK'))}{needs}")
    return told


def command(result: Result, work: Path) -> str:
    """The shell line that makes it anew."""
    return (result.command or min(result.commands())).replace("{work}", str(work))


def renewed(result: Result, work: Path) -> bool:
    """Runs its command, with a log of its own in the folder; true where a result of this commit was stored.

    A command whose goal was missed ends with an error too, and its result counts all the same.
    """
    work.mkdir(parents=True, exist_ok=True)
    log, begun, before = work / f"{result.name}.log", time.monotonic(), written_at(result)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    line = ["bash", "-c", command(result, work.resolve())]
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(line, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    claims.forget()
    good = written_at(result) != before and not is_stale(result, claims.head())
    said = "stored" if good else f"FAILED, see {log}"
    print(f"{result.name}: {said}, exit code {code}, {(time.monotonic() - begun) / 60:.1f} min", flush=True)
    return good


def written_at(result: Result) -> int:
    """When its file was written last, in nanoseconds; 0 where there is none."""
    file = claims.RESULTS / result.file
    return file.stat().st_mtime_ns if file.exists() else 0


if __name__ == "__main__":
    sys.exit(main())
