"""Draws the reward curves of one or more runs, from their metrics.jsonl, in one picture.

    python scripts/plot_rewards.py runs/seed0 runs/seed1 -o docs/results/learning.png

Lines are the mean score of the training batches, dots the held-out scores.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from mrl.errors import ConfigError
from mrl.record.run_dir import METRICS, read_metrics

STEP, SCORE, HELD_OUT = "training/global_step", "critic/score/mean", "val-core/"


@dataclass(frozen=True)
class Curves:
    """Points (step, score) of one run."""

    name: str
    train: list[tuple[int, float]]
    held_out: dict[str, list[tuple[int, float]]]  # by metric


def load(run_dir: Path) -> Curves:
    """Reads one run. Raises ConfigError where there is nothing to draw."""
    rows = read_metrics(run_dir / METRICS)
    train = [(row[STEP], row[SCORE]) for row in rows if row.get(SCORE) is not None]
    names = sorted({name for row in rows for name in row if name.startswith(HELD_OUT) and "/mean@" in name})
    held_out = {name: [(row[STEP], row[name]) for row in rows if row.get(name) is not None] for name in names}
    if not train and not names:
        raise ConfigError(
            f"{run_dir / METRICS} has no {SCORE} and no {HELD_OUT}*; give the folder of a run that has finished a step"
        )
    return Curves(run_dir.resolve().name, train, held_out)


def draw(runs: list[Curves], out: Path, title: str) -> None:
    """One colour a run: a line for training, dots on a dashed line for held-out scores."""
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
    for number, run in enumerate(runs):
        colour = f"C{number % 10}"
        if run.train:
            axes.plot(
                *zip(*run.train, strict=True),
                color=colour,
                alpha=0.5,
                linewidth=1.2,
                label=f"{run.name}: training batches",
            )
        for name, points in run.held_out.items():
            label = f"{run.name}: held out ({name.removeprefix(HELD_OUT)})"
            axes.plot(*zip(*points, strict=True), "o--", color=colour, markersize=5, linewidth=0.9, label=label)
    axes.set(xlabel="step", ylabel="mean score", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/results/learning.png"))
    parser.add_argument("--title", default="Reward")
    args = parser.parse_args()
    try:
        draw([load(run_dir) for run_dir in args.run_dirs], args.out, args.title)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    print(args.out)


if __name__ == "__main__":
    main()
