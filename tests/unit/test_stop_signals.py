"""What ends a run: the first signal asks it to, the second ends it at once, whatever the process inherited."""

import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from mrl.driver import loop, stop_signals
from mrl.driver.stop_signals import StopFlag, grace_of_the_job, stop_on_signals
from mrl.errors import Interrupted

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["in the foreground", "in the background"])
def interrupts(request):
    """What SIGINT does on entry: shells start background jobs with it ignored."""
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_run_and_leaves_the_handlers_as_they_were(interrupts, number):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match=number.name), stop_on_signals(StopFlag()) as stop:
        os.kill(os.getpid(), number)
        stop.raise_if_set()
    assert signal.getsignal(signal.SIGINT) is interrupts and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_process_with_the_code_of_a_resumable_run(interrupts, number, monkeypatch):
    codes = []
    monkeypatch.setattr(stop_signals.os, "_exit", codes.append)
    with stop_on_signals(StopFlag()) as stop:
        stop.defer_signals()
        os.kill(os.getpid(), number)
        assert codes == []
        os.kill(os.getpid(), number)
    assert codes == [Interrupted.exit_code]


# a run in the middle of an update: it says the numbers of its processes, one of which has lost its parent's session
RUN = """
import os, subprocess, sys, time
from mrl.platforms.process_tree import end_descendants
from mrl.driver.stop_signals import StopFlag, grace_of_the_job, stop_on_signals
below = "import os, subprocess, time; p = subprocess.Popen(['sleep', '60']); print(os.getpid(), p.pid, flush=True); "
subprocess.Popen([sys.executable, "-c", below + "time.sleep(60)"], start_new_session=True)
stop = StopFlag(grace_of_the_job())
stop.leave_nothing = end_descendants
with stop_on_signals(stop):
    stop.defer_signals()
    while True:
        time.sleep(0.05)
"""


def run_in_an_update(**environment):
    process = subprocess.Popen(
        [sys.executable, "-c", RUN], env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )
    return process, [psutil.Process(int(number)) for number in process.stdout.readline().split()]


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_second_signal_leaves_no_process_behind():
    process, below = run_in_an_update()
    assert len(below) == 2 and not any(map(gone, below))
    time.sleep(0.2)  # until its handlers stand
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None, "what is half-done is finished after one signal"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == Interrupted.exit_code
    assert all(map(gone, below))


def test_further_signals_do_not_keep_a_run_from_ending_in_order():
    """A hundred of them, while its processes are being killed: the end is begun once."""
    ended = []
    stop = StopFlag()
    stop.leave_nothing = lambda: ended.append([os.kill(os.getpid(), signal.SIGTERM) for _ in range(100)])
    exits = []
    with stop_on_signals(stop), pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop_signals.os, "_exit", exits.append)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert len(ended) == len(exits) == 1


def test_a_grace_that_is_shorter_than_the_step_ends_the_run_before_it_is_killed():
    process, below = run_in_an_update(RAY_JOB_STOP_WAIT_TIME_S="3")
    time.sleep(0.2)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == Interrupted.exit_code
    assert time.monotonic() - began < 3
    assert all(map(gone, below))


@pytest.mark.parametrize(
    ("grace", "seconds"), [("60", 60.0), ("abc", math.inf), ("-1", math.inf), ("0", math.inf), (None, math.inf)]
)
def test_the_grace_is_what_the_job_was_given(monkeypatch, grace, seconds):
    if grace is None:
        monkeypatch.delenv("RAY_JOB_STOP_WAIT_TIME_S", raising=False)
    else:
        monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", grace)
    assert grace_of_the_job() == seconds


@pytest.mark.parametrize(("last_s", "is_saved"), [(1.0, True), (100.0, False)])
def test_a_step_is_saved_where_the_last_saves_time_fits_into_the_grace(monkeypatch, capsys, last_s, is_saved):
    stop = StopFlag(60.0)
    with stop_on_signals(stop):
        assert stop.left_s() == math.inf
        os.kill(os.getpid(), signal.SIGTERM)
    assert 50 < stop.left_s() < 60
    saved = []
    run = SimpleNamespace(
        is_whole=True, stop=stop, state=SimpleNamespace(step=3), line={},
        sample_writer=SimpleNamespace(finish=lambda: saved.append("samples")),
        saver=SimpleNamespace(last_s=last_s, saved_step=2, save_last=lambda state, line: saved.append("weights")),
        actor=SimpleNamespace(are_free=lambda within_s: True),
        generation=SimpleNamespace(given_up=lambda state: state),
        config=SimpleNamespace(reshard=SimpleNamespace(timeout_s=1.0)),
    )  # fmt: skip
    loop.save_whole(run, Interrupted("stopped by SIGTERM"))
    assert saved == (["samples", "weights"] if is_saved else [])
    assert ("the last save took 100.0 s" in capsys.readouterr().out) is not is_saved
