"""Held-out score against steps of a teacher that rewards have trained, and of students that it teaches from the same
start, one by the sampled words and one by the teacher's likeliest: a figure, a verdict.
scripts/evidence/distillation.sh is what made the runs.

python scripts/evidence/distillation.py runs/distillation
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from mrl.record.run_dir import METRICS, read_metrics

sys.path.append(str(Path(__file__).resolve().parent))
from learning_curves import Curve, draw, read
from stamp import facts

TEACHER = "gspo"
CLAIMED = "reverse_kl_topk"
STUDENTS = ("k1", CLAIMED)  # by loss_mode
NEAR_POINTS = 3.0  # of held-out score that the student may stay below its teacher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    curves = {name: [read(folder) for folder in _runs(options.runs, name)] for name in (TEACHER, *STUDENTS)}
    draw(curves, "Tiny Qwen3-MoE from the same start", options.out / "distillation.png")
    made = facts("scripts/evidence/distillation.sh") | {
        "near_points": NEAR_POINTS,
        "seeds": [run.seed for run in curves[TEACHER]],
        "curves": {name: [_curve(run) for run in runs] for name, runs in curves.items()},
        "reverse_kl": {name: [_ends(folder) for folder in _runs(options.runs, name)] for name in STUDENTS},
        "pairs": {
            name: [_pair(*pair) for pair in zip(curves[TEACHER], curves[name], strict=True)] for name in STUDENTS
        },
    }
    (options.out / "distillation.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(made["pairs"]))
    late = [pair["seed"] for pair in made["pairs"][CLAIMED] if not pair["is_first"]]
    if late:
        raise SystemExit(
            f"a goal was missed: the student of {CLAIMED} was no earlier near its teacher with seed {late}"
        )


def _runs(folder: Path, name: str) -> list[Path]:
    """Runs called NAME-SEED; raises SystemExit where there is none."""
    found = sorted(path for path in folder.glob(f"{name}-*") if (path / METRICS).is_file())
    if not found:
        raise SystemExit(f"{folder} holds no runs named {name}-SEED")
    return found


def _curve(run: Curve) -> dict:
    return {
        "steps": [step for step, _ in run.points],
        "scores": [round(score, 4) for _, score in run.points],
        "seconds": round(run.seconds, 1),
    }


def _ends(folder: Path) -> list[float]:
    """KL from the student to its teacher in the first step and in the last, nats a token."""
    values = [row["distillation/reverse_kl"] for row in read_metrics(folder / METRICS) if row["training/global_step"]]
    return [float(np.round(values[0], 4)), float(np.round(values[-1], 4))]


def _pair(teacher: Curve, student: Curve) -> dict:
    """How good both become, and the first validation at which each is within NEAR_POINTS of the teacher's end."""
    end = teacher.points[-1][1]
    gspo, near = _first_near(teacher, end), _first_near(student, end)
    return {
        "seed": teacher.seed,
        "teacher": round(end, 4),
        "student": round(student.points[-1][1], 4),
        "gspo_near": gspo,
        "near": near,
        "is_first": near is not None and near < gspo,
    }


def _first_near(run: Curve, end: float) -> int | None:
    return next((step for step, score in run.points if 100 * (end - score) <= NEAR_POINTS), None)


if __name__ == "__main__":
    main()
