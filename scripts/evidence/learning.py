"""Does it learn? Runs of several recipes and seeds from one start, with random rewards as the control: a table,
a figure, a verdict.

    python scripts/evidence/learning.py algorithms RUNS [--seeds 0 1 2] [--steps N] [--out docs/results]

algorithms       GSPO, GRPO and DAPO on the tiny MoE
critic           PPO, which has a critic
staleness        GSPO on responses of older weights, without and with rollout correction
long_world       GSPO on responses of 320 tokens
long_control     random rewards for such responses; with a quarter of the learning rate; with the usual clip

Each run has a folder RECIPE-SEED in RUNS; a second call goes on where the first ended. Writes NAME.json and NAME.png.
Exits with an error where the control moved by more than CONTROL_POINTS, or a recipe gained no more than the control.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mrl.record.run_dir import METRICS, read_metrics

sys.path.append(str(Path(__file__).resolve().parent))
from stamp import changes, facts

ROOT = Path(__file__).resolve().parents[2]
CONTROL = "control"  # random rewards; control_NAME is that of another recipe
STALENESS = "training/off_policy/trajectory_staleness/mean"
CONTROL_POINTS = 6.0  # of held-out score that random rewards may move it by


def sets(*settings: str) -> tuple[str, ...]:
    """Words of a command."""
    return tuple(word for setting in settings for word in ("--set", setting))


RANDOM = sets("reward.custom_reward_function.path=scripts/evidence/random_reward.py")
OLDER = sets("trainer.total_training_steps=40", "trainer.test_freq=10")
CORRECTED = sets("algorithm.rollout_correction={level: token, mode: truncate, high: 2}")
VANILLA = sets(
    "algorithm.policy_loss.loss_mode=vanilla",
    "algorithm.policy_loss.clip_ratio_low=0.2",
    "algorithm.policy_loss.clip_ratio_high=0.2",
)
LONG = sets("trainer.save_freq=10", "trainer.total_training_steps=30")
LONG_CONTROL = (*RANDOM, *sets("trainer.save_freq=10", "trainer.total_training_steps=20"))


@dataclass(frozen=True)
class Experiment:
    """Runs of a preset. `recipes`: what the command of each is given beside it."""

    title: str
    preset: str  # of parallel_configs
    world: str  # scripts/make_WORLD_world.py makes it
    seeds: tuple[int, ...]
    recipes: Mapping[str, tuple[str, ...]]


EXPERIMENTS = {
    "algorithms": Experiment("Tiny Qwen3-MoE from the same start", "tiny-moe", "tiny", (0, 1, 2), {
        "gspo": (),  # the preset's own recipe, with its band for answers of three tokens
        "grpo": ("--recipe", "grpo"),
        "dapo": ("--recipe", "dapo"),
        CONTROL: RANDOM,
    }),
    "critic": Experiment("Tiny Qwen3-MoE from the same start", "tiny-moe", "tiny", (0, 1, 2), {
        "ppo": ("--recipe", "ppo"),
        f"{CONTROL}_ppo": ("--recipe", "ppo", *RANDOM),
    }),
    "staleness": Experiment("Tiny Qwen3-MoE, GSPO on responses of older weights", "tiny-moe", "tiny", (0, 1), {
        f"S={staleness}{name}": (*OLDER, *schedule, *correction)
        for staleness, schedule in {
            0: (),
            2: sets("trainer.schedule=bounded", "trainer.max_staleness=2"),
            4: sets("trainer.schedule=bounded", "trainer.max_staleness=4"),
        }.items()
        for name, correction in {"": (), " corrected": CORRECTED}.items()
    }),
    "long_world": Experiment("Tiny Qwen3-MoE, GSPO on responses of 320 tokens", "long-moe", "long", (0,), {
        "gspo": LONG,
        CONTROL: (*LONG, *RANDOM),
    }),
    "long_control": Experiment("Random rewards for responses of 320 tokens", "long-moe", "long", (0, 1, 2), {
        CONTROL: LONG_CONTROL,
        f"{CONTROL}_quarter_rate": (*LONG_CONTROL, *sets("actor.optim.lr=2.5e-5")),
        f"{CONTROL}_vanilla": (*LONG_CONTROL, *VANILLA),
    }),
}  # fmt: skip


def train(experiment: Experiment, runs: Path, seeds: list[int], steps: int | None) -> None:
    """Makes the runs that are not there yet, and the world where there is none."""
    world = ROOT / f"{experiment.world}-world"
    if not (world / "model").exists():
        script = ROOT / "scripts" / f"make_{experiment.world}_world.py"
        subprocess.run([sys.executable, str(script), "--out", str(world), "--seed", "0"], check=True)
    for seed in seeds:
        for name, given in experiment.recipes.items():
            run = runs / f"{name}-{seed}"
            done = runs / f"{run.name}.done"
            if done.exists():
                continue
            own = sets(f"trainer.seed={seed}", "trainer.resume_mode=auto")
            if steps:
                own += sets(f"trainer.total_training_steps={steps}")
            preset = f"parallel_configs/{experiment.preset}/cpu.yaml"
            command = [sys.executable, "-m", "mrl.cli.main", "train", preset, "--run-dir", str(run.resolve())]
            subprocess.run([*command, *given, *own], cwd=ROOT, check=True)
            done.touch()


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


def summarise(name: str, runs: Path, out: Path) -> None:
    """Writes the figures of the runs, and prints them. Raises SystemExit where a goal was missed."""
    curves = read_all(runs)
    draw(curves, EXPERIMENTS[name].title, out / f"{name}.png")
    made = result(curves, f"python scripts/evidence/learning.py {name} RUNS")
    (out / f"{name}.json").write_text(json.dumps(made, indent=2) + "\n")
    print(json.dumps(made))
    check(curves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", help="in place of the experiment's own")
    parser.add_argument("--steps", type=int, help="in place of the experiment's own")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    if changed := changes():
        parser.error(f"commit these first, results name a commit:\n{changed}")
    experiment = EXPERIMENTS[args.name]
    train(experiment, args.runs, args.seeds or list(experiment.seeds), args.steps)
    summarise(args.name, args.runs, args.out)


if __name__ == "__main__":
    main()
