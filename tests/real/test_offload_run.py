"""Whole runs whose actor leaves its devices while engines generate: metrics and weights as of one that stays,
and resumed too.
"""

from pathlib import Path

import pytest
from world import PRESET, make_world, metrics, overrides, succeeded, without_times

from mrl.checkpoint.manifest import read_manifest
from mrl.tools.compare_runs import checkpoint_difference

pytestmark = [pytest.mark.real, pytest.mark.long]

KL = {"algorithm__use_kl_loss": True, "algorithm__kl_loss_coef": 0.1}
MOVED = {
    "actor__param_offload": True,
    "actor__grad_offload": True,
    "actor__optimizer_offload": True,
    "ref__param_offload": True,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def test_a_run_that_is_offloaded_has_the_metrics_and_checkpoints_of_one_that_is_not(world, tmp_path):
    settings = KL | {"trainer__total_training_steps": 2, "trainer__save_freq": 1, "trainer__test_freq": 1}
    for name, moved in (("kept", {}), ("moved", MOVED)):
        succeeded("train", str(PRESET), "--run-dir", str(tmp_path / name), *overrides(world, **settings, **moved))
    kept, moved = (without_times(metrics(tmp_path / name)) for name in ("kept", "moved"))
    assert [row["training/global_step"] for row in kept] == [0, 1, 2]
    assert [without_bytes(row) for row in moved] == kept
    left = {"offload/parameters_bytes", "offload/gradients_bytes", "offload/optimizer_bytes"}
    assert {name for name, value in moved[-1].items() if name.startswith("offload/") and value > 0} == left
    for step in (1, 2):
        folders = [tmp_path / name / "checkpoints" / f"step-{step}" for name in ("kept", "moved")]
        assert read_manifest(folders[0]).files()
        assert checkpoint_difference(*folders) is None


def without_bytes(row: dict) -> dict:
    """Without what only a run writes whose actor leaves its devices."""
    return {name: value for name, value in row.items() if not name.startswith("offload/")}


def test_an_offloaded_run_resumes_bit_by_bit(world):
    assert "not one bit differs" in succeeded(
        "verify", str(PRESET), "--resume", "--steps", "1", *overrides(world, **KL, **MOVED)
    )
