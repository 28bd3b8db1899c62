"""Whole runs whose engines generate ahead of training: the synchronous run's bits without staleness, the same bits
twice with it.

Whatever the engines' speed: their processes are stopped and let go on at random. Killed in the middle, and resumed.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from test_runs import finish, train, wait_for_step
from world import make_world, metrics

from mrl.tools.compare_runs import checkpoint_difference, metrics_difference

pytestmark = pytest.mark.real

STEPS = 5
ONE_OFF = {"trainer__schedule": "one_step_off"}
PARTIAL = {
    "trainer__schedule": "bounded", "trainer__max_staleness": 2, "trainer__partial_rollouts": True,
    "trainer__segment_tokens": 1,
}  # fmt: skip
ROUTED = PARTIAL | {"actor__router_replay": "R3", "rollout__enable_prefix_caching": False}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def start(world: Path, run_dir: Path, *more: str, **schedule):
    settings = {
        "trainer__total_training_steps": STEPS, "trainer__save_freq": 1, "trainer__test_freq": 3,
        "trainer__max_actor_ckpt_to_keep": 3, "trainer__deterministic": True,
    }  # fmt: skip
    return train(world, run_dir, *more, **(settings | schedule))


def trained(world: Path, run_dir: Path, *more: str, **schedule) -> Path:
    process = start(world, run_dir, *more, **schedule)
    assert finish(process, run_dir) == 0, run_dir.with_suffix(".log").read_text()[-3000:]
    return run_dir


def engine_processes(pid: int) -> list[psutil.Process]:
    """vLLM's, of the run."""
    with suppress(psutil.Error):
        return [child for child in psutil.Process(pid).children(recursive=True) if "VLLM" in " ".join(child.cmdline())]
    return []


@contextmanager
def disturbed(process, seed: int) -> Iterator[None]:
    """Engines whose speed changes all the time."""
    over, rng = threading.Event(), random.Random(seed)

    def disturb() -> None:
        while not over.wait(rng.random()):
            for one in engine_processes(process.pid):
                with suppress(psutil.Error):
                    one.suspend()
                    time.sleep(0.5 * rng.random())
                    one.resume()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def assert_same(found: Path, expected: Path, without: tuple[str, ...] = ()) -> None:
    assert metrics_difference(*(comparable(folder, without) for folder in (found, expected))) is None
    assert checkpoint_difference(*(folder / "checkpoints" / f"step-{STEPS}" for folder in (found, expected))) is None


def comparable(run_dir: Path, without: tuple[str, ...]) -> list[dict]:
    return [
        {name: value for name, value in row.items() if not name.startswith(("reshard/", *without))}
        for row in metrics(run_dir)
    ]


@pytest.mark.long
def test_partial_rollouts_mix_versions_within_the_bound_train_and_go_on_after_a_signal(world, tmp_path):
    """The checkpoint of the signal is written while groups that it has are finished, and trained on. Every token but a
    response's last has the route that the version which computed it chose.
    """
    run_dir = tmp_path / "run"
    stopped = start(world, run_dir, **ROUTED | {"trainer__save_freq": 100})
    wait_for_step(stopped, run_dir, 2)
    stopped.send_signal(signal.SIGTERM)
    assert finish(stopped, run_dir) == 5
    assert not (run_dir / "spool").exists()
    rows = metrics(trained(world, run_dir, "--resume", **ROUTED))[1:]
    assert [row["training/global_step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["async/versions_per_sample"] > 2
    for row in rows:
        assert row["router/missing_routes"] == 0
        assert row["training/off_policy/trajectory_staleness/max"] == min(2, row["training/global_step"] - 1)
        assert row["reshard/verified"] == 1 and row["reshard/weight_version"] == row["training/global_step"]
    assert (
        rows[0]["training/rollout_log_probs_abs_diff_max"] < 1e-4 < rows[-1]["training/rollout_log_probs_abs_diff_max"]
    )
    assert any(name.startswith("val-core/") for name in rows[2]), "validation between two versions"


OTHER_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 100.0 + sum(c.isdigit() for c in solution_str)
"""


@pytest.mark.long
def test_a_resume_with_another_reward_and_temperature_trains_on_no_group_of_both(world, tmp_path):
    """First another reward, whose groups keep their tokens; then another temperature, by which all begin anew."""
    run_dir = tmp_path / "run"
    other = tmp_path / "other_reward.py"
    other.write_text(OTHER_REWARD)
    stopped = start(world, run_dir, **PARTIAL)
    wait_for_step(stopped, run_dir, 2)
    stopped.send_signal(signal.SIGTERM)
    assert finish(stopped, run_dir) == 5
    done = len(metrics(run_dir)) - 1
    judged = PARTIAL | {"reward__custom_reward_function__path": other, "trainer__total_training_steps": 9}
    stopped = start(world, run_dir, "--resume", **judged)
    wait_for_step(stopped, run_dir, done + 2)
    stopped.send_signal(signal.SIGTERM)
    assert finish(stopped, run_dir) == 5
    said = run_dir.with_suffix(".log").read_text()
    assert "rewards are asked for again" in said and "by other rewards" in said
    again = len(metrics(run_dir)) - 1
    trained(
        world, run_dir, "--resume", **judged | {"rollout__temperature": 0.5, "trainer__total_training_steps": again + 2}
    )
    assert "they were made by other sampling" in run_dir.with_suffix(".log").read_text()
    rows = metrics(run_dir)[1:]
    assert all(row["critic/score/max"] < 50 for row in rows[:done])
    assert all(row["critic/score/min"] >= 100 for row in rows[done:])
    assert rows[done]["training/off_policy/trajectory_staleness/max"] > 0, "tokens were kept"
    assert rows[again]["training/off_policy/trajectory_staleness/max"] == 0
    assert rows[again]["training/rollout_log_probs_abs_diff_max"] < 1e-4


READY_FIRST = {
    "trainer__schedule": "bounded", "trainer__max_staleness": 2, "trainer__partial_rollouts": True,
    "trainer__order": "ready_first", "trainer__save_freq": 2, "data__max_response_length": 100,
    "rollout__num_engines": 1, "rollout__max_num_seqs": 4,  # so that it is at something whenever weights change
}  # fmt: skip


@pytest.mark.long
def test_weights_change_under_responses_that_engines_hold_and_a_killed_run_goes_on(world, tmp_path):
    run_dir = tmp_path / "run"
    killed = start(world, run_dir, **READY_FIRST)
    wait_for_step(killed, run_dir, 3)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    rows = metrics(trained(world, run_dir, "--resume", **READY_FIRST))[1:]
    assert [row["training/global_step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["async/versions_per_sample"] for row in rows) > 1, "some were held over an update"
    for row in rows:
        assert row["training/off_policy/trajectory_staleness/max"] <= 2
        assert row["rollout/stale_prefix_tokens"] == 0 and row["reshard/verified"] == 1
    assert rows[0]["training/rollout_log_probs_abs_diff_max"] < 1e-4
    assert any(name.startswith("val-core/") for name in rows[2]), "validation beside what goes on"


@pytest.mark.long
@pytest.mark.parametrize("schedule", [ONE_OFF, PARTIAL], ids=["one step off", "two off, partial"])
def test_speed_of_engines_and_a_kill_change_no_bit(world, tmp_path, schedule):
    whole = trained(world, tmp_path / "whole", **schedule)
    slow = start(world, tmp_path / "slow", **schedule)
    with disturbed(slow, seed=1):
        assert finish(slow, tmp_path / "slow") == 0
    assert_same(tmp_path / "slow", whole)
    killed = start(world, tmp_path / "killed", **schedule)
    wait_for_step(killed, tmp_path / "killed", 2)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert_same(trained(world, tmp_path / "killed", "--resume", **schedule), whole)
