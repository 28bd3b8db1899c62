"""A run under `mrl train --restarts` whose engines, ranks and driver are killed at drawn moments, which nobody touches:
it ends with the metrics, samples and checkpoint of the run that was left alone, bit for bit.

The tiny preset, synchronous, a save a step, limits of restarts raised. The n-th kill comes up to a second behind the
line of step 2n - 1, wherever the run is by then. The victim is drawn, and of several processes of a kind which one.
"""

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from mrl.record.attempts import read_attempts
from mrl.record.run_dir import METRICS, read_metrics
from mrl.record.sample_files import read_samples
from mrl.tools.compare_runs import checkpoint_difference, metrics_difference, of_run

ROOT = Path(__file__).resolve().parents[2]
PRESET = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
VICTIMS = {"engine": "EngineCore", "rank": "ray::ActorWorker", "driver": "mrl.cli.main"}
START_S = 120.0  # a run takes this long and STEP_S a step at most, and again with each kill
STEP_S = 20.0
LOOK_S = 0.05


def killed_and_whole(world: Path, work: Path, kills: int, seed: int = 0) -> dict[str, Any]:
    """Runs the one that is left alone and the one that is not. Raises RuntimeError where one does not end well."""
    steps = 2 * kills
    folders = {name: work / name for name in ("whole", "killed")}
    seconds = {}
    done: list[dict[str, Any]] = []
    for name, folder in folders.items():
        began = time.monotonic()
        process = start(world, folder, steps)
        drawn = Drawn(seed, kills if name == "killed" else 0)
        done += attack(process, folder, drawn, START_S + STEP_S * steps + START_S * drawn.kills)
        seconds[name] = round(time.monotonic() - began, 1)
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {folder}.log")
    return results(folders, steps, done, seconds)


class Drawn:
    """Whom to kill, and when."""

    def __init__(self, seed: int, kills: int) -> None:
        self.kills = kills
        self._random = random.Random(seed)

    def wait_s(self) -> float:
        """Seconds behind the line of a step."""
        return self._random.random()

    def victim(self, below: psutil.Process) -> tuple[str, psutil.Process]:
        """A process below the supervisor, once there is one of its kind."""
        kind = self._random.choice(sorted(VICTIMS))
        while True:
            found = [each for each in below.children(recursive=True) if VICTIMS[kind] in title(each)]
            if kind == "driver":
                found = [each for each in found if each.ppid() == below.pid]
            if found:
                return kind, self._random.choice(sorted(found, key=lambda each: each.pid))
            time.sleep(LOOK_S)


def title(process: psutil.Process) -> str:
    """The command line, empty for a process that has gone."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def start(world: Path, folder: Path, steps: int) -> subprocess.Popen:
    """Starts a supervised run; what it prints goes to FOLDER.log."""
    data = world / "data"
    given = [
        f"model.path={world / 'model'}", f"data.train_files={data / 'train.parquet'}", "data.val_files=[]",
        "data.train_batch_size=8", "actor.ppo_mini_batch_size=4", "actor.optim.lr_warmup_steps=1",
        f"trainer.total_training_steps={steps}", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2",
        "trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.deterministic=true",
        "trainer.logger=[console]", "trainer.restart_limit=100", "rollout.restart_limit=100",
    ]  # fmt: skip
    words = ["train", str(PRESET), "--run-dir", str(folder), "--restarts", "100"]
    words += [word for text in given for word in ("--set", text)]
    command = [sys.executable, "-c", "from mrl.cli.main import main; main()", *words]
    with folder.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def attack(process: subprocess.Popen, folder: Path, drawn: Drawn, limit_s: float) -> list[dict[str, Any]]:
    """Kills until all that is drawn is done, and waits for the end; a row a kill. Past `limit_s` it ends the run."""
    kills = []
    deadline = time.monotonic() + limit_s
    supervisor = psutil.Process(process.pid)
    while process.poll() is None:
        if time.monotonic() > deadline:
            for each in [*supervisor.children(recursive=True), supervisor]:
                with suppress(psutil.Error):
                    each.kill()
        elif len(kills) < drawn.kills and finished(folder) >= 2 * (len(kills) + 1) - 1:
            time.sleep(drawn.wait_s())
            kind, victim = drawn.victim(supervisor)
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL)
                kills.append({"victim": kind, "step": finished(folder) + 1})
                print(f"{len(kills)} of {drawn.kills}: {kills[-1]}", flush=True)
        time.sleep(LOOK_S)
    return kills


def finished(folder: Path) -> int:
    """The last step that has its line."""
    with suppress(OSError):
        return max((int(row["training/global_step"]) for row in read_metrics(folder / METRICS)), default=0)
    return 0


def results(folders: dict[str, Path], steps: int, kills: list[dict], seconds: dict[str, float]) -> dict[str, Any]:
    """What was done, and the first difference that there is."""
    whole, killed = folders.values()
    attempts = read_attempts(killed)
    rows = read_metrics(killed / METRICS)
    return {
        "steps": steps,
        "kills": dict(Counter(kill["victim"] for kill in kills)),
        "each": kills,
        "starts": len(attempts),
        "restarts_of_ranks": int(rows[-1]["trainer/restarts"]),
        "restarts_of_engines": sum(len(attempt.engines_restarted) for attempt in attempts),
        "seconds": seconds,
        "difference": difference(whole, killed, steps),
    }


def difference(whole: Path, killed: Path, steps: int) -> str | None:
    """The first that is found: of metrics, of the samples of a step, of the last checkpoint."""
    if found := metrics_difference(*(read_metrics(folder / METRICS) for folder in (whole, killed))):
        return found
    for step in range(1, steps + 1):
        first, second = ([of_run(row) for row in read_samples(run / "samples", step)] for run in (whole, killed))
        if first != second:
            return f"samples of step {step}"
    return checkpoint_difference(*(folder / "checkpoints" / f"step-{steps}" for folder in (whole, killed)))
