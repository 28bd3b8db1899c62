"""A whole run that profiles one step of several epochs on both ranks, and goes on with the same bits after a resume."""

import gzip
import json
from pathlib import Path

import pytest
from world import PRESET, make_world, metrics, overrides, succeeded

pytestmark = [pytest.mark.real, pytest.mark.long]
REPEATED = ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "actor/entropy", "actor/kl_coef", "actor/reward_kl")


def test_a_profiled_step_of_several_epochs_repeats_after_a_resume(tmp_path):
    world = make_world(tmp_path / "world")
    settings = {"trainer__total_training_steps": 2, "trainer__save_freq": 1, "actor__ppo_epochs": 2}
    settings |= {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl": {"type": "adaptive", "horizon": 100}}
    settings["record__profile"] = {"steps": [2], "ranks": []}
    run = tmp_path / "run"
    succeeded("train", str(PRESET), "--run-dir", str(run), *overrides(world, **settings))
    rows = {row["training/global_step"]: row for row in metrics(run)}
    assert rows[2]["actor/updates"] == 4 and rows[1]["actor/kl_coef"] != rows[2]["actor/kl_coef"]
    files = sorted((run / "profiles").glob("*/*"))
    assert [str(file.relative_to(run)) for file in files] == [f"profiles/step-2/rank-{r}.json.gz" for r in (0, 1)]
    for file in files:
        names = [event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]
        assert {"score", "update", *(f"mini-batch {number}" for number in (1, 2, 3, 4)), "aten::mm"} <= set(names)
    assert str(files[0].relative_to(run)) in (run / "report.html").read_text()
    _goes_on_from(run, 1)
    succeeded("train", str(PRESET), "--run-dir", str(run), *overrides(world, **settings), "--resume")
    again = {row["training/global_step"]: row for row in metrics(run)}
    assert [again[2][name] for name in REPEATED] == [rows[2][name] for name in REPEATED]


def _goes_on_from(run: Path, step: int) -> None:
    """Takes the checkpoints after `step` away."""
    for folder in (run / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            folder.rename(run.parent / folder.name)
