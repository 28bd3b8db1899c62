"""kill -9 of real ranks, inside a save and outside: what is found goes on bit by bit, and to 1e-5 at another layout.

tests/proofs/test_kills.py kills the whole loop.
"""

import importlib.util
import shutil
import sys

import pytest
from test_runs import finish, train
from world import ROOT, make_world, metrics

from mrl.record.attempts import read_attempts
from mrl.tools.compare_runs import checkpoint_difference, metrics_difference


@pytest.fixture(scope="module")
def harness():
    spec = importlib.util.spec_from_file_location("resume_proof", ROOT / "tests" / "proofs" / "resume.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.real
@pytest.mark.long
def test_killed_twice_and_resumed_is_as_if_never_killed(harness, tmp_path):
    world = make_world(tmp_path / "world")
    found = harness.ranks_only(world / "model", tmp_path / "work", kills=2, seed=1)
    assert found.differences == []
    outside, inside = found.kills
    assert outside.resumed_from >= 2, "the first kill waits for a checkpoint"
    assert inside.resumed_from >= outside.resumed_from
    assert outside.same_bits and inside.same_bits
    assert outside.moved_error <= 1e-5 and inside.moved_error <= 1e-5


@pytest.mark.real
@pytest.mark.long
def test_a_checkpoint_that_ranks_find_damaged_is_kept_aside_and_the_one_before_gone_on_from(tmp_path):
    """Trained again, the lost steps are bit by bit what they were."""
    world, run_dir = make_world(tmp_path / "world"), tmp_path / "run"
    settings = dict(trainer__save_freq=1, trainer__test_freq=-1, trainer__val_before_train=False)
    assert finish(train(world, run_dir, **settings, trainer__total_training_steps=2), run_dir) == 0
    before, newest = metrics(run_dir), run_dir / "checkpoints" / "step-2"
    kept = tmp_path / "kept"
    shutil.copytree(newest, kept)
    file = newest / "rank-00001.safetensors"
    file.write_bytes(bytes(16) + file.read_bytes()[16:])  # its header: who reads before all is compared, stumbles

    assert finish(train(world, run_dir, "--resume", **settings, trainer__total_training_steps=3), run_dir) == 0
    said = run_dir.with_suffix(".log").read_text()
    assert "not resumed from step-2, which is kept as damaged-step-2" in said and "SHA-256 differs" in said
    assert "Traceback" not in said and (run_dir / "checkpoints" / "damaged-step-2").is_dir()
    assert checkpoint_difference(kept, newest) is None
    after = metrics(run_dir)
    assert [row["training/global_step"] for row in after] == [1, 2, 3]
    assert metrics_difference(before, after[:2]) is None
    assert [attempt.step for attempt in read_attempts(run_dir)] == [0, 2, 1]


@pytest.mark.long
def test_the_harness_sees_a_start_that_went_another_way(harness):
    expected = [[[1, "a"], [2, "b"], [3, "c"]]]
    assert harness.unlike([[[2, "b"], [3, "c"]]], expected, 1) == []
    assert harness.unlike([[[2, "b"], [3, "d"]]], expected, 1) == ["rank 0, update 3: other bits"]
    assert harness.unlike([[[3, "c"]]], expected, 1) != [] and harness.unlike([[]], expected, 0) != []
