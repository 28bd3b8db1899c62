"""Whole runs with adapters: they train, sync, save and resume bit by bit; the reference is the model without them,
their export is a full model, and a run goes on from their PEFT folder at another layout.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from world import PRESET, make_world, metrics, overrides, succeeded, without_times

from mrl.checkpoint.manifest import read_manifest
from mrl.model.adapters import TARGETS
from mrl.tools.compare_runs import checkpoint_difference

pytestmark = [pytest.mark.real, pytest.mark.long]

LORA = {
    "actor__lora__rank": 4,
    "actor__lora__alpha": 8,
    "actor__optim__lr": 1e-2,
    "algorithm__use_kl_loss": True,
    "algorithm__kl_loss_coef": 0.1,
}
TWO_STEPS = {"trainer__total_training_steps": 2, "trainer__save_freq": 1, "trainer__test_freq": -1}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def run(world, tmp_path_factory) -> Path:
    """A run of two steps that was not disturbed."""
    return trained(world, tmp_path_factory.mktemp("run") / "run")


def trained(world: Path, run_dir: Path, preset: Path = PRESET, *flags: str, **settings) -> Path:
    given = overrides(world, **(LORA | TWO_STEPS | settings))
    succeeded("train", str(preset), "--run-dir", str(run_dir), *flags, *given)
    return run_dir


def steps(run_dir: Path) -> list[dict]:
    return [row for row in metrics(run_dir) if row["training/global_step"]]


def test_steps_train_adapters_alone_and_engines_have_what_they_make(run, world):
    rows = steps(run)
    assert [row["reshard/verified"] for row in rows] == [1, 1] and [row["reshard/resynced"] for row in rows] == [0, 0]
    assert all(row["actor/grad_norm"] > 0 and row["rollout_corr/k3_kl"] < 1e-6 for row in rows)
    assert all(row["actor/kl_loss"] > 0 for row in rows)
    manifest = read_manifest(run / "checkpoints" / "step-2")
    names = {piece.hf_name for entry in manifest.read_entries(run / "checkpoints" / "step-2") for piece in entry.pieces}
    assert manifest.adapters["rank"] == 4 and names and all(".lora_" in name for name in names)
    size = sum(facts["bytes"] for facts in manifest.files().values())
    assert size < (world / "model" / "model.safetensors").stat().st_size


def test_the_reference_of_adapters_is_the_model_that_a_second_copy_would_be(run, world, tmp_path):
    copied = tmp_path / "copied"
    shutil.copytree(world / "model", copied)
    other = trained(world, tmp_path / "other", ref__path=copied)
    assert without_times(metrics(other)) == without_times(metrics(run))
    assert checkpoint_difference(*(folder / "checkpoints" / "step-2" for folder in (run, other))) is None


def test_a_run_whose_ranks_leave_their_devices_to_engines_has_the_same_adapters(run, world, tmp_path):
    colocated = trained(world, tmp_path / "colocated", PRESET.with_name("cpu-colocated.yaml"))
    left = {name for name, value in steps(colocated)[-1].items() if name.startswith("offload/") and value > 0}
    assert left == {"offload/parameters_bytes", "offload/gradients_bytes", "offload/optimizer_bytes"}
    assert checkpoint_difference(*(folder / "checkpoints" / "step-2" for folder in (run, colocated))) is None


def test_the_slow_path_brings_engines_the_same_words(run, world, tmp_path):
    slow = trained(world, tmp_path / "slow", reshard__path="slow")
    assert [row["response_length/mean"] for row in steps(slow)] == [row["response_length/mean"] for row in steps(run)]
    assert checkpoint_difference(*(folder / "checkpoints" / "step-2" for folder in (run, slow))) is None


def test_a_run_with_dropout_resumes_bit_by_bit(world):
    given = overrides(world, **LORA, actor__lora__dropout=0.25)
    assert "not one bit differs" in succeeded("verify", str(PRESET), "--resume", "--steps", "1", *given)


def test_a_run_with_adapters_resumes_bit_by_bit(world):
    said = succeeded("verify", str(PRESET), "--resume", "--steps", "1", *overrides(world, **LORA))
    assert "not one bit differs" in said


def test_a_run_in_bfloat16_goes_on_from_a_folder_of_pefts_at_another_layout(run, world, tmp_path):
    succeeded("convert", "lora-to-hf", str(run), "-o", str(tmp_path / "adapter"))
    succeeded("convert", "lora-to-hf", str(run), "-o", str(tmp_path / "merged"), "--merged", "--verify")
    succeeded("convert", "megatron-to-hf", str(run), "-o", str(tmp_path / "full"))
    merged, full = (load_file(tmp_path / name / "model-00001.safetensors") for name in ("merged", "full"))
    base = load_file(world / "model" / "model.safetensors")
    assert merged.keys() == full.keys() == base.keys() and all(torch.equal(merged[n], full[n]) for n in full)
    moved = {name for name in base if not torch.equal(base[name], merged[name])}
    assert moved == {name for name in base if name.split(".")[-2] in TARGETS}
    layout = {"actor__layout__expert_model_parallel_size": 1, "model__dtype": "bfloat16"}
    begun = {"actor__lora__path": tmp_path / "adapter", **layout}
    again = trained(world, tmp_path / "again", **begun)
    rows = steps(again)
    assert rows[0]["actor/kl_loss"] > 1e-6  # the reference is the model under the adapter
    assert [row["reshard/verified"] for row in rows] == [1, 1]
    assert all(row["rollout_corr/k3_kl"] < 0.01 for row in rows)  # engines too begin with the adapter
    shutil.rmtree(tmp_path / "adapter")
    trained(world, again, PRESET, "--resume", **begun, trainer__total_training_steps=3)
    assert len(steps(again)) == 3
    start = read_manifest(again / "checkpoints" / "step-3").adapters["start"]
    assert start["path"] == str(tmp_path / "adapter") and len(start["digest"]) == 64
    # the model is float32, what is trained on it bfloat16
    succeeded("convert", "megatron-to-hf", str(again), "-o", str(tmp_path / "narrow"), "--verify")
    narrow = load_file(tmp_path / "narrow" / "model-00001.safetensors")
    assert narrow.keys() == base.keys() and all(tensor.dtype is torch.bfloat16 for tensor in narrow.values())
    assert all(torch.equal(narrow[name], base[name].bfloat16()) == (name not in moved) for name in base)
