"""The ladder: every check of this folder from the ground up, one JSON line each. scripts/hardware/run.sh starts it.

    python scripts/hardware/ladder.py cuda|npu|cpu [CHECK ...] [--fast] [--list] [--out FILE]

Each check has a process of its own and four minutes on a device, but for the fast ones with --fast, which share one.
Ends with 1 where one failed. What needs nothing but torch comes first, so that the first line that is wrong is the
nearest to its cause.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from checks import CHECKS, FAILED, SKIPPED, Figures, Machine, quiet, run_check, say  # noqa: E402

FILES = (
    "facts",
    "nodes",
    "memory",
    "products",
    "transport",
    "layers",
    "waits",
    "decode",
    "runs",
    "bench",
)  # from the ground up
_GRACE_S = 20  # beyond a check's own limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("cuda", "npu", "cpu"))
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="default: all")
    parser.add_argument("--fast", action="store_true", help="those that load neither Megatron nor vLLM, in one process")
    parser.add_argument("--here", action="store_true", help="in this process")
    parser.add_argument("--list", action="store_true", help="their names")
    parser.add_argument("--out", type=Path, help="the lines go into this file too")
    options = parser.parse_args()
    for file in FILES:
        importlib.import_module(file)
    names = _names(options.checks, options.fast)
    if options.list:
        print("\n".join(names))
        return
    raise SystemExit(_climb(names, options))


def _names(asked: list[str], fast: bool) -> list[str]:
    if unknown := [name for name in asked if name not in CHECKS]:
        raise SystemExit(f"no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    return [name for name, check in CHECKS.items() if (not asked or name in asked) and (check.fast or not fast)]


def _climb(names: list[str], options: argparse.Namespace) -> int:
    lines = _lines_here(names, options.device) if options.here or options.fast else _lines_apart(names, options.device)
    counts: dict[str, int] = {}
    for line in lines:
        say(line)
        counts[line["status"]] = counts.get(line["status"], 0) + 1
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    print(", ".join(f"{count} {status}" for status, count in counts.items()), file=sys.stderr)
    return int(FAILED in counts)


def _lines_here(names: list[str], device: str) -> Iterator[Figures]:
    quiet()
    machine = Machine(device)
    for name in names:
        yield run_check(name, machine)


def _lines_apart(names: list[str], device: str) -> Iterator[Figures]:
    for name in names:
        yield _line_of_process(name, device)


def _line_of_process(name: str, device: str) -> Figures:
    """A process that ends without a line has one made for it, and one that dies after its line has failed: nothing is
    left out.
    """
    command = [sys.executable, str(HERE / "ladder.py"), device, name, "--here"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=Machine(device).limit_s + _GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    said = json.loads(lines[-1]) if lines else {"check": name, "device": device, "seconds": 0.0}
    if said.get("status") in (FAILED, SKIPPED) or (lines and process.returncode == 0):
        return said
    why = "not done in its time" if process.returncode in (-14, -9) else f"ended with {process.returncode}"
    last = (err.strip().splitlines() or [""])[-1]
    return said | {"status": FAILED, "why": f"{'ok, then ' if lines else ''}{why}: {last}"[:500]}


if __name__ == "__main__":
    main()
