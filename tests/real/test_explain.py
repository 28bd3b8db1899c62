"""`mrl explain` on healthy runs: they repeat bit by bit. What breaks runs is in test_planted.py."""

import json
from pathlib import Path

import pytest
from world import PRESET, make_world, mrl, overrides

from mrl.tools.explain.replay import StoredRun, replay

STEPS = 16
RESPONSES = 64  # of a step
TWO_REPLICAS = {
    "actor__layout__tensor_model_parallel_size": 1, "actor__layout__expert_model_parallel_size": 1,
    "actor__layout__sequence_parallel": False,
}  # fmt: skip
ROUTED = {"actor__router_replay": "R3", "record__routes": True}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"), prompts=160)


def trained(world: Path, run_dir: Path, **values) -> Path:
    """A run of sixteen steps with checkpoints."""
    settings = dict(
        trainer__total_training_steps=STEPS, trainer__save_freq=8, trainer__test_freq=-1,
        trainer__val_before_train=False, trainer__max_actor_ckpt_to_keep=3, rollout__n=RESPONSES // 8,
    )  # fmt: skip
    done = mrl("train", str(PRESET), "--run-dir", str(run_dir), *overrides(world, **settings | values))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return run_dir


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("values", [{}, TWO_REPLICAS, ROUTED], ids=["tp2", "dp2", "routes"])
def test_a_healthy_run_repeats_bit_by_bit_and_is_not_called_broken(world, tmp_path, values):
    run = trained(world, tmp_path / "run", **values)
    answer = json.loads(mrl("explain", str(run), "--replay", "--json").stdout)
    assert answer["repeats"] and answer["weights"] and answer["from"] == 8 and answer["compared"] > 200
    assert "no step leaves the run's own band" in mrl("explain", str(run)).stdout
    compared = [json.loads(line) for line in (run / "plan_compared.jsonl").read_text().splitlines()]
    assert [line["step"] for line in compared] == [2, 5]


@pytest.mark.real
@pytest.mark.long
def test_views_and_served_weights_of_a_run_whose_states_leave_the_device(world, tmp_path):
    offload = {f"actor__{kind}_offload": True for kind in ("param", "grad", "optimizer")}
    run = trained(world, tmp_path / "run", trainer__total_training_steps=2, trainer__save_freq=1, **offload)
    found = replay(StoredRun.read(run), 2, (), (), 400.0, views=True, served=tmp_path)
    assert found.repeats and found.served
    kinds = {view["kind"] for view in found.views if not view.get("failed")}
    assert kinds >= {"own", "rounded", "version"}
