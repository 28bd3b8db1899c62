"""Whole runs whose actor leaves its devices while engines generate: metrics and weights as of one that stays, and resumed too."""

import subprocess
from pathlib import Path

import pytest
from world import ROOT, make_world, metrics, overrides, without_times

from mrl.checkpoint.manifest import read_manifest
from mrl.train.compare_runs import checkpoint_difference

pytestmark = [pytest.mark.real, pytest.mark.long]

PRESET = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
KL = {"algorithm__use_kl_loss": True, "algorithm__kl_loss_coef": 0.1}
MOVED = {"actor__param_offload": True, "actor__grad_offload": True, "actor__optimizer_offload": True, "ref__param_offload": True}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.timeout(600)
def test_a_run_that_is_offloaded_has_the_metrics_and_checkpoints_of_one_that_is_not(world, tmp_path):
    settings = KL | {"trainer__total_training_steps": 2, "trainer__save_freq": 1, "trainer__test_freq": 1}
    for name, moved in (("kept", {}), ("moved", MOVED)):
        run("train", "--run-dir", str(tmp_path / name), *overrides(world, **settings, **moved))
    kept, moved = (without_times(metrics(tmp_path / name)) for name in ("kept", "moved"))
    assert [row["training/global_step"] for row in kept] == [0, 1, 2]
    assert moved == kept
    for step in (1, 2):
        folders = [tmp_path / name / "checkpoints" / f"step-{step}" for name in ("kept", "moved")]
        assert read_manifest(folders[0]).files()
        assert checkpoint_difference(*folders) is None


@pytest.mark.timeout(900)
def test_an_offloaded_run_resumes_bit_by_bit(world):
    assert "not one bit differs" in run("verify", "--resume", "--steps", "1", *overrides(world, **KL, **MOVED))


def run(command: str, *arguments: str) -> str:
    """Output of a command on the tiny preset."""
    done = subprocess.run(["mrl", command, str(PRESET), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout
