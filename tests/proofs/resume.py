"""kill -9 at random points, during saves among them, and what resumes from there: bit by bit at the same layout, to
1e-5 at another.

Real Megatron ranks update and save in the background without engines; every start goes on from the newest complete
checkpoint, and each update's weights, moments and random states are held against those of an uninterrupted run by their
SHA-256.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrl.checkpoint.manifest import check_digests
from mrl.checkpoint.step_folders import checkpoint_steps, newest_checkpoint
from mrl.platforms.hosting import get_hosting

ROOT = Path(__file__).resolve().parents[2]
RANK = Path(__file__).with_name("resume_rank.py")
PRESET = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
SAVE_EVERY = 2  # updates
MOST_UPDATES = 8  # of one start before it is killed
MOVED_UPDATES = 2  # at the other layout
BOUND = 1e-5
START_S, STEP_S = 120.0, 240.0  # deadlines


@dataclass
class Kill:
    """One kill, and what the start after it found."""

    during_save: bool  # a checkpoint that was being written was left behind
    reached: int  # updates, or steps, that were done
    resumed_from: int  # 0: nothing was saved yet
    same_bits: bool = False  # everything after it was what the uninterrupted run had
    moved_error: float | None = None  # largest relative error of a tensor after two updates at another layout


@dataclass
class Findings:
    """What goes to the results file."""

    kills: list[Kill] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the claim holds."""
        return not self.differences and all(
            k.same_bits and (k.moved_error is None or k.moved_error <= BOUND) for k in self.kills
        )


# --- ranks only


def ranks_only(model: Path, work: Path, kills: int, seed: int) -> Findings:
    """`kills` kills of two ranks (TP 2, EP 2), one chain of resumes,
    and each found checkpoint once more on a single rank.
    """
    begun, dice, found = time.monotonic(), random.Random(seed), Findings()
    reference = run_to_end(
        work / "reference", actor_config(model, 2), [["whole", None, MOST_UPDATES * kills + 4, 0, True]]
    )
    expected = digests(reference / "whole", 2)
    broken = work / "broken"
    (broken / "checkpoints").mkdir(parents=True)
    for number in range(kills):
        found.kills.append(killed_once(broken, number, actor_config(model, 2), dice, MOST_UPDATES * kills + 4))
    last = last_start(broken, kills, actor_config(model, 2), found.kills[-1].resumed_from)
    for number, kill in enumerate(found.kills):  # kill n is proved by start n + 1
        out = last if number + 1 == kills else broken / f"start-{number + 1}" / "task"
        problems = unlike(digests(out, 2), expected, kill.resumed_from)
        kill.same_bits = not problems
        found.differences += problems
    moved(model, work, reference / "whole", found)
    found.seconds = time.monotonic() - begun
    return found


def killed_once(broken: Path, number: int, config: dict, dice: random.Random, most: int) -> Kill:
    """Starts the ranks from the newest checkpoint, kills them at random: after some updates,
    every second time inside a save.
    """
    before = newest_step(broken)
    folder, ranks = start(broken, number, config, most)
    try:
        # each start proves something of the one before: an update at least, and a new checkpoint where it is to be
        # killed outside a save
        wait(lambda: done(folder / "task") >= 1, ranks, START_S, folder)
        if number % 2:
            target = done(folder / "task") + dice.randrange(3)
            wait(lambda: done(folder / "task") >= target and any(saves_under_way(broken)), ranks, STEP_S, folder)
            time.sleep(dice.uniform(0, 0.03))
        else:
            wait(lambda: newest_step(broken) > before, ranks, STEP_S, folder)
            target = done(folder / "task") + dice.randrange(3)
            wait(lambda: done(folder / "task") >= target, ranks, STEP_S, folder)
            time.sleep(dice.uniform(0, 0.2))
    finally:
        end(ranks)
    inside = bool(saves_under_way(broken))
    for left in saves_under_way(broken):
        shutil.rmtree(left)  # as opening a run directory does
    point = newest_checkpoint(broken / "checkpoints")
    if point.damaged:
        raise SystemExit(f"kill {number} left a damaged checkpoint: {point.damaged}")
    if point.path:
        check_digests(point.path, point.manifest)
    step = point.manifest.step if point.manifest else 0
    if point.path and not (broken / f"point-{step}").exists():
        shutil.copytree(point.path, broken / f"point-{step}")  # retention will remove it
    return Kill(inside, max((s for s, _ in digests(folder / "task", 2)[0]), default=0), step)


def last_start(broken: Path, number: int, config: dict, resumed_from: int) -> Path:
    """After the last kill: on to the next save, to its end."""
    folder, ranks = start(broken, number, config, resumed_from + SAVE_EVERY)
    finish(ranks, folder)
    return folder / "task"


def start(broken: Path, number: int, config: dict, until: int) -> tuple[Path, list[subprocess.Popen]]:
    """All ranks, from the newest complete checkpoint."""
    newest = newest_checkpoint(broken / "checkpoints").path
    folder = broken / f"start-{number}"
    return folder, start_ranks(
        folder, config, broken / "checkpoints", [["task", newest and str(newest), until, SAVE_EVERY, False]]
    )


def moved(model: Path, work: Path, reference: Path, found: Findings) -> None:
    """Every checkpoint that a kill left, on one rank: two updates,
    and how far its weights are from the uninterrupted run's.
    """
    points = sorted({kill.resumed_from for kill in found.kills if kill.resumed_from})
    tasks = [[f"from-{p}", str(work / "broken" / f"point-{p}"), p + MOVED_UPDATES, 0, True] for p in points]
    out = run_to_end(work / "moved", actor_config(model, 1), tasks) if tasks else work
    for kill in found.kills:
        if point := kill.resumed_from:
            name = f"weights-{point + MOVED_UPDATES}.safetensors"
            kill.moved_error = worst(out / f"from-{point}" / name, reference / name)


def worst(one: Path, other: Path) -> float:
    """Largest ||one - other|| / ||other|| over tensors."""
    from safetensors.torch import load_file

    found, expected = load_file(one), load_file(other)
    return max(((found[n].double() - e.double()).norm() / e.double().norm()).item() for n, e in expected.items())


def digests(out: Path, world_size: int) -> list[list[list[Any]]]:
    """Of every rank, [update, SHA-256] in order; a line that the kill cut is left out."""
    files = [out / f"digests-{rank}.jsonl" for rank in range(world_size)]
    texts = [file.read_text() if file.exists() else "" for file in files]
    return [[json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")] for text in texts]


def unlike(found: list, expected: list, resumed_from: int) -> list[str]:
    """What a start did differently from the uninterrupted run, or that it did nothing."""
    problems = []
    for rank, lines in enumerate(found):
        known = dict(expected[rank])
        if [step for step, _ in lines][:1] != [resumed_from + 1]:
            problems.append(f"rank {rank} went on with {lines[:1]} after update {resumed_from}")
        problems += [f"rank {rank}, update {step}: other bits" for step, digest in lines if known[step] != digest]
    return problems


def done(out: Path) -> int:
    """Updates that a start has logged."""
    return len(digests(out, 1)[0])


def newest_step(broken: Path) -> int:
    """Of the finished checkpoints; 0 when there is none."""
    return max((step for step, _ in checkpoint_steps(broken / "checkpoints")), default=0)


def saves_under_way(broken: Path) -> list[Path]:
    """Folders of checkpoints that have no name yet."""
    return sorted((broken / "checkpoints").glob("*.tmp-*"))


def actor_config(model: Path, world_size: int) -> dict[str, Any]:
    """TP 2 and EP 2 on two ranks.

    An eps that is not tiny: where a gradient is zero but for rounding, Adam would take its sign.
    """
    degrees = {"tensor_model_parallel_size": world_size, "expert_model_parallel_size": world_size}
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "actor": {
            "layout": {"world_size": world_size} | degrees,
            "optim": {"lr": 1e-3, "lr_warmup_steps": 4, "eps": 1e-4, "weight_decay": 0.1, "clip_grad": 0.5},
            "ppo_mini_batch_size": 6,
        },
        "rollout": {"n": 1},
        "data": {"train_batch_size": 6},
        "cluster": {"device": "cpu", "step_timeout_s": 60},
    }


def start_ranks(folder: Path, config: dict, checkpoints: Path, tasks: list) -> list[subprocess.Popen]:
    """The processes of one start; what they say is in rank-R.log."""
    folder.mkdir(parents=True)
    (folder / "start.json").write_text(json.dumps({"config": config, "checkpoints": str(checkpoints), "tasks": tasks}))
    environment = (
        os.environ | get_hosting("cpu").actor_environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    )
    return [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(folder)], env=environment, start_new_session=True,
            stdout=(folder / f"rank-{rank}.log").open("w"), stderr=subprocess.STDOUT,
        )
        for rank in range(config["actor"]["layout"]["world_size"])
    ]  # fmt: skip


def run_to_end(folder: Path, config: dict, tasks: list) -> Path:
    """A start that nobody kills; its folder."""
    finish(start_ranks(folder, config, folder / "checkpoints", tasks), folder)
    return folder


def finish(ranks: list[subprocess.Popen], folder: Path) -> None:
    """Waits for all ranks to end well. Raises SystemExit with their logs when one does not."""
    try:
        wait(lambda: all(r.poll() == 0 for r in ranks), ranks, START_S + STEP_S, folder)
    finally:
        end(ranks)


def wait(ready: Callable[[], bool], ranks: list[subprocess.Popen], limit_s: float, folder: Path) -> None:
    """Until `ready`. Raises SystemExit with the logs when a rank fails or the time is up."""
    deadline = time.monotonic() + limit_s
    while not ready():
        failed = [r for r in ranks if r.poll() not in (None, 0)]
        if failed or time.monotonic() > deadline:
            said = "\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("*.log")))
            raise SystemExit(f"{folder}: {'a process failed' if failed else f'nothing within {limit_s:g} s'}\n{said}")
        time.sleep(0.005)


def end(ranks: list[subprocess.Popen]) -> None:
    """kill -9, all at once."""
    for process in ranks:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in ranks:
        process.wait()


# --- the whole loop
