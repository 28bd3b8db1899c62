"""A run whose checkpoint turns out damaged when its ranks read it starts again from the one before, or says so."""

import signal
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from orders import files_order

from mrl.checkpoint.step_folders import Newest
from mrl.config.load import load_config
from mrl.data.order import DataCursor
from mrl.driver import assemble
from mrl.driver.assemble_files import Beginning, open_files
from mrl.driver.stop_signals import StopFlag
from mrl.errors import DamagedCheckpoint, Interrupted
from mrl.generate.train_state import TrainState

NEWEST, BEFORE = Path("run/checkpoints/step-2"), Path("run/checkpoints/step-1")


@pytest.fixture
def starts(monkeypatch):
    """Starts that find damaged what `found` says, one after another; what each was `told`, and what it did."""

    class Starts:
        def __init__(self):
            self.told, self.events, self.found, self.signal = [], [], [], None

        def start(self, inputs, resume, damaged, views, stop, stack: ExitStack):
            self.told.append(set(damaged))
            number = len(self.told)
            self.events.append(f"open {number}")
            stack.callback(self.events.append, f"close {number}")
            stop.signal = self.signal
            if self.found:
                folder = self.found.pop(0)
                raise DamagedCheckpoint(f"{folder}: other bytes", str(folder))
            return f"run {number}"

    starts = Starts()
    monkeypatch.setattr(assemble, "_start", starts.start)
    return starts


def test_it_starts_again_until_a_checkpoint_is_whole_and_nothing_is_left_of_earlier_starts(starts, capsys):
    starts.found = [NEWEST, BEFORE]
    with assemble.open_run(None, resume=True) as opened:
        assert opened == "run 3"
        assert starts.told == [set(), {NEWEST}, {NEWEST, BEFORE}]
        assert starts.events == ["open 1", "close 1", "open 2", "close 2", "open 3"]
    assert starts.events[-1] == "close 3"
    assert capsys.readouterr().out.count("the run starts again, without the damaged checkpoint") == 2


def test_a_checkpoint_that_a_new_run_is_to_begin_from_has_none_before_it(starts):
    starts.found = [NEWEST]
    with pytest.raises(DamagedCheckpoint, match="other bytes"), assemble.open_run(None, resume=False):
        pass
    assert starts.events == ["open 1", "close 1"]


def test_one_that_is_known_to_be_damaged_is_not_tried_for_ever(starts):
    starts.found = [NEWEST, NEWEST, NEWEST]
    with pytest.raises(DamagedCheckpoint), assemble.open_run(None, resume=True):
        pass
    assert len(starts.told) == 2


def test_a_signal_that_came_meanwhile_is_not_forgotten(starts):
    starts.found, starts.signal = [NEWEST], signal.SIGTERM
    with pytest.raises(Interrupted, match="SIGTERM"), assemble.open_run(None, resume=True):
        pass
    assert starts.events == ["open 1", "close 1"]


def test_a_start_that_waited_for_the_run_directory_goes_on_from_what_was_saved_meanwhile(tmp_path):
    """Another process trained on until it gave the lock back."""
    config = load_config("parallel_configs/tiny-moe/cpu.yaml").config

    def point(step):
        trainer = {"cursor": {"epoch": 0, "index": step}}
        return Newest(tmp_path / f"step-{step}", SimpleNamespace(step=step, trainer=trainer), {})

    beginning = Beginning(files_order(config), tmp_path, point(3), lambda: point(8), {})
    with ExitStack() as stack:
        files = open_files(stack, beginning, True, StopFlag())
        assert files.state == TrainState(8, DataCursor(0, 8)) and files.beginning.checkpoint == tmp_path / "step-8"
