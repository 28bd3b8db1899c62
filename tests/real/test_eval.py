"""`mrl eval` on real engines: the same weights, seeds and rewards give the very numbers that the run's own validation
gave.
"""

import json
from pathlib import Path

import pytest
from world import PRESET, make_world, metrics, mrl, overrides

SETTINGS = {"reward__function": "exact_match", "rollout__val_kwargs__n": 2}


def held_out(row: dict) -> dict:
    return {name: value for name, value in row.items() if name.startswith("val-")}


@pytest.mark.real
@pytest.mark.long
def test_an_evaluation_repeats_the_runs_own_validation(tmp_path):
    world, run_dir = make_world(tmp_path / "world"), tmp_path / "run"
    given = overrides(world, **SETTINGS)
    steps = overrides(world, **SETTINGS, trainer__total_training_steps=2, trainer__test_freq=2, trainer__save_freq=2)
    trained = mrl("train", str(PRESET), "--run-dir", str(run_dir), *steps)
    assert trained.returncode == 0, trained.stderr[-3000:]
    rows = metrics(run_dir)
    for name, before in (("model", held_out(rows[0])), ("checkpoint", held_out(rows[-1]))):
        which = ["--model", str(world / "model")] if name == "model" else ["--checkpoint", str(run_dir)]
        done = mrl("eval", str(PRESET), *given, *which, "-o", str(tmp_path / name), "--json")
        assert done.returncode == 0, done.stderr[-3000:]
        results = json.loads(done.stdout)
        assert before and results["metrics"] == before
        kept = [json.loads(line) for line in (tmp_path / name / "generations.jsonl").read_text().splitlines()]
        seen = [json.loads(line) for line in validation_file(run_dir, name).read_text().splitlines()]
        assert [row["output"] for row in kept] == [row["output"] for row in seen]
        assert not (tmp_path / name / "evaluation.tmp").exists()
    again = mrl("eval", str(PRESET), *given, "--model", str(world / "model"), "-o", str(tmp_path / "model"))
    assert again.returncode == 2 and "holds results already" in again.stderr


def validation_file(run_dir: Path, name: str) -> Path:
    return run_dir / "validation" / f"step-{0 if name == 'model' else 2}.jsonl"
