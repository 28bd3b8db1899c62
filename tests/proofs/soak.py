"""A long run under faults of all kinds that come again and again: how much of its time was steps, whether every
response was trained on once, and whether what it holds of the machine grows.

The tiny preset under `mrl train --restarts`, 300 steps, a save every five, deadlines of 10 s, limits of restarts
raised. Every 40 s a drawn fault: an engine or a rank is killed, or an engine is stopped and goes on after its deadline.
The reward function raises, hangs, aborts and floods for some responses (soak_reward.py), and the data has rows that
nobody can read.
"""

import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from own_memory import OwnMemory
from random_kills import LOOK_S, PRESET, ROOT, finished, title

from mrl.record.goodput import goodput_of
from mrl.record.run_dir import METRICS, read_metrics
from mrl.record.sample_files import read_samples

STEPS = 300
LAST = 100  # steps whose use of the machine is compared, one half with the other
EVERY_S = 40.0
STOPPED_S = 15.0  # longer than the engines' deadline
LIMIT_S = 3600.0
BATCH = 8
RESPONSES = 8
FAULTS = {
    "engine killed": ("EngineCore", signal.SIGKILL),
    "rank killed": ("ray::ActorWorker", signal.SIGKILL),
    "engine stopped": ("EngineCore", signal.SIGSTOP),
}
BAD_ROWS = ({"prompt": None}, {"prompt": []}, {"reward_model": None}, {"data_source": None})


def soaked(world: Path, work: Path, steps: int = STEPS, seed: int = 0) -> dict[str, Any]:
    """The run, and what came of it. Raises RuntimeError where it does not end well."""
    folder = work / "run"
    data = poisoned(world / "data" / "train.parquet", work)
    with OwnMemory() as memory:
        process = start(world, data, folder, steps, memory)
        soak = Soak(process, folder, random.Random(seed), memory)
        soak.watch()
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {folder}.log")
    return results(soak, folder, steps)


def poisoned(data: Path, work: Path) -> Path:
    """The data with rows among it that nobody can read."""
    rows = pq.read_table(data).to_pylist()
    for number, wrong in enumerate(BAD_ROWS):
        rows.insert(50 * (number + 1), rows[number] | wrong)
    path = work / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(data)), path)
    return path


def start(world: Path, data: Path, folder: Path, steps: int, memory: OwnMemory) -> subprocess.Popen:
    """Starts a supervised run; what it prints goes to FOLDER.log."""
    reward = Path(__file__).with_name("soak_reward.py")
    given = [
        f"model.path={world / 'model'}", f"data.train_files={data}", "data.val_files=[]", "data.max_bad_row_share=0.01",
        f"data.train_batch_size={BATCH}", "actor.ppo_mini_batch_size=4", "actor.optim.lr_warmup_steps=1",
        f"rollout.n={RESPONSES}", f"trainer.total_training_steps={steps}", "trainer.save_freq=5",
        "trainer.max_actor_ckpt_to_keep=2", "trainer.test_freq=-1", "trainer.val_before_train=false",
        "trainer.logger=[console]", "trainer.restart_limit=1000", "rollout.restart_limit=1000",
        "rollout.generate_timeout_s=10", "cluster.step_timeout_s=10", "reward.timeout_s=5",
        "reward.max_failure_share=0.2", f"reward.custom_reward_function.path={reward}",
    ]  # fmt: skip
    words = ["train", str(PRESET), "--run-dir", str(folder), "--restarts", "100"]
    words += [word for text in given for word in ("--set", text)]
    command = [sys.executable, "-c", "from mrl.cli.main import main; main()", *words]
    with folder.with_suffix(".log").open("w") as log:
        return subprocess.Popen(memory.command(command), cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


class Soak:
    """Disturbs a run until it ends, and notes after each step what it holds."""

    def __init__(self, process: subprocess.Popen, folder: Path, drawn: random.Random, memory: OwnMemory) -> None:
        self.faults: Counter[str] = Counter()
        self.held: dict[int, dict[str, float]] = {}  # by step
        self._process = process
        self._supervisor = psutil.Process(process.pid)
        self._folder = folder
        self._drawn = drawn
        self._memory = memory
        self._others = set(temporary())  # folders of others
        self._stopped: tuple[psutil.Process, float] | None = None  # and when it goes on

    def watch(self) -> None:
        """Returns when the run has ended. Past `LIMIT_S` it ends the run."""
        began = time.monotonic()
        next_fault = began + EVERY_S
        while self._process.poll() is None:
            now = time.monotonic()
            if now > began + LIMIT_S:
                for each in [*self._supervisor.children(recursive=True), self._supervisor]:
                    with suppress(psutil.Error):
                        each.kill()
            self._continue_stopped(now)
            step = finished(self._folder)
            if step and step not in self.held:
                self.held[step] = self._held()
            if now > next_fault and step:
                next_fault = now + EVERY_S
                self._disturb(now)
            time.sleep(LOOK_S)

    def _disturb(self, now: float) -> None:
        name = self._drawn.choice(sorted(FAULTS))
        part, number = FAULTS[name]
        found = [each for each in self._supervisor.children(recursive=True) if part in title(each)]
        if not found:
            return
        victim = self._drawn.choice(sorted(found, key=lambda each: each.pid))
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(number)
            self.faults[name] += 1
            print(f"step {finished(self._folder) + 1}: {name}", flush=True)
            if number == signal.SIGSTOP:
                self._stopped = (victim, now + STOPPED_S)

    def _held(self) -> dict[str, float]:
        """What the run holds: bytes of memory by kind of process, and all together; handles, processes, folders."""
        held: Counter[str] = Counter()
        for each in [self._supervisor, *self._supervisor.children(recursive=True)]:
            with suppress(psutil.Error):
                memory = each.memory_full_info().pss
                held["memory"] += memory
                held[f"memory of {each.name()}"] += memory
                held["handles"] += each.num_fds()
                held["processes"] += 1
        held["shared_memory"] = sum(path.stat().st_size for path in self._memory.folder.rglob("*") if path.is_file())
        own = set(temporary()) - self._others
        # Ray has a log of each process that it started
        below = [path for folder in own for path in Path(folder).rglob("*") if path.is_dir()]
        held["temporary_folders"] = len(own) + len(below)
        return dict(held)

    def _continue_stopped(self, now: float) -> None:
        if self._stopped and now > self._stopped[1]:
            with suppress(psutil.NoSuchProcess):
                self._stopped[0].send_signal(signal.SIGCONT)
            self._stopped = None


def temporary() -> list[str]:
    """Folders of mrl among the temporary files."""
    return [str(path) for path in Path("/tmp").glob("mrl-*")]


def results(soak: Soak, folder: Path, steps: int) -> dict[str, Any]:
    """What was done, what it cost, what was left of it."""
    spent = goodput_of(folder)
    rows = read_metrics(folder / METRICS)
    return {
        "steps": steps,
        "faults": dict(soak.faults),
        "failed_rewards": int(sum(row["reward/failed"] for row in rows)),
        "goodput": round(spent.share, 3),
        "lost_s": {cause: round(seconds, 1) for cause, seconds in spent.lost.items()},
        "wall_s": round(spent.wall, 1),
        "ledger": ledger_fault(folder, steps),
        "growth": growth(soak.held, steps),
    }


def ledger_fault(folder: Path, steps: int) -> str | None:
    """The first step that is missing or stands twice, or whose responses are not those that are due."""
    lines = [int(row["training/global_step"]) for row in read_metrics(folder / METRICS)]
    if lines != list(range(1, steps + 1)):
        return "lines of metrics"
    epoch: Counter[int] = Counter()
    for step in range(1, steps + 1):
        samples = read_samples(folder / "samples", step)
        groups = Counter(sample["prompt_id"] for sample in samples)
        if len(samples) != BATCH * RESPONSES or set(groups.values()) != {RESPONSES}:
            return f"responses of step {step}"
        epoch.update(groups.keys())
    if max(epoch.values()) > -(-steps * BATCH // len(epoch)):
        return "a prompt was trained on twice in an epoch"
    return None


def growth(held: dict[int, dict[str, float]], steps: int) -> dict[str, float]:
    """Median of the last half of the last steps over that of the half before, by what is held."""
    late = [held[step] for step in sorted(held) if step > steps - LAST]
    halves = late[: len(late) // 2], late[len(late) // 2 :]
    found = {}
    for name in ("memory", "handles", "processes", "shared_memory", "temporary_folders"):
        before, after = (statistics.median(each[name] for each in half) for half in halves)
        found[name] = round(after / before, 4)
    return found
