"""Held-out scores of several recipes over several seeds, from the folders RECIPE-SEED of one directory: a table, a
figure, a verdict.

python scripts/evidence/learning_curves.py runs/algorithms --name algorithms

Writes NAME.json and NAME.png; scripts/evidence/NAME.sh is what made the runs.
"""

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mrl.record.run_dir import METRICS, read_metrics

sys.path.append(str(Path(__file__).resolve().parent))
from stamp import facts

CONTROL = "control"  # random rewards; control_NAME is that of another recipe
STALENESS = "training/off_policy/trajectory_staleness/mean"
CONTROL_POINTS = 6.0  # of held-out score that random rewards may move it by


@dataclass(frozen=True)
class Curve:
    """Held-out scores of one run: (step, score), and the sum of its steps' seconds and batches of prompts."""

    seed: int
    points: list[tuple[int, float]]
    seconds: float
    gen_batches: float
    staleness: float | None  # updates, of the mean response in the later half; None where the run has no such metric

    @property
    def gain(self) -> float:
        """Points of score from the first to the last validation."""
        return 100 * (self.points[-1][1] - self.points[0][1])


def read(run_dir: Path) -> Curve:
    """Raises SystemExit where the run was never validated twice."""
    rows = read_metrics(run_dir / METRICS)
    points = [
        (row["training/global_step"], v)
        for row in rows
        for k, v in row.items()
        if k.startswith("val-core/") and "/mean@" in k
    ]
    if len(points) < 2:
        raise SystemExit(f"{run_dir} holds fewer than two validations")
    seconds = sum(row.get("timing_s/step", 0.0) for row in rows)
    ages = [row[STALENESS] for row in rows if STALENESS in row]
    return Curve(
        int(run_dir.name.rpartition("-")[2]),
        points,
        seconds,
        sum(row.get("train/num_gen_batches", 0.0) for row in rows),
        float(np.mean(ages[len(ages) // 2 :])) if ages else None,
    )


def draw(curves: dict[str, list[Curve]], title: str, path: Path) -> None:
    """Thin lines for seeds, a thick one for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
    for number, (name, runs) in enumerate(curves.items()):
        for run in runs:
            axes.plot(*zip(*run.points, strict=True), color=f"C{number}", alpha=0.35, linewidth=0.9)
        steps = [step for step, _ in runs[0].points]
        mean = np.mean([[score for _, score in run.points] for run in runs], axis=0)
        axes.plot(
            steps, mean, "o-", color=f"C{number}", linewidth=2, markersize=4, label=f"{name}, mean of {len(runs)} seeds"
        )
    axes.set(xlabel="step", ylabel="held-out score", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def read_all(runs: Path) -> dict[str, list[Curve]]:
    """Curves of each recipe, of the folders RECIPE-SEED. Raises SystemExit where there is none."""
    curves: dict[str, list[Curve]] = defaultdict(list)
    for folder in sorted(path for path in runs.iterdir() if (path / METRICS).is_file()):
        curves[folder.name.rpartition("-")[0]].append(read(folder))
    if not curves:
        raise SystemExit(f"{runs} holds no runs named RECIPE-SEED")
    return curves


def result(curves: dict[str, list[Curve]], command: str) -> dict:
    """What is stored, with the command that made the runs."""
    table = {
        name: {
            "seeds": [run.seed for run in runs],
            "before": [round(run.points[0][1], 4) for run in runs],
            "after": [round(run.points[-1][1], 4) for run in runs],
            "gain_points": [round(run.gain, 1) for run in runs],
            "gen_batches": [run.gen_batches for run in runs],
            "staleness": [run.staleness for run in runs],
            "seconds": [round(run.seconds, 1) for run in runs],
        }
        for name, runs in curves.items()
    }
    of_others = {"others": "every seed gains more than the control's"}
    if all(name.startswith(CONTROL) for name in curves):
        of_others = {}
    return facts(command) | {
        "steps": max(step for runs in curves.values() for run in runs for step, _ in run.points),
        "algorithms": table,
        "goals": {"control_change_points": f"within {CONTROL_POINTS:g} for every seed"} | of_others,
    }


def check(curves: dict[str, list[Curve]]) -> None:
    """Raises SystemExit where a goal was missed."""
    controls = {name for name in curves if name.startswith(CONTROL)}
    moved = max((abs(run.gain) for name in controls for run in curves[name]), default=0.0)
    stuck = [name for name, runs in curves.items() if name not in controls and min(run.gain for run in runs) <= moved]
    if moved > CONTROL_POINTS or stuck:
        raise SystemExit(
            f"a goal was missed: the control moved by {moved:.1f} points; no more than that gained: "
            f"{', '.join(stuck) or 'none'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--name", default="algorithms")
    parser.add_argument("--command", help="what made the runs; default: the script of that name")
    parser.add_argument("--title", default="Tiny Qwen3-MoE from the same start")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    curves = read_all(args.runs)
    draw(curves, args.title, args.out / f"{args.name}.png")
    made = result(curves, args.command or f"scripts/evidence/{args.name}.sh")
    (args.out / f"{args.name}.json").write_text(json.dumps(made, indent=2) + "\n")
    print(json.dumps(made))
    check(curves)


if __name__ == "__main__":
    main()
