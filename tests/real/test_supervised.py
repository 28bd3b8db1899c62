"""A supervised run goes on by itself after its driver, or Ray below it, was killed, with what an undisturbed one
writes.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from deadlines import END_S
from test_lost_worker import called
from test_runs import finish, train, wait_for_step
from world import FOUR_GRPO_STEPS, GRPO, RESPONSES, metrics, replayed, without_times

from mrl.record.attempts import read_attempts


def driver_of(supervisor: psutil.Process) -> psutil.Process:
    (driver,) = supervisor.children()
    return driver


def goes_on_by_itself(world: Path, broken: Path, kill: Callable[[psutil.Process], None]) -> psutil.Process:
    """Starts a supervised run, lets `kill` end what it likes below its driver, and waits for the end of the next start.

    Returns the driver that was killed; nothing of its own is left when the next start begins.
    """
    process = train(world, broken, *GRPO, "--restarts", "2", **FOUR_GRPO_STEPS)
    try:
        wait_for_step(process, broken, 3)
        driver = driver_of(psutil.Process(process.pid))
        below = driver.children(recursive=True)
        kill(driver)
        end = time.monotonic() + END_S
        while len(read_attempts(broken)) < 2:
            assert time.monotonic() < end, broken.with_suffix(".log").read_text()[-3000:]
            time.sleep(0.1)
        assert not [p for p in below if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert finish(process, broken) == 0, broken.with_suffix(".log").read_text()[-3000:]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return driver


@pytest.mark.real
def test_a_killed_driver_is_started_again_and_nothing_of_it_is_left(four_grpo_steps, tmp_path):
    world, whole = four_grpo_steps
    broken = tmp_path / "broken"
    driver = goes_on_by_itself(world, broken, psutil.Process.kill)
    assert "killed by SIGKILL; start 2 of 3" in broken.with_suffix(".log").read_text()
    assert without_times(metrics(broken)) == without_times(metrics(whole))
    assert replayed(broken) == [RESPONSES], "the first repeated step is not generated again"
    assert not [
        file for file in Path("/tmp").glob("mrl-ray-*/owner.json") if f'"pid": {driver.pid},' in file.read_text()
    ]


@pytest.mark.real
@pytest.mark.long
def test_a_run_whose_ray_is_killed_below_it_is_started_again(four_grpo_steps, tmp_path):
    """Ray's own processes are no start's to mend: the driver ends, in bounded time, and the next one has a new Ray."""
    world, whole = four_grpo_steps
    broken = tmp_path / "broken"
    goes_on_by_itself(world, broken, lambda driver: next(called(driver, "raylet/raylet")).kill())
    assert "; start 2 of 3" in broken.with_suffix(".log").read_text()
    assert without_times(metrics(broken)) == without_times(metrics(whole))
