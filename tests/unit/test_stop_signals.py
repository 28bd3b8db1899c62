"""What ends a run: the first signal asks it to, the second ends it at once, whatever the process inherited."""

import os
import signal

import pytest

from mrl.errors import Interrupted
from mrl.train import run
from mrl.train.run import StopFlag, stop_on_signals

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
    monkeypatch.setattr(run.os, "_exit", codes.append)
    with stop_on_signals(StopFlag()) as stop:
        stop.hold()
        os.kill(os.getpid(), number)
        assert codes == []
        os.kill(os.getpid(), number)
    assert codes == [Interrupted.exit_code]
