"""Runs that are killed, stopped and disturbed, against those that nobody touched; each legal pair of features."""

from pathlib import Path

import pytest
from combination_world import make_world as make_worlds
from combinations import all_rows, one
from faults import DEADLINE_S, RANKS_DEADLINE_S, ROWS, Faults
from own_memory import is_possible
from random_kills import killed_and_whole
from soak import soaked
from world import make_world

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(6 * 3600)]
PIECES = 16  # of the array of combinations
OTHER_END_S = 2.0  # that a fault is noticed in; of one that is stopped behind its deadline 5
HALF = 0.5


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world") / "world")


@pytest.fixture(scope="module")
def faults(world, tmp_path_factory) -> Faults:
    """Undisturbed runs are made once for all rows."""
    return Faults(world, tmp_path_factory.mktemp("faults"))


def test_killed_twenty_times_while_nobody_touches_it_a_run_has_the_bits_of_the_one_that_was_left_alone(world, tmp_path):
    found = killed_and_whole(world, tmp_path, kills=20)
    print(found)
    assert found["difference"] is None and sum(found["kills"].values()) == 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_fault_at_a_point_of_a_step_is_noticed_and_changes_no_bit(faults, row):
    for _ in faults.missing([row]):
        pass
    found = faults.result(row)
    print(found)
    assert found["difference"] is None
    stopped = row.signal in ("SIGSTOP", "skip")
    if row.victim in ("raylet", "gcs"):
        assert found["noticed_s"] < 10
    elif not stopped:
        assert found["noticed_s"] < OTHER_END_S
    else:
        assert found["noticed_s"] < max(DEADLINE_S, RANKS_DEADLINE_S) + 5


def test_under_faults_of_every_kind_most_of_300_steps_time_is_steps_and_nothing_grows(world, tmp_path):
    found = soaked(world, tmp_path)
    print(found)
    assert found["ledger"] is None, "every response is trained on once"
    assert found["goodput"] >= HALF
    assert all(found["growth"][name] < 1.02 for name in ("memory", "handles", "processes"))


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> Path:
    return make_worlds(tmp_path_factory.mktemp("worlds"))


@pytest.mark.skipif(not is_possible(), reason="needs root, or namespaces of users")
@pytest.mark.parametrize("piece", range(PIECES))
def test_rows_of_the_array_of_combinations_hold(worlds, tmp_path, piece):
    """Some 15 minutes a piece."""
    problems = [problem for row in all_rows(worlds)[piece::PIECES] for problem in one(row, worlds, tmp_path)]
    assert problems == []
