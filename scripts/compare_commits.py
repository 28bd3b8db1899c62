"""Holds the working tree against an earlier commit: the same tiny run, the same tensors, the same plans, and how long a
step takes.

python scripts/compare_commits.py 91eebfc [--steps 6] [--tolerance 0] [--preset PRESET] [--set NAME=VALUE ...]
    [--no-plans]
python scripts/compare_commits.py 91eebfc --speed [--steps 14] [--rounds 2]

The commit is checked out into a temporary folder and both sides run with the packages of this environment. Needs
tiny-world/ (scripts/make_tiny_world.py). Exits with 1 where anything differs that may not: every metric that both sides
write, clocks aside, to `--tolerance` relative (0: the same bits); every tensor of the last checkpoint; the end of a run
that the commit saved and the working tree resumed; `mrl plan --json` of every preset, unless --no-plans. With --speed
nothing is held against anything but seconds, of steps that neither validate nor save.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "evidence"))
from stamp import facts  # noqa: E402

PRESET = "parallel_configs/tiny-moe/cpu.yaml"
# what a clock or the machine's state decides
CLOCKS = ("timing_", "perf/", "switch/", "reshard/seconds", "reshard/peak_staging_bytes")
NOT_PLANNED = ("seconds", "plan_seconds")  # measured, in a plan
PHASES = tuple(f"timing_s/{name}" for name in ("step", "gen", "old_log_prob", "update_actor", "reshard", "outside"))
MAIN = "try:\n    from mrl.cli.main import main\nexcept ImportError:\n    from mrl.cli import main\nmain()"


@dataclass(frozen=True)
class Tree:
    """One checkout, and a folder for what it writes."""

    code: Path
    out: Path
    preset: str = PRESET
    settings: tuple[str, ...] = ()  # of both sides

    def mrl(self, *arguments: str) -> str:
        """Standard output of an `mrl` command of this checkout. Raises CalledProcessError."""
        env = os.environ | {
            "PYTHONPATH": str(self.code),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-c", MAIN, *arguments]
        return subprocess.run(
            command, cwd=self.code, env=env, check=True, stdout=subprocess.PIPE, text=True, timeout=1200
        ).stdout

    def train(self, name: str, steps: int, *more: str) -> Path:
        """A run of the preset with a checkpoint in the middle; its run directory."""
        trainer = {
            "total_training_steps": steps,
            "save_freq": steps // 2,
            "test_freq": steps // 2,
            "max_actor_ckpt_to_keep": 2,
        }
        settings = [f"trainer.{key}={value}" for key, value in trainer.items()]
        overrides = [text for setting in (*settings, *self.settings) for text in ("--set", setting)]
        self.mrl("train", self.preset, "--run-dir", str(self.out / name), *overrides, *more)
        return self.out / name

    def prepare(self) -> None:
        """The tiny world, and the entry points of this checkout:
        vLLM finds the weight transfer by them in its own processes.
        """
        if not (self.code / "tiny-world").exists():
            (self.code / "tiny-world").symlink_to(ROOT / "tiny-world")
        subprocess.run([sys.executable, "setup.py", "-q", "egg_info"], cwd=self.code, check=True)
        self.out.mkdir(parents=True)


def metrics(run_dir: Path) -> list[dict]:
    """Lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def metric_differences(before: list[dict], after: list[dict], tolerance: float) -> Iterator[str]:
    """Sentences on every value that both write and that differs by more than `tolerance`, relative."""
    if len(before) != len(after):
        yield f"metrics: {len(before)} and {len(after)} lines"
    for one, other in zip(before, after, strict=False):
        for name in sorted(one.keys() & other.keys()):
            if not name.startswith(CLOCKS) and not _same(one[name], other[name], tolerance):
                yield f"metrics: {name} of step {one['training/global_step']}: {one[name]!r} and {other[name]!r}"


def _same(a: float, b: float, tolerance: float) -> bool:
    if not isinstance(a, float | int) or not isinstance(b, float | int):
        return a == b
    return a == b or (a != a and b != b) or abs(a - b) <= tolerance * max(abs(a), abs(b))


def keys_of_one_side(before: list[dict], after: list[dict]) -> dict[str, list[str]]:
    """Names of metrics that only one of the two writes."""
    names = [{name for row in rows for name in row} for rows in (before, after)]
    return {"before": sorted(names[0] - names[1]), "after": sorted(names[1] - names[0])}


def tensor_differences(before: Path, after: Path, tolerance: float) -> Iterator[str]:
    """Sentences on tensors of the newest checkpoints that differ."""
    tensors = [_tensors(run) for run in (before, after)]
    if missing := tensors[0].keys() ^ tensors[1].keys():
        yield f"tensors of one side only: {sorted(missing)[:4]}"
    for name in sorted(tensors[0].keys() & tensors[1].keys()):
        a, b = tensors[0][name], tensors[1][name]
        same = a.shape == b.shape and a.dtype == b.dtype and (a.tobytes() == b.tobytes() or _close(a, b, tolerance))
        if not same:
            yield f"tensor {name} differs"


def _close(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    """Of floating-point tensors: the difference's norm over the norm."""
    if tolerance == 0 or a.dtype.kind != "f":
        return False
    return bool(np.linalg.norm(a - b) <= tolerance * np.linalg.norm(a))


def _tensors(run_dir: Path) -> Mapping[str, np.ndarray]:
    folders = sorted(
        (run_dir / "checkpoints").glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-"))
    )
    return {
        f"{file.name}:{key}": value
        for file in sorted(folders[-1].glob("*.safetensors"))
        for key, value in load_file(file).items()
    }


def plan_differences(before: Tree, after: Tree) -> Iterator[str]:
    """Sentences on the presets whose plan is another one, or that only one side plans."""
    for preset in sorted(ROOT.glob("parallel_configs/*/*.yaml")):
        name = str(preset.relative_to(ROOT))
        if preset.parents[1].name == "base" or preset.parent.name == "base" or not (before.code / name).exists():
            continue
        plans = [_plan(tree, name) for tree in (before, after)]
        if plans[0] != plans[1]:
            keys = [key for key in sorted(plans[0].keys() | plans[1].keys()) if plans[0].get(key) != plans[1].get(key)]
            yield f"plan of {name} differs in {', '.join(keys)}"


def _plan(tree: Tree, preset: str) -> dict:
    try:
        return _without_clocks(json.loads(tree.mrl("plan", preset, "--json")))
    except subprocess.CalledProcessError as error:
        return {"exit_code": error.returncode}


def _without_clocks(value):
    if isinstance(value, dict):
        return {key: _without_clocks(inner) for key, inner in value.items() if key not in NOT_PLANNED}
    return value


def compare(before: Tree, after: Tree, steps: int, tolerance: float, plans: bool = True) -> dict:
    """Differences as sentences."""
    runs = {"before": before.train("run-0", steps), "after": after.train("run-0", steps)}
    differences = [*metric_differences(metrics(runs["before"]), metrics(runs["after"]), tolerance)]
    differences += tensor_differences(runs["before"], runs["after"], tolerance)
    differences += [f"resumed: {text}" for text in _resumed(before, after, runs["before"], steps, tolerance)]
    if plans:
        differences += plan_differences(before, after)
    return {
        "steps": steps,
        "tolerance": tolerance,
        "differences": differences,
        "keys_of_one_side": keys_of_one_side(*(metrics(runs[side]) for side in ("before", "after"))),
    }


def compare_speed(before: Tree, after: Tree, steps: int, rounds: int) -> dict:
    """Median seconds of a step and of its phases on both sides, after the first steps; ratios of the pairs of runs."""
    off = ("--set", "trainer.save_freq=-1", "--set", "trainer.test_freq=-1", "--set", "trainer.val_before_train=false")
    rows: dict[str, list[dict]] = {"before": [], "after": []}
    pairs = []
    of_rounds = []  # medians of a step in each round
    for number in range(rounds):  # by turns, so that both meet the same machine
        pair = {}
        sides = [("before", before), ("after", after)]
        for side, tree in sides if number % 2 == 0 else reversed(sides):
            timed = [row for row in metrics(tree.train(f"speed-{number}", steps, *off)) if "timing_s/step" in row]
            found = [row for row in timed[2:] if "timing_s/save_checkpoint" not in row]
            pair[side] = _median_of("timing_s/step", found)
            rows[side] += found
        pairs.append(pair["after"] / pair["before"])
        of_rounds.append({side: round(seconds, 4) for side, seconds in pair.items()})
        print(f"pair {number}: a step takes {pairs[-1]:.3f} of the commit's time", file=sys.stderr, flush=True)
    seconds = {side: {name: _median_of(name, found) for name in PHASES} for side, found in rows.items()}
    faster = seconds["before"]["timing_s/step"] / seconds["after"]["timing_s/step"]
    return {
        "steps": steps,
        "rounds": rounds,
        "seconds": seconds,
        "times_faster": faster,
        "step_seconds_of_rounds": of_rounds,
        "pairs": [round(pair, 3) for pair in pairs],
        "median_pair": round(median(pairs), 3),
    }


def _median_of(name: str, rows: list[dict]) -> float:
    return median(row.get(name, 0.0) for row in rows)


def _resumed(before: Tree, after: Tree, run: Path, steps: int, tolerance: float) -> Iterator[str]:
    """The commit's run goes back to its middle checkpoint and is brought to its end by the working tree."""
    again = after.out / "resumed"
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / f"step-{steps}")
    after.train("resumed", steps, "--resume")
    yield from metric_differences(metrics(run), metrics(again), tolerance)
    yield from tensor_differences(run, again, tolerance)


def commit_of(revision: str) -> str:
    return subprocess.run(
        ["git", "rev-parse", revision], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


@contextmanager
def checked_out(revision: str, code: Path) -> Iterator[Path]:
    """A checkout of the commit at `code`, as long as it is looked at."""
    git = ["git", "worktree"]
    subprocess.run([*git, "add", "--detach", str(code), revision], cwd=ROOT, check=True, capture_output=True)
    try:
        yield code
    finally:
        subprocess.run([*git, "remove", "--force", str(code)], cwd=ROOT, check=True)


def options() -> argparse.Namespace:
    """Arguments of the command. Refuses to go on without a tiny world."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1, help="pairs of runs, with --speed")
    parser.add_argument("--tolerance", type=float, default=0.0)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--preset", default=PRESET)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="NAME=VALUE")
    parser.add_argument("--no-plans", action="store_true")
    args = parser.parse_args()
    if not (ROOT / "tiny-world").is_dir():
        parser.error("tiny-world/ is not there: make it with scripts/make_tiny_world.py --out tiny-world --seed 0")
    return args


def compared(args: argparse.Namespace) -> dict:
    """What was found, by the options of the command, without where and when."""
    with tempfile.TemporaryDirectory() as folder, checked_out(args.commit, Path(folder, "code")) as code:
        work = Path(folder, "out")
        of_both = args.preset, tuple(args.settings)
        before = Tree(code, work / "before", *of_both)
        after = Tree(ROOT, work / "after", *of_both)
        before.prepare()
        after.prepare()
        if args.speed:
            return compare_speed(before, after, args.steps, args.rounds)
        return compare(before, after, args.steps, args.tolerance, not args.no_plans)


def main() -> None:
    """Prints the comparison; exits with 1 where it found a difference."""
    args = options()
    found = compared(args)
    result = facts(shlex.join(sys.argv)) | {"before": commit_of(args.commit)} | found
    print(json.dumps(result, indent=2))
    raise SystemExit(1 if result.get("differences") else 0)


if __name__ == "__main__":
    main()
