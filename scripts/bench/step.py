"""Where a step's time goes in the tiny run, and the share that is neither generation, log-probs, update nor sync (goal:
under 5 %).

python scripts/bench/step.py [--steps 12] [--json]        trains in a temporary folder; needs tiny-world/
                                                          (scripts/make_tiny_world.py)
python scripts/bench/step.py --run-dir runs/tiny-moe      reads a run that is there
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from statistics import median

from mrl.record.run_dir import METRICS, read_metrics

WORK = ("gen", "old_log_prob", "update_actor", "reshard")  # on policy there is no old_log_prob
PREFIX = "timing_s/"


def run_steps(folder: Path, steps: int) -> Path:
    """Trains without validation or checkpoints in between; returns the run directory."""
    settings = {"total_training_steps": steps, "val_before_train": False, "test_freq": -1, "save_freq": -1}
    command = ["mrl", "train", "parallel_configs/tiny-moe/cpu.yaml", "--run-dir", str(folder / "run")]
    for key, value in settings.items():
        command += ["--set", f"trainer.{key}={json.dumps(value)}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
    return folder / "run"


def measure(run_dir: Path) -> dict:
    """Median seconds a phase and the overhead share of all,
    over the steps after the first that neither validate nor save.
    """
    rows = [r for r in read_metrics(run_dir / METRICS) if r["training/global_step"] > 1]
    rows = [r for r in rows if not {"timing_s/testing", "timing_s/save_checkpoint"} & r.keys()]
    if not rows:
        raise SystemExit(f"{run_dir} has no step after the first without validation and save")
    phases = {name.removeprefix(PREFIX): median(r[name] for r in rows) for name in rows[0] if name.startswith(PREFIX)}
    total = sum(r["timing_s/step"] for r in rows)
    work = sum(r.get(PREFIX + name, 0.0) for r in rows for name in WORK)
    return {"steps": len(rows), "phases": phases, "overhead_share": 1 - work / total}


def main() -> None:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args.run_dir or run_steps(Path(folder), args.steps))
    if args.json:
        print(json.dumps(result))
        return
    for name, seconds in sorted(result["phases"].items(), key=lambda item: -item[1]):
        print(f"{name:16} {seconds:8.3f} s")
    print(
        f"overhead share   {100 * result['overhead_share']:8.2f} %   (median of "
        f"{result['steps']} steps; goal: under 5 %)"
    )


if __name__ == "__main__":
    main()
