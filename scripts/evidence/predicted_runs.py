"""How far a plan that one run calibrated is from other runs of the same two cores: other batches, lengths, layouts.

    python scripts/evidence/predicted_runs.py RUNS [--worlds tiny long] [--only NAME ...] [--json]

Runs are kept in the folder RUNS, and a second call reads those that are there. The first run of a world calibrates.
Each other one is predicted as `mrl plan` does with that calibration, and by median seconds of steps from the second on.
Whatever else uses the machine meanwhile is in the figures.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.config.load import load_config
from mrl.model import planning_model_spec
from mrl.plan.calibration import SYNC
from mrl.plan.devices import find_device
from mrl.plan.measured_steps import seconds_of
from mrl.plan.plan_inputs import PlanInputs
from mrl.plan.run_plan import make_plan
from mrl.record.run_dir import RunDir, read_metrics
from mrl.tools.calibrate import calibration_of, read_runs

ROOT = Path(__file__).resolve().parents[2]
DEVICE = find_device("cpu")
GOAL = 0.15
CALIBRATES = "base"
_DP2 = {
    "actor.layout.tensor_model_parallel_size": 1,
    "actor.layout.sequence_parallel": False,
}
_PP2 = _DP2 | {"actor.layout.expert_model_parallel_size": 1, "actor.layout.pipeline_model_parallel_size": 2}


@dataclass(frozen=True)
class World:
    """A preset, steps of its runs, and the runs: what each sets."""

    preset: str
    steps: int
    runs: Mapping[str, Mapping[str, Any]]


WORLDS = {
    "tiny": World(
        "parallel_configs/tiny-moe/cpu.yaml",
        9,
        {
            CALIBRATES: {},
            "batch x2": {"data.train_batch_size": 128},
            "batch /2": {"data.train_batch_size": 32},
            "length x2": {"data.max_response_length": 8},
            "micro-batch /4": {"actor.ppo_micro_batch_size_per_gpu": 32},
            "DP2 EP2": _DP2,
            "PP2": _PP2,
        },
    ),
    "long": World(
        "parallel_configs/long-moe/cpu.yaml",
        5,
        {
            CALIBRATES: {},
            "batch /2": {"data.train_batch_size": 8},
            "length /2": {"data.max_response_length": 192},
            "DP2 EP2": _DP2,
            "PP2": _PP2,
        },
    ),
}


def settings_of(world: World, name: str) -> list[str]:
    """What a run sets, each as `key=value`: no validation, no checkpoint before the last step or a stop, few steps."""
    values = {
        "trainer.total_training_steps": world.steps,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "auto",
    }
    return [f"{key}={json.dumps(value)}" for key, value in (values | world.runs[name]).items()]


def trained(world: World, name: str, folder: Path) -> None:
    """Trains a run, or the rest of one that was interrupted, unless it is there with all of its steps."""
    if len(read_metrics(RunDir(folder).metrics)) >= world.steps:
        return
    settings = [text for setting in settings_of(world, name) for text in ("--set", setting)]
    command = [sys.executable, "-m", "mrl.cli.main", "train", world.preset, "--run-dir", str(folder.resolve())]
    if code := subprocess.run([*command, *settings], cwd=ROOT).returncode:
        sys.exit(f"{folder}: training ended with {code}; a second call goes on with it")


def compared(world: World, base: Path, name: str, folder: Path) -> dict[str, Any]:
    """Predicted and measured seconds of a run by phase, and of all phases together."""
    found, _ = calibration_of(read_runs([str(base)], DEVICE))
    config = load_config(world.preset, overrides=settings_of(world, name)).config
    inputs = PlanInputs.of(config, planning_model_spec(config.model.path)[0], DEVICE, found.assumptions)
    plan = make_plan(inputs)
    predicted = plan["times"]["phase_seconds"] | {SYNC: plan["reshard"]["predicted_seconds"]}
    (run,) = read_runs([str(folder)], DEVICE)
    measured = seconds_of(run.rows, plan["batch"]["samples_per_step"]).median
    phases = {phase: (predicted[phase], spent) for phase, spent in measured.items() if phase in predicted}
    step = tuple(sum(pair[side] for pair in phases.values()) for side in (0, 1))
    return {
        "run": name,
        "steps": len(run.rows),
        "phases": {
            phase: {"predicted": round(expected, 4), "measured": round(spent, 4), "off": round(expected / spent - 1, 3)}
            for phase, (expected, spent) in (phases | {"step": step}).items()
        },
    }


def main() -> None:
    """Runs what is asked for, and prints each run's errors by phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--worlds", nargs="*", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--only", nargs="*", help="names of runs beside the one that calibrates")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for world_name in options.worlds:
        world = WORLDS[world_name]
        base = options.runs / world_name / CALIBRATES
        trained(world, CALIBRATES, base)
        for name in world.runs:
            if options.only and name not in options.only:
                continue
            folder = options.runs / world_name / name.replace(" ", "-").replace("/", "by")
            trained(world, name, folder)
            rows.append({"world": world_name} | compared(world, base, name, folder))
    if options.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    for row in rows:
        parts = ", ".join(f"{name} {part['off']:+.0%}" for name, part in row["phases"].items())
        missed = "" if abs(row["phases"]["step"]["off"]) <= GOAL else "  (goal 15 % missed)"
        print(f"{row['world']}, {row['run']}: {parts}; {row['phases']['step']['measured']:.3g} s a step{missed}")


if __name__ == "__main__":
    main()
