"""Whole runs whose engines hold FP8: every sync is proven, the gap is there, measured and corrected, and a resumed run
has the bits of one that went on.
"""

from pathlib import Path

import pytest
from world import PRESET, make_world, metrics, overrides, succeeded

from mrl.tools.compare_runs import checkpoint_difference

pytestmark = [pytest.mark.real, pytest.mark.long]

WORDS = {"model__dtype": "bfloat16", "rollout__quantization": "fp8", "rollout__quantization_block": 32}
TWO_STEPS = {"trainer__total_training_steps": 2, "trainer__save_freq": 1, "trainer__test_freq": -1}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def trained(world: Path, run_dir: Path, preset: Path = PRESET, **settings) -> list[dict]:
    succeeded("train", str(preset), "--run-dir", str(run_dir), *overrides(world, **(WORDS | TWO_STEPS | settings)))
    return [row for row in metrics(run_dir) if row["training/global_step"]]


@pytest.fixture(scope="module")
def run(world, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    trained(world, folder)
    return folder


def test_engines_hold_the_words_of_every_step_and_the_gap_to_them_is_measured_and_corrected(run, world, tmp_path):
    plain = trained(world, tmp_path / "plain", rollout__quantization=None, rollout__quantization_block=128)
    rows = [row for row in metrics(run) if row["training/global_step"]]
    for row, other in zip(rows, plain, strict=True):
        assert row["reshard/verified"] == 1 and row["reshard/resynced"] == 0
        assert row["reshard/bytes_moved"] == row["reshard/bytes_required"] < 0.8 * other["reshard/bytes_required"]
        gap, usual = (each["training/rollout_log_probs_abs_diff_mean"] for each in (row, other))
        assert gap > 2 * usual and gap < 0.5
    assert "rollout_corr/weight_mean" in rows[0] and "rollout_corr/weight_mean" not in plain[0]


def test_engines_that_share_devices_with_ranks_get_words_after_each_sleep(world, tmp_path):
    rows = trained(world, tmp_path / "colocated", PRESET.with_name("cpu-colocated.yaml"))
    assert [row["reshard/verified"] for row in rows] == [1, 1] and [row["reshard/resynced"] for row in rows] == [0, 0]
    assert all(0 < row["training/rollout_log_probs_abs_diff_mean"] < 0.5 for row in rows)


def test_vllms_own_loader_and_a_resumed_run_bring_the_same_weights(run, world, tmp_path):
    again = tmp_path / "slow"
    trained(world, again, reshard__path="slow")
    assert checkpoint_difference(*(folder / "checkpoints" / "step-2" for folder in (run, again))) is None
    said = succeeded("verify", str(PRESET), "--resume", "--steps", "1", *overrides(world, **WORDS))
    assert "not one bit differs" in said


def test_ranks_that_cut_blocks_train_where_whole_tensors_are_sent(world, tmp_path):
    """Each of two tensor ranks has one key head, and a block is of two."""
    rows = trained(world, tmp_path / "cut", reshard__path="slow", rollout__quantization_block=64)
    assert len(rows) == 2 and all(0 < row["training/rollout_log_probs_abs_diff_mean"] < 0.5 for row in rows)
