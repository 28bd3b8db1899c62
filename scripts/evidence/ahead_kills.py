"""kill -9 at every kind of moment of a run that generates ahead of training, and what goes on from there: not one bit
differs.

python scripts/evidence/ahead_kills.py --world tiny-world --work runs/ahead-kills --out docs/results/ahead_kills.json

Two steps of staleness, responses of several versions. One run is left alone. Another one is killed at one point after
the other, each in the second step after it was resumed; after every end, and at the last step, its metrics (clocks left
out) are held against those of the first, and so is its last checkpoint with the groups that were on their way. What was
done is kept in the work folder: with --for SECONDS the next call goes on there. A start takes about half a minute.
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

from colocated import finish

from mrl.record.run_dir import METRICS, read_metrics
from mrl.train.compare_runs import checkpoint_difference, metrics_difference

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("ahead_killed.py")
PRESET = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"


@dataclass(frozen=True)
class Point:
    """Where a run is killed, and which of its processes."""

    point: str
    victim: str

    @property
    def exit_code(self) -> int:
        """Of the driver: one that loses a process leaves a run that can be resumed."""
        return -signal.SIGKILL if self.victim == "driver" else 5


POINTS = (
    Point("answers come back", "driver"),
    Point("answers come back", "vllm"),
    Point("engines stand still", "driver"),
    Point("weights are moved", "rank"),
    Point("weights arrive", "vllm"),
    Point("proved, not committed", "driver"),
    Point("ranks update", "driver"),
    Point("ranks update", "rank"),
    Point("a checkpoint is written", "driver"),
)
STEPS = len(POINTS) + 4  # a start that is killed finishes one step at least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    limit = "begin no further start after this many seconds"
    parser.add_argument("--for", type=float, default=float("inf"), dest="seconds", help=limit)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    killing = Killing(options.world.resolve(), options.work.resolve())
    deadline = time.monotonic() + options.seconds
    while killing.is_unfinished:
        if time.monotonic() > deadline:
            print("to be continued", flush=True)
            return
        killing.go_on()
    results = killing.results()
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps({name: results[name] for name in ("killed", "differences", "versions_per_sample")}))
    sys.exit(bool(results["differences"]) or results["versions_per_sample"] <= 1)


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
            self._kill(POINTS[len(done)], done)
        else:
            self._train(self._run, "--resume")
            (self._work / "finished").touch()

    def _kill(self, point: Point, done: list[dict]) -> None:
        words = [point.point, point.victim, str(int(bool(done))), *self._settings(self._run)]
        log = self._work / f"point-{len(done)}.log"
        finish([sys.executable, str(DRIVER), str(PRESET), *words], log, point.exit_code)
        rows = read_metrics(self._run / METRICS)
        difference = metrics_difference(read_metrics(self._whole / METRICS)[: len(rows)], rows)
        done.append(asdict(point) | {"steps": len(rows), "difference": difference})
        self._file.write_text(json.dumps(done, indent=1))
        print(f"{len(done)} of {len(POINTS)}: {done[-1]}", flush=True)

    def results(self) -> dict:
        """What goes to the results file."""
        git = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        rows = read_metrics(self._whole / METRICS)
        return {
            "command": "scripts/evidence/ahead_kills.sh",
            "commit": commit,
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "steps": STEPS,
            "killed": len(self.endings()),
            "points": len({end["point"] for end in self.endings()}),
            "versions_per_sample": max(row.get("async/versions_per_sample", 0.0) for row in rows),
            "differences": self._differences(),
            "endings": self.endings(),
        }

    def _differences(self) -> list[str]:
        """All that were found, those of the ends first."""
        runs = (self._whole, self._run)
        metrics = metrics_difference(*(read_metrics(folder / METRICS) for folder in runs))
        kept = [
            checkpoint_difference(*(folder / "checkpoints" / f"step-{step}" for folder in runs))
            for step in (STEPS - 1, STEPS)
        ]
        return [text for text in (*(end["difference"] for end in self.endings()), metrics, *kept) if text]

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
        """Small batches, a save a step; a token of each response by each version but the last."""
        data = self._world / "data"
        return [
            f"model.path={self._world / 'model'}", f"data.train_files={data / 'train.parquet'}", "data.val_files=[]",
            "data.train_batch_size=8", "actor.ppo_mini_batch_size=4", "actor.optim.lr_warmup_steps=1",
            "trainer.schedule=bounded", "trainer.max_staleness=2", "trainer.partial_rollouts=true",
            "trainer.segment_tokens=1", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1",
            "trainer.max_actor_ckpt_to_keep=3", "trainer.test_freq=-1", "trainer.val_before_train=false",
            "trainer.logger=[console]", f"trainer.run_dir={run_dir}",
        ]  # fmt: skip


if __name__ == "__main__":
    main()
