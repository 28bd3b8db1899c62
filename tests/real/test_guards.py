"""NaN or inf on one rank of two: both skip the update together, count it, and after three in a row give up together.
A gradient that is huge is clipped, and responses that teach nothing are passed by.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from padded import read_batch
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
def told(tmp_path_factory) -> Path:
    """Where both ranks wrote what their updates did."""
    out = tmp_path_factory.mktemp("guards")
    model = tiny_moe()
    save(model, out / "moe")
    np.savez(out / "batch.npz", **_batch(model.config.vocab_size).arrays)
    config = CONFIG | {"model": {"path": str(out / "moe"), "dtype": "float32"}}
    run_ranks(Path(__file__).with_name("guard_worker.py"), 2, out, [json.dumps(config), str(out / "batch.npz")])
    return out


@pytest.fixture(scope="module")
def steps(told) -> list[list[dict]]:
    """Of each rank, what each update did."""
    return [json.loads((told / f"steps-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def other(told) -> dict[str, dict]:
    """By update: numerators and denominators of metrics over both ranks, and the norm of the gradient taken."""
    ranks = [json.loads((told / f"other-{rank}.json").read_text()) for rank in range(2)]
    found = {}
    for name in ranks[0]:
        parts = [part for rank in ranks for part in rank[name]["parts"]]
        names = {key for part in parts for key in part}
        summed = {key: np.sum([part[key] for part in parts if key in part], axis=0).tolist() for key in names}
        found[name] = summed | {"taken": math.sqrt(sum(rank[name]["squares"] for rank in ranks))}
    return found


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


def test_a_gradient_of_ten_thousand_times_the_usual_moves_no_more_than_the_clip_lets_it(other):
    """By Adam's first moments, which take the gradient as it is after clipping."""
    usual = other["usual"]["actor/grad_norm"][0]
    spike = other["spike"]["actor/grad_norm"][0]
    assert spike > 1e3 * usual > 0 and spike > 1.0
    assert other["spike"]["taken"] == pytest.approx(1.0, rel=1e-3), "actor.optim.clip_grad"
    assert other["usual"]["taken"] == pytest.approx(min(usual, 1.0), rel=1e-3)
    assert other["spike"]["actor/skipped_updates"][0] == 0


def test_responses_of_no_token_of_one_and_of_one_mind_are_counted_in_an_update(other, told):
    batch = read_batch(str(told / "batch.npz"))
    short = other["short"]
    assert all(math.isfinite(number) for values in short.values() for number in np.ravel(values))
    tokens = int(batch.response_lengths[2:].sum()) + 1
    assert short["actor/pg_clipfrac"][1] == tokens, "every token that is there, and no other"
    assert short["actor/skipped_updates"][0] == 0 and short["taken"] > 0
    same = other["of one mind"]
    assert same["actor/grad_norm"][0] == 0 and same["taken"] == pytest.approx(0, abs=1e-6)
    assert same["actor/skipped_updates"][0] == 0


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
