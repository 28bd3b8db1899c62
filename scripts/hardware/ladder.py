"""The ladder: every check of this folder from the ground up, one JSON line each. scripts/hardware/run.sh starts it.

    python scripts/hardware/ladder.py cuda|npu|cpu [CHECK ...] [--piece A|B|C] [--dry-run] [--budget SECONDS]
        [--size NAME=N ...] [--fast] [--list] [--out FILE]

Each check has a process of its own and a deadline, but for the fast ones with --fast, which share one. Ends with 1
where one failed. What needs nothing but torch comes first, so that the first line that is wrong is the nearest to its
cause.

A piece is what one device shows in ten minutes (PIECES): its checks run in the order of their worth, within --budget.
What fails, takes too long or finds no time left has a line too, and the others go on. Every line has the device, the
versions and the commit, and is in --out as soon as it is there. --dry-run runs it on the CPU, with gloo and tiny sizes.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from checks import (  # noqa: E402
    CHECKS,
    FAILED,
    OUT,
    PART,
    ROOT,
    SIZES,
    SKIPPED,
    STAMP,
    Figures,
    Machine,
    emit,
    limit_of,
    quiet,
    run_check,
    say,
)  # fmt: skip

# from the ground up
FILES = (
    "facts", "nodes", "memory", "products", "transport", "several", "layers", "waits", "gated_delta", "decode",
    "engine_sync", "runs", "bench",
)  # fmt: skip
# what one device shows in ten minutes each; the first are worth most
PIECES = {
    "A": (
        "devices",
        "communicators",
        "sync_order",
        "layouts",
        "lost_worker",
        "ipc_rounds",
        "gated_delta_time",
        "gated_delta_kernels",
    ),
    "B": ("devices", "lora_of_30b", "grouped_products", "grouped_parity", "wide_heads", "long_sequence"),
    "C": ("devices", "engine_sync", "decode", "engine_sync_fp8", "engine_routes"),
}
BUDGET_S = 570  # of a piece: a device is lent for ten minutes at a time
_LEAST_S = 15  # a check with less is not begun
_GRACE_S = 10  # beyond a check's own limit
_NAMED = (
    "torch", "nvidia-nccl-cu13", "triton", "fla-core", "transformer-engine", "megatron-core", "mbridge", "vllm",
    "transformers", "numpy",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("cuda", "npu", "cpu"))
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="default: all")
    parser.add_argument("--piece", choices=tuple(PIECES), help="the checks of one device's ten minutes")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with gloo and tiny sizes")
    parser.add_argument("--budget", type=float, help=f"seconds for all checks; of a piece {BUDGET_S}")
    parser.add_argument("--size", action="append", default=[], metavar="NAME=N", help="a size in place of a default")
    parser.add_argument("--fast", action="store_true", help="those that load neither Megatron nor vLLM, in one process")
    parser.add_argument("--here", action="store_true", help="in this process")
    parser.add_argument("--list", action="store_true", help="their names")
    parser.add_argument("--out", type=Path, help="the lines go into this file too")
    options = parser.parse_args()
    if options.dry_run:
        options.device = "cpu"
    for file in FILES:
        importlib.import_module(file)
    names = _names(options.checks or PIECES.get(options.piece, ()), options.fast)
    if options.list:
        print("\n".join(names))
        return
    if options.size:
        os.environ[SIZES] = json.dumps(_sizes(options.size))
    raise SystemExit(_climb(names, options))


def _names(asked: Sequence[str], fast: bool) -> list[str]:
    """Checks in the asked order, or all from the ground up."""
    if unknown := [name for name in asked if name not in CHECKS]:
        raise SystemExit(f"no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    return [name for name in asked or CHECKS if CHECKS[name].fast or not fast]


def _sizes(given: list[str]) -> dict[str, int]:
    try:
        return {name: int(number) for name, _, number in (text.partition("=") for text in given)}
    except ValueError:
        raise SystemExit(f"--size {' '.join(given)}: each is NAME=N with a whole number") from None


def _climb(names: list[str], options: argparse.Namespace) -> int:
    machine = Machine(options.device)
    if options.out:
        os.environ[OUT] = str(options.out.resolve())
    if not options.here:
        os.environ[STAMP] = json.dumps(_stamp(machine))
    if options.here or options.fast:
        quiet()
        lines = (run_check(name, machine) for name in names)
    else:
        budget = options.budget or (BUDGET_S if options.piece and not machine.small else float("inf"))
        lines = _lines_apart(names, machine, time.monotonic() + budget)
    counts: dict[str, int] = {}
    keep = say if options.here else emit  # who started this process keeps its last line
    for line in lines:
        keep(line)
        counts[line["status"]] = counts.get(line["status"], 0) + 1
    if not options.here:
        print(", ".join(f"{count} {status}" for status, count in counts.items()), file=sys.stderr)
    return int(FAILED in counts)


def _stamp(machine: Machine) -> Figures:
    """What made the lines: device, versions, commit and day."""
    versions = {"python": sys.version.split()[0]}
    for name in _NAMED:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"machine": _device_name(machine), "versions": versions, "commit": _commit(), "date": str(date.today())}


def _device_name(machine: Machine) -> str:
    """By a process of its own, so that none but the checks holds memory of the device."""
    code = "import sys; from mrl.platforms import get_platform; print(get_platform(sys.argv[1]).device_name())"
    done = subprocess.run([sys.executable, "-c", code, machine.device], capture_output=True, text=True, cwd=ROOT)
    return (done.stdout.strip().splitlines() or [f"unknown: {done.stderr.strip()[-200:]}"])[-1]


def _commit() -> str:
    """Of the checkout, or of the archive that was made from one (pack.sh)."""
    file = ROOT / "COMMIT"
    if file.exists():
        return file.read_text().strip()
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() or "unknown"


def _lines_apart(names: list[str], machine: Machine, until: float) -> Iterator[Figures]:
    for name in names:
        left = until - time.monotonic()
        if left < _LEAST_S:
            why = f"{max(left, 0):.0f} s are left of the budget"
            yield {"check": name, "device": machine.device, "status": SKIPPED, "why": why, "seconds": 0.0}
        else:
            yield _line_of_process(name, machine.device, min(left, limit_of(name, machine) + _GRACE_S))


def _line_of_process(name: str, device: str, limit_s: float) -> Figures:
    """A process that ends without a line has one made for it, and one that dies after its line has failed: nothing is
    left out. What it said of its parts is in the line too.
    """
    command = [sys.executable, str(HERE / "ladder.py"), device, name, "--here"]
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    watch = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
    watch.start()
    out, err = process.communicate()
    watch.cancel()
    with suppress(ProcessLookupError):  # what it started
        os.killpg(process.pid, signal.SIGKILL)
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    parts = {key: value for line in lines if line.get("status") == PART for key, value in line.items()}
    ends = [line for line in lines if line.get("status") != PART]
    said = parts | ends[-1] if ends else {"check": name, "device": device} | parts
    if ends and (said["status"] in (FAILED, SKIPPED) or process.returncode == 0):
        return said
    why = "not done in its time" if process.returncode in (-14, -9) else f"ended with {process.returncode}"
    last = (err.strip().splitlines() or [""])[-1]
    seconds = round(time.monotonic() - began, 2)
    return said | {"status": FAILED, "why": f"{'ok, then ' if ends else ''}{why}: {last}"[:500], "seconds": seconds}


if __name__ == "__main__":
    main()
