"""Whole runs with a teacher of another family, size and layout: its KL falls, it leaves its device where it is told to,
and a run that is stopped goes on bit by bit.
"""

from pathlib import Path

import pytest
from tiny_models import tiny_glm
from world import PRESET, make_world, metrics, overrides, put_model, succeeded, without_times

from mrl.tools.compare_runs import checkpoint_difference

pytestmark = [pytest.mark.real, pytest.mark.long]

TEACHER = "distillation__teacher_model__"
LOSS = "distillation__distillation_loss__"
THREE_STEPS = {"trainer__total_training_steps": 3, "trainer__save_freq": 1, "trainer__test_freq": -1,
    "trainer__val_before_train": False}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return put_model(make_world(tmp_path_factory.mktemp("teacher")), tiny_glm) / "model"


def settings(world: Path, teacher: Path, **more) -> list[str]:
    given = {
        f"{TEACHER}model_path": teacher,
        f"{TEACHER}layout": {
            "tensor_model_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "pipeline_model_parallel_size": 2,
        },
        "actor__optim__lr": 1e-3,
        "actor__optim__lr_warmup_steps": 0,
    }
    return ["--recipe", "distillation", *overrides(world, **(given | THREE_STEPS | more))]


def test_the_policy_comes_nearer_to_its_teacher_and_a_stopped_run_goes_on_bit_by_bit(world, teacher, tmp_path):
    whole = tmp_path / "whole"
    given = settings(world, teacher)
    succeeded("train", str(PRESET), "--run-dir", str(whole), *given)
    rows = [row for row in metrics(whole) if row["training/global_step"]]
    kl = [row["distillation/reverse_kl"] for row in rows]
    assert kl[0] > kl[-1] > 0 and all(row["timing_s/teacher"] > 0 for row in rows)
    assert all(row["distillation/loss"] == row["distillation/reverse_kl"] for row in rows)
    assert all(row["critic/advantages/mean"] == pytest.approx(-row["distillation/loss"]) for row in rows)
    stopped = tmp_path / "stopped"
    succeeded("train", str(PRESET), "--run-dir", str(stopped), *given, "--set", "trainer.total_training_steps=2")
    succeeded("train", str(PRESET), "--run-dir", str(stopped), *given, "--resume")
    assert without_times(metrics(stopped))[-1] == without_times(metrics(whole))[-1]
    assert checkpoint_difference(*(folder / "checkpoints" / "step-3" for folder in (whole, stopped))) is None


def test_a_teacher_that_shares_devices_and_leaves_them_makes_the_same_weights(world, teacher, tmp_path):
    runs = []
    for preset, offloaded in (("cpu.yaml", False), ("cpu-colocated.yaml", True)):
        run_dir = tmp_path / preset
        more = {f"{TEACHER}param_offload": offloaded, f"{LOSS}use_task_rewards": True,
            "trainer__total_training_steps": 2}  # fmt: skip
        succeeded("train", str(PRESET.with_name(preset)), "--run-dir", str(run_dir), *settings(world, teacher, **more))
        runs.append(run_dir / "checkpoints" / "step-2")
    assert checkpoint_difference(*runs) is None


@pytest.mark.parametrize(("anchor", "schedule"), [("on_policy", "sync"), ("recompute", "one_step_off")])
def test_a_loss_over_words_goes_with_generation_ahead_a_reference_and_one_update_a_step(
    world, teacher, tmp_path, anchor, schedule
):
    run_dir = tmp_path / "run"
    more = {
        f"{LOSS}loss_mode": "reverse_kl_topk",
        f"{LOSS}use_policy_gradient": False,
        f"{LOSS}topk": 8,
        f"{TEACHER}param_offload": True,
        "algorithm__use_kl_loss": True,
        "algorithm__kl_loss_coef": 0.01,
        "algorithm__anchor": anchor,
        "actor__ppo_mini_batch_size": 8,
        "trainer__schedule": schedule,
    }
    succeeded("train", str(PRESET), "--run-dir", str(run_dir), *settings(world, teacher, **more))
    rows = [row for row in metrics(run_dir) if row["training/global_step"]]
    losses = [row["distillation/loss"] for row in rows]
    assert losses[0] > losses[-1] > 0
    assert all(0 < row["distillation/teacher_mass"] <= 1 and row["actor/kl_loss"] >= 0 for row in rows)
    assert all(
        row["critic/advantages/max"] == row["critic/advantages/min"] == 0 for row in rows
    )  # rewards are recorded
    told = {"distillation/reverse_kl" in row for row in rows}
    assert told == {anchor == "recompute"}  # on policy, the policy's log-probs come with the update
