"""kill -9 of a process in the middle of every hand-over of a colocated step, and what goes on from there: not one bit
differs.

python scripts/evidence/colocated.py --world tiny-world --work runs/colocated --out docs/results/colocated.json

Actor and engine take turns on the same two "devices" of a CPU. One run is left alone. Another one is ended again and
again, each time in the second step after it was resumed, at one call to all ranks or engines; after every end, and at
the last step, its metrics (clocks left out) are held against those of the first, and so is its last checkpoint. With
SIGTERM it finishes what must not be left half-done, saves, and exits 5. What was done is kept in the work folder: with
--for SECONDS the next call goes on there.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import psutil

from mrl.record.run_dir import METRICS, read_metrics
from mrl.train.compare_runs import checkpoint_difference, metrics_difference

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("colocated_killed.py")
PRESET = ROOT / "parallel_configs" / "tiny-moe" / "cpu-colocated.yaml"
RUN_S = 400.0  # deadline of one start


@dataclass(frozen=True)
class Point:
    """A call of the second step of a start.

    Its first step, and the weights that engines are given before it, come before.
    """

    hand_over: str
    call: str
    nth: int  # such call since the start
    victim: str
    signal: str = "SIGKILL"

    @property
    def exit_code(self) -> int:
        """Of the driver: a lost process and SIGTERM leave a run that can be resumed."""
        return -signal.SIGKILL if (self.victim, self.signal) == ("driver", "SIGKILL") else 5


POINTS = (
    Point("engines go to sleep", "sleep", 2, "vllm"),
    Point("parameters come on for log-probs", "bring", 5, "driver"),
    Point("gradients and optimizer come on", "bring", 6, "rank"),
    Point("what is saved is copied to the host", "take_checkpoint", 2, "driver"),
    Point("gradients and optimizer leave", "bring", 7, "rank"),
    Point("engines wake their weights", "wake_weights", 3, "engine"),
    Point("weights are moved", "send_weights", 3, "rank"),
    Point("parameters leave", "offload", 3, "driver"),
    Point("engines wake their cache", "wake_cache", 3, "vllm"),
    Point("the version is committed", "commit", 3, "driver"),
    Point("engines generate", "generate", 2, "driver", "SIGTERM"),
    Point("engines go to sleep", "sleep", 2, "driver", "SIGTERM"),
    Point("gradients and optimizer come on", "bring", 6, "driver", "SIGTERM"),
    Point("engines wake their cache", "wake_cache", 3, "driver", "SIGTERM"),
)
STEPS = len(POINTS) + 4  # an end costs a step at most; SIGTERM finishes the one that it comes in


@dataclass(frozen=True)
class Ending:
    """How the run ended at a point."""

    point: Point
    exit_code: int
    steps: int  # that had their line of metrics by then
    difference: str | None  # of those lines; None: no bit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--for", type=float, default=float("inf"), dest="seconds", help="begin no further start after this many seconds"
    )
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    killing = Killing(options.world, options.work)
    deadline = time.monotonic() + options.seconds
    while killing.is_unfinished:
        if time.monotonic() > deadline:
            print("to be continued", flush=True)
            return
        killing.go_on()
    if options.out:
        options.out.write_text(json.dumps(killing.results(), indent=1) + "\n")
    sys.exit(bool(killing.differences()))


class Killing:
    """The run that is left alone and the one that is not, in a folder that remembers both."""

    def __init__(self, world: Path, work: Path):
        self._world, self._work = world, work
        self._whole, self._run, self._file = work / "whole", work / "run", work / "endings.json"

    @property
    def is_unfinished(self) -> bool:
        return not (self._work / "finished").exists()

    def endings(self) -> list[dict]:
        return json.loads(self._file.read_text()) if self._file.exists() else []

    def go_on(self) -> None:
        """One start: of the run that is left alone, of the other one up to its next end, or of its rest."""
        done = self.endings()
        if not (self._work / "whole.done").exists():
            self._train(self._whole)
            (self._work / "whole.done").touch()
        elif len(done) < len(POINTS):
            point = POINTS[len(done)]
            words = [
                point.call,
                str(point.nth),
                point.victim,
                point.signal,
                str(int(bool(done))),
                *self._settings(self._run),
            ]
            finish(
                [sys.executable, str(DRIVER), str(PRESET), *words],
                self._work / f"point-{len(done)}.log",
                point.exit_code,
            )
            rows = read_metrics(self._run / METRICS)
            whole = read_metrics(self._whole / METRICS)[: len(rows)]
            done.append(asdict(Ending(point, point.exit_code, len(rows), metrics_difference(whole, rows))))
            self._file.write_text(json.dumps(done, indent=1))
            print(f"{len(done)} of {len(POINTS)}: {done[-1]}", flush=True)
        else:
            self._train(self._run, "--resume")
            (self._work / "finished").touch()

    def differences(self) -> list[str]:
        """All that were found, those of the ends first."""
        metrics = metrics_difference(*(read_metrics(folder / METRICS) for folder in (self._whole, self._run)))
        weights = checkpoint_difference(
            *(folder / "checkpoints" / f"step-{STEPS}" for folder in (self._whole, self._run))
        )
        return [text for text in (*(end["difference"] for end in self.endings()), metrics, weights) if text]

    def results(self) -> dict:
        """What goes to the results file."""
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
        endings = self.endings()
        return {
            "command": "scripts/evidence/colocated.sh",
            "commit": commit,
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "steps": STEPS,
            "killed": sum(end["point"]["signal"] == "SIGKILL" for end in endings),
            "stopped": sum(end["point"]["signal"] == "SIGTERM" for end in endings),
            "hand_overs": len({end["point"]["hand_over"] for end in endings}),
            "differences": self.differences(),
            "endings": endings,
        }

    def _train(self, run_dir: Path, *more: str) -> None:
        settings = [text for setting in self._settings(run_dir) for text in ("--set", setting)]
        command = [
            sys.executable,
            "-c",
            "from mrl.cli.main import main; main()",
            "train",
            str(PRESET),
            *more,
            *settings,
        ]
        finish(command, run_dir.with_suffix(".log"), wanted=0)

    def _settings(self, run_dir: Path) -> list[str]:
        """Small batches, a save a step."""
        data = self._world / "data"
        return [
            f"model.path={self._world / 'model'}", f"data.train_files={data / 'train.parquet'}",
            f"data.val_files={data / 'val.parquet'}",
            "data.val_max_samples=16", "data.train_batch_size=8", "actor.ppo_mini_batch_size=4",
            "actor.optim.lr_warmup_steps=1",
            f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2",
            "trainer.test_freq=5",
            "trainer.logger=[console]", f"trainer.run_dir={run_dir}",
        ]  # fmt: skip


def finish(command: list[str], log: Path, wanted: int) -> None:
    """Runs a command to its end, and ends what it left.

    Raises RuntimeError for another exit code than the one wanted.
    """
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        below: dict[int, psutil.Process] = {}
        deadline = time.monotonic() + RUN_S
        while process.poll() is None and time.monotonic() < deadline:
            below |= {child.pid: child for child in _children(process.pid)}
            time.sleep(0.5)
    if process.poll() is None:
        process.kill()
    _, left = psutil.wait_procs(list(below.values()), timeout=60)
    for one in left:
        one.kill()
    if process.wait() != wanted:
        raise RuntimeError(f"exit code {process.returncode} where {wanted} was expected: {log}")


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


if __name__ == "__main__":
    main()
