"""kill -9 of a process in the middle of every hand-over of a colocated step, and what goes on from there: not one bit
differs.

python scripts/evidence/colocated.py --world tiny-world --work runs/colocated --out docs/results/colocated.json

Actor and engine take turns on the same two "devices" of a CPU. One run is left alone. Another one is ended again and
again, each time in the second step after it was resumed, at one call to all ranks or engines; after every end, and at
the last step, its metrics (clocks left out) are held against those of the first, and so is its last checkpoint. With
SIGTERM it finishes what must not be left half-done, saves, and exits 5. What was done is kept in the work folder: with
--for SECONDS the next call goes on there.
"""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from killed_run import ROOT, Claim, show


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

    @property
    def words(self) -> list[str]:
        return [self.call, str(self.nth), self.victim, self.signal]


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


def settings(world: Path, run_dir: Path) -> list[str]:
    """Small batches, a save a step."""
    data = world / "data"
    return [
        f"model.path={world / 'model'}", f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'val.parquet'}",
        "data.val_max_samples=16", "data.train_batch_size=8", "actor.ppo_mini_batch_size=4",
        "actor.optim.lr_warmup_steps=1",
        f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2",
        "trainer.test_freq=5",
        "rollout.restart_limit=0", "trainer.restart_limit=0",  # a lost process ends it
        "trainer.logger=[console]", f"trainer.run_dir={run_dir}",
    ]  # fmt: skip


def summary(endings: list[dict], _: list[dict]) -> dict[str, int]:
    return {
        "killed": sum(end["point"]["signal"] == "SIGKILL" for end in endings),
        "stopped": sum(end["point"]["signal"] == "SIGTERM" for end in endings),
        "hand_overs": len({end["point"]["hand_over"] for end in endings}),
    }


CLAIM = Claim(
    command="scripts/evidence/colocated.sh",
    preset=ROOT / "parallel_configs" / "tiny-moe" / "cpu-colocated.yaml",
    driver=Path(__file__).with_name("colocated_killed.py"),
    points=POINTS,
    steps=STEPS,
    settings=settings,
    summary=summary,
    steps_compared=(STEPS,),
)


def main() -> int:
    results = show(CLAIM, __doc__)
    return int(results is not None and bool(results["differences"]))


if __name__ == "__main__":
    sys.exit(main())
