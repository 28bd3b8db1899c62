"""Seconds from `mrl train` to the first answer and to the end of the first step, of a tiny preset on this machine, and
what they are spent at.

python scripts/bench/cold_start.py [--before COMMIT] [--rounds 3] [--colocated] [--json]

With --before that commit and the working tree start in turn, so that both meet the same machine. Needs tiny-world/
(scripts/make_tiny_world.py). An answer has at most four tokens, and the first one is whole when it is counted. Parts
are told by scripts/bench/cold_marks/sitecustomize.py: when each began, after the command, and how long it took;
parts of several processes overlap. `processor_s`: of all processes of the run until its first step is written down,
which others on the machine change less than seconds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from compare_commits import MAIN, Tree, commit_of  # noqa: E402

PRESETS = "parallel_configs/tiny-moe"
OFF = ("val_before_train=false", "save_freq=-1", "test_freq=-1", "total_training_steps=1", "resume_mode=disable")
ANSWER = "VllmEngine._complete"
CHECKED = "VllmEngine._check_order"  # what is answered before its end is the start-up check's
STEP = "train_step"
LIMIT_S = 600
LOOK_S = 0.1
SECONDS = ("first_answer_s", "first_step_s", "processor_s")


@dataclass(frozen=True)
class Mark:
    """A part of one process: began so many seconds after the command, and took so many."""

    name: str
    pid: int
    began: float
    seconds: float

    @property
    def ended(self) -> float:
        return self.began + self.seconds


def start(tree: Tree, name: str, preset: str) -> dict[str, Any]:
    """Runs one step in a folder of its own; seconds, parts and the load before it."""
    marks = tree.out / f"{name}.marks"
    folder = tree.out / name
    command = [sys.executable, "-c", MAIN, "train", preset, "--run-dir", str(folder)]
    command += [word for each in OFF for word in ("--set", f"trainer.{each}")]
    load = os.getloadavg()[0]
    began = time.time()
    with (tree.out / f"{name}.log").open("wb") as log:
        run = subprocess.Popen(command, cwd=tree.code, env=_environment(tree.code, marks), stdout=log, stderr=log)
        used = processor_seconds(psutil.Process(run.pid), folder / "metrics.jsonl")
        code = run.wait(LIMIT_S)
    if code:
        raise SystemExit(f"the run ended with {code}:\n{(tree.out / f'{name}.log').read_text()[-3000:]}")
    return told(read(marks, began)) | {"processor_s": used, "load": round(load, 2)}


def processor_seconds(run: psutil.Process, written: Path) -> float:
    """Of the process and all below it, until something is written there or it ends."""
    used: dict[int, float] = {}
    until = time.monotonic() + LIMIT_S
    while run.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
        for process in (run, *run.children(recursive=True)):
            with suppress(psutil.Error):
                spent = process.cpu_times()
                used[process.pid] = spent.user + spent.system
        if written.exists() and written.stat().st_size:
            break
        time.sleep(LOOK_S)
    return sum(used.values())


def _environment(code: Path, marks: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT / "scripts" / "bench" / "cold_marks"), str(code)])
    return os.environ | {
        "PYTHONPATH": paths,
        "MRL_COLD_MARKS": str(marks),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def read(marks: Path, began: float) -> list[Mark]:
    """Marks of a run in the order of their beginnings."""
    rows = [json.loads(line) for line in marks.read_text(encoding="utf-8").splitlines()]
    found = [Mark(row["name"], row["pid"], row["began"] - began, row["seconds"]) for row in rows]
    return sorted(found, key=lambda mark: mark.began)


def told(marks: list[Mark]) -> dict[str, Any]:
    """Seconds to the first answer and to the end of the first step, and of each part."""
    checked = max((mark.ended for mark in marks if mark.name == CHECKED), default=0.0)
    answers = [mark.ended for mark in marks if mark.name == ANSWER and mark.ended > checked]
    steps = [mark.ended for mark in marks if mark.name == STEP]
    if not answers or not steps:
        raise SystemExit("the run answered nothing, or its parts have other names by now")
    return {"first_answer_s": min(answers), "first_step_s": min(steps), "parts": parts(marks)}


def parts(marks: list[Mark]) -> dict[str, dict[str, float]]:
    """Each part once: where several processes have it, when the first began, the longest, and how many they are."""
    found: dict[str, dict[str, float]] = {}
    for mark in marks:
        if mark.name == ANSWER:
            continue
        part = found.setdefault(mark.name, {"began": mark.began, "seconds": 0.0, "processes": 0})
        part["seconds"] = max(part["seconds"], mark.seconds)
        part["processes"] += 1
    return {name: {key: round(value, 3) for key, value in part.items()} for name, part in found.items()}


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one side: medians over its starts, the spread, and the parts of the middle one."""
    middle = sorted(runs, key=lambda run: run["first_step_s"])[len(runs) // 2]
    seconds = {key: [run[key] for run in runs] for key in SECONDS}
    return {
        **{key: round(median(values), 2) for key, values in seconds.items()},
        "all": {key: [round(value, 2) for value in values] for key, values in seconds.items()},
        "loads": [run["load"] for run in runs],
        "parts": middle["parts"],
    }


def measure(before: str | None, rounds: int, preset: str) -> dict[str, Any]:
    """Medians of the working tree, and of the commit beside it where one is given."""
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder, trees(before, Path(folder)) as sides:
        for number in range(rounds):
            for side, tree in sides.items():
                runs.setdefault(side, []).append(start(tree, f"run-{number}", preset))
    result: dict[str, Any] = {side: medians(found) for side, found in runs.items()}
    if before is None:
        return result
    ratios = {
        key: round(median(b[key] / a[key] for a, b in zip(runs["after"], runs["before"], strict=True)), 2)
        for key in SECONDS
    }
    return result | {"times_faster": ratios, "before_commit": commit_of(before)}


@contextmanager
def trees(before: str | None, folder: Path) -> Iterator[dict[str, Tree]]:
    """The working tree as `after`, and a checkout of the commit as `before`; all compiled, so that no start is."""
    sides = {"after": Tree(ROOT, folder / "after")}
    code = folder / "code"
    if before is not None:
        git = ["git", "worktree"]
        subprocess.run([*git, "add", "--detach", str(code), before], cwd=ROOT, check=True, capture_output=True)
        sides = {"before": Tree(code, folder / "before")} | sides
    try:
        for tree in sides.values():
            tree.prepare()
            subprocess.run([sys.executable, "-m", "compileall", "-q", "mrl"], cwd=tree.code, check=True)
        yield sides
    finally:
        if before is not None:
            subprocess.run(["git", "worktree", "remove", "--force", str(code)], cwd=ROOT, check=True)


def show(result: dict[str, Any]) -> None:
    """Prints a table a side."""
    for side in ("before", "after"):
        if side not in result:
            continue
        told = result[side]
        print(f"{side}: {', '.join(f'{key} {told[key]:.1f}' for key in SECONDS)}")
        for name, part in told["parts"].items():
            print(f"  {part['began']:7.2f} {part['seconds']:7.2f} s  {name} ({part['processes']:g})")
    if "times_faster" in result:
        print(f"times faster: {result['times_faster']}")


def main() -> None:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", metavar="COMMIT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--colocated", action="store_true", help="the preset whose engines and ranks share devices")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not (ROOT / "tiny-world").is_dir():
        parser.error("tiny-world/ is not there: make it with scripts/make_tiny_world.py --out tiny-world --seed 0")
    preset = f"{PRESETS}/{'cpu-colocated' if args.colocated else 'cpu'}.yaml"
    result = {"preset": preset, "rounds": args.rounds} | measure(args.before, args.rounds, preset)
    if args.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
