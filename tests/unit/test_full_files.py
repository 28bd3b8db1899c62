"""A full disk under each file that a run appends to: the file is done without, or the run ends in one message."""

from pathlib import Path

import pytest

from mrl.errors import EnvironmentFault
from mrl.record.attempts import ATTEMPTS, UnderWay, attempt
from mrl.record.quarantine import QUARANTINE, REWARD, Quarantine
from mrl.record.run_dir import METRICS, UNDER_WAY
from mrl.record.sinks import JsonlSink
from mrl.train.lost_engines import LostEngines, Unfinished

LOST = "lost_engines.jsonl"


def starts(folder: Path) -> None:
    with attempt(folder, 0, {}) as notes:
        notes.ready()
        notes.restarted(3, "rank 1 died")


def answers(folder: Path) -> None:
    under_way = UnderWay(folder, 0)
    under_way.arrived(8, 8)
    under_way.close()


def fails(folder: Path) -> None:
    Quarantine(folder).add(REWARD, [{"step": 1}])


def loses_an_engine(folder: Path) -> None:
    """What it raises ends the run with the loss as its cause, see test_snapshots."""
    LostEngines(folder / LOST).note(1, ["engine 0"], "it died", [Unfinished(1, 2, 3)])


def finishes_a_step(folder: Path) -> None:
    JsonlSink(folder / METRICS).write(1, {"a": 1.0})


# file -> what writes it, and what may come of it
FILES = {
    ATTEMPTS: (starts, None),
    UNDER_WAY: (answers, None),
    QUARANTINE: (fails, None),
    LOST: (loses_an_engine, OSError),
    METRICS: (finishes_a_step, EnvironmentFault),
}


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_under_a_file_that_a_run_appends_to_costs_that_file_or_ends_it_in_one_message(name, tmp_path):
    write, error = FILES[name]
    (tmp_path / name).symlink_to("/dev/full")
    if error is None:
        write(tmp_path)
        return
    with pytest.raises(error, match="No space left on device"):
        write(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_with_room_each_of_them_is_written(name, tmp_path):
    FILES[name][0](tmp_path)
    assert (tmp_path / name).stat().st_size > 0
