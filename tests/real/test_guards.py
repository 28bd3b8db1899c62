"""NaN or inf on one rank of two: both skip the update together, count it, and after three in a row give up together."""

import json
from pathlib import Path

import numpy as np
import pytest
from ranks import run_ranks
from test_checkpoint import _batch
from test_runs import finish, train
from tiny_models import save, tiny_moe
from world import ROOT, make_world, metrics

from mrl.checkpoint.manifest import check_digests
from mrl.checkpoint.step_folders import newest_checkpoint

pytestmark = pytest.mark.real

CONFIG = {
    "actor": {"layout": {"world_size": 2}, "optim": {"lr": 1e-3, "lr_warmup_steps": 0}, "ppo_mini_batch_size": 6},
    "rollout": {"n": 1},
    "data": {"train_batch_size": 6},
    "trainer": {"max_skipped_updates": 3},
    "cluster": {"device": "cpu", "step_timeout_s": 300},
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> list[list[dict]]:
    """Of each rank, what each update did."""
    out = tmp_path_factory.mktemp("guards")
    model = tiny_moe()
    save(model, out / "moe")
    np.savez(out / "batch.npz", **_batch(model.config.vocab_size).arrays)
    config = CONFIG | {"model": {"path": str(out / "moe"), "dtype": "float32"}}
    run_ranks(Path(__file__).with_name("guard_worker.py"), 2, out, [json.dumps(config), str(out / "batch.npz")])
    return [json.loads((out / f"steps-{rank}.json").read_text()) for rank in range(2)]


def test_both_ranks_skip_together_and_keep_every_bit(steps):
    for good, loss, gradient, again, *_ in steps:
        assert loss["bits"] == gradient["bits"] == good["bits"]
        assert [good["row"], loss["row"], gradient["row"], again["row"]] == [0, 1, 2, 0]
        assert again["bits"] != good["bits"]
    assert [step["row"] for step in steps[0]] == [step["row"] for step in steps[1]]


def test_each_skipped_update_is_counted_once_over_all_ranks(steps):
    counted = [sum(rank[number]["skipped"] for rank in steps) for number in range(6)]
    assert counted == [0, 1, 1, 0, 1, 1]


def test_the_third_in_a_row_stops_every_rank_with_the_weights_of_the_last_good_update(steps):
    for rank in steps:
        *_, again, first, second, third = rank
        assert first["error"] is None and second["error"] is None
        assert "3 updates in a row could not be applied (trainer.max_skipped_updates)" in third["error"]
        assert "those of the 2 updates before" in third["error"]
        assert third["bits"] == again["bits"]


@pytest.mark.long
def test_a_run_whose_every_gradient_is_nan_passes_over_two_updates_and_ends_with_code_6_at_the_third(tmp_path):
    """Two updates a step: the first step is finished and saved with the weights it began with,
    the second one is not.
    """
    world, run_dir = make_world(tmp_path / "world"), tmp_path / "run"
    settings = dict(
        trainer__total_training_steps=4, trainer__save_freq=1, trainer__test_freq=-1, trainer__val_before_train=False,
        algorithm__policy_loss__custom={"path": str(ROOT / "tests" / "real" / "nan_loss.py"), "parameters": {}},
        algorithm__policy_loss__loss_mode="not_a_number",
    )  # fmt: skip
    code = finish(train(world, run_dir, "--recipe", "grpo", **settings), run_dir)
    said = run_dir.with_suffix(".log").read_text()
    assert code == 6, said[-3000:]
    assert "3 updates in a row could not be applied" in said and "Traceback" not in said
    (row,) = metrics(run_dir)
    assert row["actor/skipped_updates"] == 2 and row["actor/updates"] == 0
    point = newest_checkpoint(run_dir / "checkpoints")
    check_digests(point.path, point.manifest)
    assert point.manifest.step == 1 and point.manifest.optimizer["num_updates"] == 0
