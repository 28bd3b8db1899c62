"""Processes are found by descent: those below this one, orphans of theirs, and nobody else's."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mrl.platforms.process_tree import adopted_orphans, end_below, end_descendants, reap_orphans

pytestmark = pytest.mark.timeout(60)
ORPHAN = "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=-3, stderr=-3).pid)"


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def orphan() -> int:
    """A process whose parent has ended."""
    made = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=30)
    return int(made.stdout)


def an_orphan_is_adopted() -> None:
    with adopted_orphans():
        pid = orphan()
        assert psutil.Process(pid).ppid() == os.getpid()
        assert end_descendants() == 1 and gone(pid)
        reap_orphans()
        assert not psutil.pid_exists(pid)


def no_orphan_is_adopted() -> None:
    pid = orphan()
    try:
        assert psutil.Process(pid).ppid() != os.getpid()
        assert end_descendants() == 0 and not gone(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


def a_child_is_waited_for() -> None:
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)
    reap_orphans(but=child.pid)
    assert child.wait(5) == 7


def alone(check: Callable[[], None]) -> None:
    """Runs a check in a process of its own: this one has descendants of other tests."""
    code = f"from {__name__} import {check.__name__}; {check.__name__}()"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, env=os.environ | {"PYTHONPATH": path})


def test_an_orphan_is_found_by_who_adopts_it_and_leaves_no_zombie():
    alone(an_orphan_is_adopted)


def test_who_adopts_none_finds_none_and_ends_nobody_elses():
    alone(no_orphan_is_adopted)


def test_a_child_that_is_waited_for_is_left_to_who_waits():
    alone(a_child_is_waited_for)


def test_who_ends_in_time_is_not_killed():
    ending, staying = (subprocess.Popen(["sleep", seconds]) for seconds in ("0.3", "60"))
    end_below([ending.pid, staying.pid], own_s=1.0)
    assert (ending.wait(5), staying.wait(5)) == (0, -signal.SIGKILL)


def test_a_process_that_is_stopped_is_ended_and_one_that_is_not_named_stays():
    stopped, other = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    stopped.send_signal(signal.SIGSTOP)
    try:
        end_below([stopped.pid, 1])
        assert stopped.wait(5) == -signal.SIGKILL and other.poll() is None
    finally:
        other.kill()
        other.wait()
