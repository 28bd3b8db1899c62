"""Ranks that are lost come back inside the run, beside engines that stay; it ends with the undisturbed run's bits."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from deadlines import RUN_S
from test_ahead_runs import READY_FIRST
from test_engines_back import KINDS, assert_nothing_lost_or_twice
from test_lost_worker import rank_one
from test_runs import finish, train, wait_for_step
from world import FOUR_GRPO_STEPS, FOUR_STEPS, GRPO, RESPONSES, make_world, metrics, replayed

from mrl.record.attempts import read_attempts
from mrl.tools.compare_runs import checkpoint_difference, metrics_difference

pytestmark = pytest.mark.real

STEPS = 4
long = pytest.mark.long


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def engine_processes(pid: int) -> dict[int, float]:
    """vLLM's, of the run: numbers, and when they began."""
    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):  # one that has just ended
            if "VLLM" in " ".join(child.cmdline()):
                found[child.pid] = child.create_time()
    return found


def test_a_rank_comes_back_inside_the_run_and_changes_no_bit(four_grpo_steps, tmp_path):
    world, whole = four_grpo_steps
    broken = tmp_path / "broken"
    process = train(world, broken, *GRPO, **FOUR_GRPO_STEPS)
    lose_a_rank(process, broken, 3, signal.SIGKILL)
    assert_restarted(broken, 3)
    assert_same(whole, broken)
    assert replayed(broken) == [RESPONSES], "the first repeated step is not generated again"


@long
@pytest.mark.parametrize(
    ("settings", "killed_after", "number"),
    [
        pytest.param({}, 1, signal.SIGKILL, id="before the first checkpoint", marks=long),
        pytest.param({"cluster__step_timeout_s": 20.0}, 2, signal.SIGSTOP, id="stopped"),
        *(pytest.param(KINDS[kind], 2, signal.SIGKILL, id=kind) for kind in KINDS if kind != "sync"),
    ],
)
def test_ranks_come_back_inside_the_run_and_change_no_bit(world, tmp_path, settings, killed_after, number):
    given = FOUR_STEPS | settings
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    undisturbed = train(world, whole, **given)  # beside the other
    try:
        lose_a_rank(train(world, broken, **given), broken, killed_after, number)
        assert finish(undisturbed, whole) == 0, whole.with_suffix(".log").read_text()[-3000:]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(undisturbed.pid, signal.SIGKILL)
    assert_restarted(broken, killed_after)
    assert_same(whole, broken)


def lose_a_rank(process: subprocess.Popen, run_dir: Path, killed_after: int, number: signal.Signals) -> None:
    """Sends a signal to rank 1 after a step; the run has to end well, with the engines that it began with."""
    try:
        wait_for_step(process, run_dir, killed_after)
        engines = engine_processes(process.pid)
        os.kill(rank_one(psutil.Process(process.pid), run_dir).pid, number)
        wait_for_restart(process, run_dir)
        wait_for_step(process, run_dir, STEPS - 1)
        assert engines and engine_processes(process.pid) == engines, "engines stay"
        assert finish(process, run_dir) == 0, run_dir.with_suffix(".log").read_text()[-3000:]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def assert_restarted(run_dir: Path, killed_after: int) -> None:
    (attempt,) = read_attempts(run_dir)
    assert len(attempt.restarted_at) == 1 and attempt.restarted_at[0] >= killed_after
    assert metrics(run_dir)[-1]["trainer/restarts"] == 1


def assert_same(whole: Path, broken: Path) -> None:
    """Every metric but those of clocks, and every bit of the last checkpoint."""
    assert metrics_difference(metrics(whole), metrics(broken)) is None
    last = Path("checkpoints") / f"step-{STEPS}"
    assert checkpoint_difference(whole / last, broken / last) is None


@long
def test_ready_first_ranks_come_back_and_nothing_is_lost_or_trained_on_twice(world, tmp_path):
    """The checkpoint has tokens of responses that engines held when it was taken."""
    run_dir = tmp_path / "broken"
    process = train(
        world, run_dir, trainer__total_training_steps=STEPS, trainer__test_freq=-1, trainer__val_before_train=False,
        **READY_FIRST,
    )  # fmt: skip
    lose_a_rank(process, run_dir, 3, signal.SIGKILL)
    assert metrics(run_dir)[-1]["trainer/restarts"] == 1
    assert [row["training/global_step"] for row in metrics(run_dir)] == list(range(1, STEPS + 1))
    assert_nothing_lost_or_twice(run_dir, STEPS)


def wait_for_restart(process, run_dir: Path) -> None:
    end = time.monotonic() + RUN_S
    while not any(attempt.restarted_at for attempt in read_attempts(run_dir)):
        assert process.poll() is None, run_dir.with_suffix(".log").read_text()[-3000:]
        assert time.monotonic() < end
        time.sleep(0.05)
