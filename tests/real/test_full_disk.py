"""A whole run whose checkpoint folder is a disk too small for a second checkpoint."""

import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_runs import finish, train
from world import make_world, metrics

from mrl.checkpoint.manifest import check_digests, read_manifest
from mrl.checkpoint.step_folders import newest_checkpoint


@pytest.fixture
def small_disk(tmp_path):
    """20 MB at run/checkpoints: the world's checkpoints have 12, and 4 MiB more are asked for."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20000000", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system can be mounted only by root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.real
@pytest.mark.long
def test_training_goes_on_and_the_old_checkpoint_stays_and_the_end_says_so(small_disk: Path, tmp_path):
    world, run_dir = make_world(tmp_path / "world"), tmp_path / "run"
    settings = dict(
        trainer__total_training_steps=3, trainer__save_freq=1, trainer__max_actor_ckpt_to_keep=1, trainer__test_freq=-1,
        trainer__val_before_train=False,
    )  # fmt: skip
    code = finish(train(world, run_dir, **settings), run_dir)
    said = run_dir.with_suffix(".log").read_text()
    assert code == 4, said[-3000:]
    assert "error: step 2 is not saved" in said and "Training goes on" in said
    assert "step 3 is not saved" in said and "the newest checkpoint is that of step 1" in said
    assert [row["training/failed_saves"] for row in metrics(run_dir)] == [0.0, 1.0, 2.0]
    assert [path.name for path in small_disk.iterdir()] == ["step-1"]
    newest = newest_checkpoint(small_disk)
    assert newest.path is not None and newest.damaged == {}
    check_digests(newest.path, read_manifest(newest.path))
    assert load_file(newest.path / "rank-00000.safetensors")
