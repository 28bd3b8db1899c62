"""A full disk under each file of a run, and at each phase of a step: what has no room is done without, and told."""

import json
import resource
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import test_loop
from generations import Files
from seldom import seldom
from small_model import write_model
from test_loop import World, compare_with_engines, in_memory  # noqa: F401

from mrl.checkpoint.manifest import RankFiles, file_facts
from mrl.driver import loop
from mrl.driver.reporting import AdvisedRecord
from mrl.errors import DataError, EnvironmentFault
from mrl.generate.lost_engines import LostEngines, Unfinished
from mrl.record.attempts import ATTEMPTS, UnderWay, attempt
from mrl.record.loggers import TensorBoardSink
from mrl.record.metrics import PhaseTimer
from mrl.record.quarantine import QUARANTINE, REWARD, Quarantine
from mrl.record.run_dir import METRICS, UNDER_WAY, append_lines, read_metrics
from mrl.record.sample_files import steps_with_responses
from mrl.record.sinks import JsonlSink, Record

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


@contextmanager
def no_room(of_file: int = 0):
    """Each write behind that many bytes of a file is refused, by this process's own limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (of_file, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", range(8))
def test_lines_for_which_a_part_has_room_are_not_there_at_all(room, tmp_path, capsys):
    path = tmp_path / "lines"
    append_lines(path, "one\n")
    with no_room(4 + room), pytest.raises(OSError):
        append_lines(path, "another\nthird\n")
    assert path.read_text() == "one\n"
    append_lines(path, "another\n")
    assert path.read_text() == "one\nanother\n"


def test_lines_of_metrics_wait_for_room_and_come_in_their_order(tmp_path, capsys):
    sink = JsonlSink(tmp_path / METRICS)
    sink.write(1, {"a": 1.0})
    with no_room((tmp_path / METRICS).stat().st_size + 10):
        sink.write(2, {"a": 2.0})
        sink.write(3, {"a": 3.0})
        assert [row["a"] for row in read_metrics(tmp_path / METRICS)] == [1.0]
        assert (tmp_path / METRICS).read_text().endswith("}\n")
    said = capsys.readouterr().out
    assert "not written yet: the line of step 2. Training goes on" in said
    sink.write(4, {"a": 4.0})
    assert [row["a"] for row in read_metrics(tmp_path / METRICS)] == [1.0, 2.0, 3.0, 4.0]
    with no_room():
        sink.write(5, {"a": 5.0})
        sink.close()
    assert "lost: the line of step 5" in capsys.readouterr().out


def test_events_for_tensorboard_wait_for_room_too(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.write(1, {"a": 1.0})
    (file,) = tmp_path.iterdir()
    with no_room(file.stat().st_size + 10):
        sink.write(2, {"a": 2.0})
        sink.write(3, {"a": 3.0})
    sink.write(4, {"a": 4.0})
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


class Saving(World):
    """Ranks that write into a checkpoint, and a record on the disk."""

    def take_checkpoint(self):
        return 0

    def write_checkpoint(self, work):
        file = work / "rank-00000.safetensors"
        file.write_bytes(b"x" * 100)
        return [RankFiles((), {file.name: file_facts(file)}, {"num_updates": 1}).to_json()]


class Writer(test_loop.Writer):
    """Counts files that have no room, as SampleWriter."""

    def finish(self):
        try:
            super().finish()
        except OSError:
            self.failed += 1
            self.under_way = []


class Groups(Files):
    """Tells that a group had no room once it is asked, as GroupWriter."""

    def begin(self, path, parts):
        try:
            return super().begin(path, parts)
        except OSError as error:
            return error

    def facts(self, begun):
        return {name: self.written(each) for name, each in begun.items()}

    def written(self, begun):
        if isinstance(begun, OSError):
            raise EnvironmentFault(str(begun))
        return begun


@pytest.fixture(autouse=True)
def groups_in_a_writer_of_their_own(monkeypatch):
    monkeypatch.setattr(test_loop, "Files", Groups)


def model_in(folder: Path) -> Path:
    if not (folder / "model").is_dir():
        write_model(folder / "model")
    return folder / "model"


def saving_run(folder: Path, of_model: Path, *more: str):
    """A run that saves each step. Three failed saves in a row end it."""
    settings = ("trainer.save_freq=1", f"model.path={model_in(of_model)}", "trainer.max_failed_saves=3")
    run = test_loop.run_of(Saving(), folder, *settings, *more)
    run.sample_writer = Writer(run.run_dir.samples)
    return run


STEPS = 4
OF_TIME = ("timing", "perf/", "training/failed", "async/")


def trained(tmp_path, name: str, full_from: str = "") -> tuple[list, object]:
    """Metrics of a run; of its second step from that phase on, nothing has room. A checkpoint a step."""
    folder = tmp_path / name
    folder.mkdir()
    run = saving_run(folder, tmp_path, f"trainer.total_training_steps={STEPS}")
    run.total_steps = STEPS
    sinks = Record(JsonlSink(run.run_dir.metrics), {})
    run.record = AdvisedRecord(sinks, [], UnderWay(run.run_dir.path, 0))
    full = ExitStack()
    begun = []
    phase, step = PhaseTimer.__call__, loop.train_step

    def watched(timer, called):
        if full_from == called and begun[-1:] == [1] and resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 0:
            full.enter_context(no_room())
        return phase(timer, called)

    def stepped(run):
        begun.append(run.state.step)
        with full:
            step(run)
            run.saver.finished(wait=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PhaseTimer, "__call__", watched)
        patch.setattr(loop, "train_step", stepped)
        loop.train(run)
    run.saver.close()
    run.record.close()
    rows = read_metrics(run.run_dir.metrics)
    return [{k: v for k, v in row.items() if not k.startswith(OF_TIME)} for row in rows], run


PHASES = ("step", "gen", "record", "old_log_prob", "adv", "update_actor", "save_checkpoint", "reshard")


@pytest.mark.parametrize("full_from", seldom(PHASES, "step", "record", "save_checkpoint"))
def test_a_disk_without_room_from_any_phase_on_costs_what_is_written_then_and_the_run_goes_on_bit_by_bit(
    full_from, tmp_path, capsys
):
    expected, undisturbed = trained(tmp_path, "expected")
    capsys.readouterr()
    found, run = trained(tmp_path, "full", full_from)
    said = capsys.readouterr().out
    assert found == expected and [row["training/global_step"] for row in found] == [0, 1, 2, 3, 4]
    assert run.saver.failed_saves == 1 and "step 2 is not saved" in said and "Training goes on" in said
    assert "not written yet: the line of step 2" in said
    assert sorted(path.name for path in run.run_dir.checkpoints.iterdir()) == ["step-3", "step-4"]
    assert steps_with_responses(run.run_dir.samples) in ([1, 2, 3, 4], [1, 3, 4])
    assert undisturbed.state.cursor == run.state.cursor
    whole = [json.loads(line) for line in run.run_dir.metrics.read_text().splitlines()]
    assert len(whole) == 1 + STEPS and whole[-1]["training/failed_saves"] == 1


def test_what_ended_a_run_on_a_full_disk_is_what_is_raised(tmp_path, monkeypatch, capsys):
    """Not that its last save has no room either."""
    run = saving_run(tmp_path, tmp_path)
    loop.train_step(run)
    monkeypatch.setattr(run.placement, "begin", lambda step: None)
    monkeypatch.setattr(run.generation, "next_batch", lambda timer: (_ for _ in ()).throw(DataError("rewards fail")))
    with no_room(), pytest.raises(DataError, match="rewards fail"):
        loop.train(run)
    run.saver.close()
    assert "step 1 is not saved" in capsys.readouterr().out


def test_no_more_saves_may_fail_in_a_row_than_the_configuration_says(tmp_path, monkeypatch, capsys):
    run = saving_run(tmp_path, tmp_path, "trainer.total_training_steps=9")
    run.total_steps = 9
    with no_room(), pytest.raises(EnvironmentFault, match="3 saves in a row failed"):
        loop.train(run)
    run.saver.close()
    assert run.state.step in (3, 4), "a save is known to have failed at the next"


PRINTS = """
import sys
from mrl.record.lossy_output import lossy
sys.stdout = lossy(sys.stdout)
for number in range(3000):
    print("line", number, flush=True)
"""


def test_output_that_has_no_room_is_lost_and_ends_no_process(tmp_path):
    with (tmp_path / "log").open("w") as log:
        limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        done = subprocess.run([sys.executable, "-c", PRINTS], stdout=log, stderr=subprocess.PIPE, preexec_fn=limit)
    assert done.returncode == 0 and done.stderr == b""
    assert (tmp_path / "log").read_text().startswith("line 0\nline 1\n") and (tmp_path / "log").stat().st_size == 100
    with Path("/dev/full").open("w") as log:
        assert subprocess.run([sys.executable, "-c", PRINTS], stdout=log).returncode == 0
