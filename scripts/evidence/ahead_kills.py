"""kill -9 at every kind of moment of a run that generates ahead of training, and what goes on from there: not one bit
differs.

python scripts/evidence/ahead_kills.py --world tiny-world --work runs/ahead-kills --out docs/results/ahead_kills.json

Two steps of staleness, responses of several versions. One run is left alone. Another one is killed at one point after
the other, each in the second step after it was resumed; after every end, and at the last step, its metrics (clocks left
out) are held against those of the first, and so is its last checkpoint with the groups that were on their way. What was
done is kept in the work folder: with --for SECONDS the next call goes on there. A start takes about half a minute.
"""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from killed_run import ROOT, Claim, show


@dataclass(frozen=True)
class Point:
    """Where a run is killed, and which of its processes."""

    point: str
    victim: str

    @property
    def exit_code(self) -> int:
        """Of the driver: one that loses a process leaves a run that can be resumed."""
        return -signal.SIGKILL if self.victim == "driver" else 5

    @property
    def words(self) -> list[str]:
        return [self.point, self.victim]


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


def settings(world: Path, run_dir: Path) -> list[str]:
    """Small batches, a save a step; a token of each response by each version but the last."""
    data = world / "data"
    return [
        f"model.path={world / 'model'}", f"data.train_files={data / 'train.parquet'}", "data.val_files=[]",
        "data.train_batch_size=8", "actor.ppo_mini_batch_size=4", "actor.optim.lr_warmup_steps=1",
        "trainer.schedule=bounded", "trainer.max_staleness=2", "trainer.partial_rollouts=true",
        "trainer.segment_tokens=1", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=3", "trainer.test_freq=-1", "trainer.val_before_train=false",
        "rollout.restart_limit=0", "trainer.restart_limit=0",  # a lost process ends it
        "trainer.logger=[console]", f"trainer.run_dir={run_dir}",
    ]  # fmt: skip


def summary(endings: list[dict], whole: list[dict]) -> dict[str, Any]:
    return {
        "killed": len(endings),
        "points": len({end["point"]["point"] for end in endings}),
        "versions_per_sample": max(row.get("async/versions_per_sample", 0.0) for row in whole),
    }


CLAIM = Claim(
    command="scripts/evidence/ahead_kills.sh",
    preset=ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml",
    driver=Path(__file__).with_name("ahead_killed.py"),
    points=POINTS,
    steps=STEPS,
    settings=settings,
    summary=summary,
    steps_compared=(STEPS - 1, STEPS),
)


def main() -> int:
    results = show(CLAIM, __doc__)
    return int(results is not None and (bool(results["differences"]) or results["versions_per_sample"] <= 1))


if __name__ == "__main__":
    sys.exit(main())
