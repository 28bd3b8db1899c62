"""Does it learn? Runs of several recipes and seeds from one start, with random rewards as the control: a table,
a figure, a verdict.

    python scripts/evidence/learning.py algorithms RUNS [--seeds 0 1 2] [--steps N] [--out FOLDER]

algorithms       GSPO, GRPO and DAPO on the tiny MoE
critic           PPO, which has a critic
staleness        GSPO on responses of older weights, without and with rollout correction
long_world       GSPO on responses of 320 tokens
long_control     random rewards for such responses; with a quarter of the learning rate; with the usual clip

Each run has a folder RUNS/NAME/RECIPE-SEED; a second call goes on where the first ended, and refuses runs that were
made with other settings. Writes NAME.json and NAME.png into docs/results; with seeds or steps of one's own into --out.
Exits with an error where the control moved by more than CONTROL_POINTS, or a recipe gained no more than the control.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
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


def train(name: str, runs: Path, seeds: Sequence[int], steps: int | None) -> None:
    """Makes the runs of an experiment that are not there yet, and the world where there is none.

    Raises SystemExit where a run was made or begun with other settings.
    """
    experiment = EXPERIMENTS[name]
    script, world = f"scripts/make_{experiment.world}_world.py", ROOT / f"{experiment.world}-world"
    subprocess.run([sys.executable, script, "--out", str(world), "--seed", "0"], cwd=ROOT, check=True)
    for seed in seeds:
        for recipe, given in experiment.recipes.items():
            run = folder(runs, name, recipe, seed)
            own = sets(f"trainer.seed={seed}", "trainer.resume_mode=auto")
            if steps:
                own += sets(f"trainer.total_training_steps={steps}")
            settings = [f"parallel_configs/{experiment.preset}/cpu.yaml", *given, *own]
            if not begin(run, settings):
                continue
            preset, *words = settings
            command = [sys.executable, "-m", "mrl.cli.main", "train", preset, "--run-dir", str(run.resolve()), *words]
            subprocess.run(command, cwd=ROOT, check=True)
            beside(run, "done").write_text(json.dumps(settings))


def folder(runs: Path, name: str, recipe: str, seed: int) -> Path:
    """The directory of a run."""
    return runs / name / f"{recipe}-{seed}"


def beside(run: Path, state: str) -> Path:
    """The file that says with which settings a run was begun or done."""
    return run.with_name(f"{run.name}.{state}")


def begin(run: Path, settings: list[str]) -> bool:
    """Whether the run is still to be made. Raises SystemExit where what is there has other settings."""
    begun, done = beside(run, "begun"), beside(run, "done")
    for state in (begun, done):
        if state.exists() and (held := state.read_text()) != json.dumps(settings):
            raise SystemExit(f"{run} was made with other settings: {held or 'unknown'}; give another folder of runs")
    if run.exists() and not begun.exists():
        raise SystemExit(f"{run} was made with unknown settings; give another folder of runs")
    run.parent.mkdir(parents=True, exist_ok=True)
    begun.write_text(json.dumps(settings))
    return not done.exists()


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
    """Raises SystemExit where there is no such run, or it was never validated twice."""
    if not (run_dir / METRICS).is_file():
        raise SystemExit(f"there is no run in {run_dir}")
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


def read_all(name: str, runs: Path, seeds: Sequence[int]) -> dict[str, list[Curve]]:
    """Curves of each recipe of an experiment, one a seed. Raises SystemExit where a run is missing."""
    return {recipe: [read(folder(runs, name, recipe, seed)) for seed in seeds] for recipe in EXPERIMENTS[name].recipes}


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


def command_of(name: str, seeds: Sequence[int] | None, steps: int | None) -> str:
    """What made the runs, as it was called."""
    words = ["python scripts/evidence/learning.py", name, "RUNS"]
    words += ["--seeds", *map(str, seeds)] if seeds else []
    words += ["--steps", str(steps)] if steps else []
    return " ".join([*words, "--out OUT"] if seeds or steps else words)


def summarise(
    name: str, runs: Path, out: Path, own_seeds: Sequence[int] | None = None, steps: int | None = None
) -> None:
    """Writes the figures of the runs, and prints them. Raises SystemExit where a goal was missed."""
    curves = read_all(name, runs, own_seeds or EXPERIMENTS[name].seeds)
    draw(curves, EXPERIMENTS[name].title, out / f"{name}.png")
    made = result(curves, command_of(name, own_seeds, steps))
    (out / f"{name}.json").write_text(json.dumps(made, indent=2) + "\n")
    print(json.dumps(made))
    check(curves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", help="in place of the experiment's own")
    parser.add_argument("--steps", type=int, help="in place of the experiment's own")
    parser.add_argument("--out", type=Path, help="docs/results where neither seeds nor steps are given")
    args = parser.parse_args()
    if (args.seeds or args.steps) and args.out is None:
        parser.error("--out must be given with --seeds or --steps: docs/results is of the experiment's own")
    if changed := changes():
        parser.error(f"commit these first, results name a commit:\n{changed}")
    train(args.name, args.runs, args.seeds or EXPERIMENTS[args.name].seeds, args.steps)
    summarise(args.name, args.runs, args.out or ROOT / "docs" / "results", args.seeds, args.steps)


if __name__ == "__main__":
    main()
