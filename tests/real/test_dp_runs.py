"""Whole runs whose engine has two data-parallel ranks and experts spread over them train what a run with an engine of
one rank trains.

Its answers have the same tokens, and the actor computes log-probs itself: so every number of training is the same, bit
for bit. Only what is read off the engine's own log-probs, which differ by some 1e-6, and what counts bytes and time may
differ.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from test_runs import finish, train
from world import make_world, metrics

TRAINED = ("actor/", "critic/", "response_length/", "prompt_length/", "training/global_step", "reward/")
SPREAD = dict(rollout__data_parallel_size=2, rollout__expert_parallel_size=2)
RUNS = {
    "one rank": dict(cluster__n_gpus_per_node=3),
    "separate": dict(cluster__n_gpus_per_node=4, **SPREAD),
    "colocated": dict(
        cluster__n_gpus_per_node=2, cluster__placement="colocated", actor__param_offload=True, actor__grad_offload=True,
        actor__optimizer_offload=True, **SPREAD,
    ),
}  # fmt: skip
pytestmark = [pytest.mark.real, pytest.mark.long]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Callable[[str], list[dict]]:
    """Rows of a run by its name, which is made when it is first asked for."""
    folder = tmp_path_factory.mktemp("dp-runs")
    world = make_world(folder / "world")
    return cache(lambda name: rows_of(world, folder / name.replace(" ", "-"), **RUNS[name]))


def rows_of(world: Path, run_dir: Path, **settings) -> list[dict]:
    process = train(
        world, run_dir, trainer__total_training_steps=3, trainer__val_before_train=False, trainer__test_freq=-1,
        cluster__cpus_per_actor=0.25, cluster__cpus_per_engine=0.5, **settings,
    )  # fmt: skip
    assert finish(process, run_dir) == 0, run_dir.with_suffix(".log").read_text()[-3000:]
    return metrics(run_dir)


def trained(row: dict) -> dict:
    return {name: value for name, value in row.items() if name.startswith(TRAINED)}


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_three_steps_train_what_they_train_with_one_rank(rows, placement):
    found, expected = rows(placement), rows("one rank")
    assert [row["training/global_step"] for row in found] == [1, 2, 3]
    for row, other in zip(found, expected, strict=True):
        assert trained(row) == trained(other)
        assert row["training/rollout_log_probs_abs_diff_max"] < 1e-4
        assert row["reshard/verified"] == 1 and row["reshard/resynced"] == 0
        assert row["reshard/weight_version"] == row["training/global_step"]


def test_experts_are_brought_to_their_owner_once_and_attention_to_every_rank(rows):
    separate, one = (rows(name)[0]["reshard/bytes_required"] for name in ("separate", "one rank"))
    assert one < separate < 2 * one
