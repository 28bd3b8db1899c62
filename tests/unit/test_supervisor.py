"""A supervisor starts a run again after what a start can mend, never after anything else, and leaves nothing behind.

Runs here are a small program that does what a table says: steps that it finishes, processes that it leaves, its end.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from mrl.cli.main import main
from mrl.cluster import ray_folder
from mrl.errors import ConfigError, Interrupted
from mrl.record.process_mark import ProcessMark
from mrl.tools import own_command, supervisor

pytestmark = pytest.mark.timeout(60)

# takes the next row of its table: a list of steps, an exit code or minus a signal's number
RUN = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from mrl.record.attempts import attempt
from mrl.errors import Interrupted
folder = Path(FOLDER)
row = json.loads((folder / "table.json").read_text())[len((folder / "starts").read_text().splitlines())]
with (folder / "starts").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + chr(10))
(folder / "config.resolved.yaml").write_text("")
if row.get("leaves"):
    apart = "start_new_session=True, stdout=-3, stderr=-3"
    orphan = f"import subprocess; print(subprocess.Popen(['sleep', '60'], {apart}).pid)"
    left = subprocess.run([sys.executable, "-c", orphan], capture_output=True, text=True).stdout
    (folder / "left").write_text(left)
with attempt(folder, row.get("from", 0), {}):
    with (folder / "metrics.jsonl").open("a") as file:
        for step in row.get("steps", []):
            file.write(json.dumps({"training/global_step": step, "at": time.time()}) + chr(10))
    if row["end"] == "from below":
        os._exit(1)
    if row["end"] == "unforeseen":
        from mrl.tools.own_command import DEFECT
        os._exit(DEFECT)
    if row["end"] == "waits":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        signal.signal(signal.SIGINT, lambda *_: sys.exit(5))
        (folder / "waits").write_text("")
        time.sleep(60)
    if row["end"] < 0:
        os.kill(os.getpid(), -row["end"])
    if row["end"] == 5:
        raise Interrupted("rank 1 died")
    sys.exit(row["end"])
"""


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    """What a supervisor ends is below it: here, nothing of the test's own; and its Ray folders are elsewhere. It looks
    often, since runs are short.
    """
    monkeypatch.setattr(ray_folder, "PLACE", tmp_path / "ray")
    monkeypatch.setattr(supervisor, "_LOOK_S", 0.01)
    (tmp_path / "ray").mkdir()
    yield
    assert not psutil.Process().children()


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "starts").write_text("")
    return folder


def supervised(monkeypatch, folder, restarts, *rows, arguments=("config.yaml",)):
    """Exit code of the supervisor over runs that do what `rows` say, and the arguments of each start."""
    program = RUN.replace("FOLDER", repr(str(folder)))
    program = f"import sys\nfrom mrl.errors import MrlError\ntry:\n    exec({program!r})\n"
    program += "except MrlError as error:\n    sys.exit(error.exit_code)\n"
    monkeypatch.setattr(own_command, "PROGRAM", program)
    (folder / "table.json").write_text(json.dumps(rows))
    return supervisor.supervise(arguments, folder, restarts)


def starts(folder) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "starts").read_text().splitlines()]


def test_a_run_goes_on_after_a_lost_process_and_after_a_kill_until_it_is_done(monkeypatch, folder, capfd):
    rows = [{"steps": [1], "end": 5}, {"from": 1, "steps": [2], "end": -9}, {"from": 2, "steps": [3], "end": 0}]
    assert supervised(monkeypatch, folder, 5, *rows) == 0
    assert starts(folder) == [["train", "config.yaml"], *[["train", "config.yaml", "--resume"]] * 2]
    said = capfd.readouterr().out
    assert "exit code 5: rank 1 died; start 2 of 6" in said and "killed by SIGKILL; start 3 of 6" in said


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 6])
def test_no_other_end_is_followed_by_a_start(monkeypatch, folder, code):
    assert supervised(monkeypatch, folder, 5, {"steps": [1], "end": code}, {"end": 0}) == code
    assert len(starts(folder)) == 1


def test_a_start_that_was_ended_from_below_python_is_followed_by_another(monkeypatch, folder, capfd):
    """As Ray ends a driver that has lost its GCS: exit code 1, and nothing was written of an end."""
    rows = [{"steps": [1], "end": "from below"}, {"from": 1, "steps": [2], "end": 0}]
    assert supervised(monkeypatch, folder, 5, *rows) == 0
    assert "exit code 1: its process was ended from below; start 2 of 6" in capfd.readouterr().out


def test_an_end_of_its_own_is_no_end_from_below_where_no_line_of_it_was_written(monkeypatch, folder):
    """As on a full disk: the exit code alone says that an unforeseen error ended the run."""
    assert supervised(monkeypatch, folder, 5, {"steps": [1], "end": "unforeseen"}, {"end": 0}) == 1
    assert len(starts(folder)) == 1


@pytest.mark.parametrize("below", [True, False])
def test_an_unforeseen_error_keeps_its_traceback_and_has_a_code_of_its_own_below_one(monkeypatch, capsys, below):
    monkeypatch.delenv(supervisor.SUPERVISED, raising=False)
    if below:
        monkeypatch.setenv(supervisor.SUPERVISED, "4711")
    monkeypatch.setattr("mrl.cli.doctor._doctor", lambda _: 1 // 0)
    with pytest.raises(SystemExit if below else ZeroDivisionError) as raised:
        main(["doctor"])
    if below:
        assert raised.value.code == own_command.DEFECT
        assert "ZeroDivisionError" in capsys.readouterr().err


def test_restarts_are_used_up(monkeypatch, folder, capfd):
    rows = [{"steps": [1], "end": 5}, {"from": 1, "steps": [2], "end": -11}, {"end": 0}]
    assert supervised(monkeypatch, folder, 1, *rows) == Interrupted.exit_code
    assert len(starts(folder)) == 2
    assert "--restarts 1 are used up" in capfd.readouterr().out


def test_three_ends_without_a_finished_step_are_a_crash_loop_and_are_told(monkeypatch, folder):
    nothing = {"from": 2, "end": 5}
    rows = [{"steps": [1, 2], "end": -9}, nothing, {"from": 2, "end": -11}, nothing, {"end": 0}]
    with pytest.raises(Interrupted) as raised:
        supervised(monkeypatch, folder, 9, *rows)
    assert len(starts(folder)) == 4
    assert str(raised.value).count("exit code 5: rank 1 died") == 2
    assert str(raised.value).count("killed by SIGSEGV") == 1


def test_a_step_that_is_finished_again_ends_the_count(monkeypatch, folder):
    """The step is the same, its line is another."""
    nothing = {"from": 1, "end": 5}
    rows = [nothing, nothing, {"from": 1, "steps": [2], "end": 5}, nothing, nothing, {"from": 1, "end": 0}]
    assert supervised(monkeypatch, folder, 9, *rows) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_handed_on_and_is_the_end(monkeypatch, folder, number):
    def stop_when_it_waits() -> None:
        while not (folder / "waits").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop_when_it_waits, daemon=True).start()
    before = signal.getsignal(number)
    assert supervised(monkeypatch, folder, 5, {"steps": [1], "end": "waits"}, {"end": 0}) == Interrupted.exit_code
    assert len(starts(folder)) == 1
    assert signal.getsignal(number) is before


def test_what_a_start_left_is_gone_before_the_next_and_others_things_stay(monkeypatch, folder, tmp_path):
    foreign = tmp_path / "ray" / "mrl-ray-living"
    foreign.mkdir()
    (foreign / "owner.json").write_text(json.dumps(ProcessMark.own().to_json()))
    dead = tmp_path / "ray" / "mrl-ray-dead"
    dead.mkdir()
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    mark = ProcessMark.own().to_json() | {"pid": ended.pid, "started": "1"}
    (dead / "owner.json").write_text(json.dumps(mark))
    ended.wait()
    segment = tmp_path / "psm_of_an_engine"
    segment.write_text("")
    (folder / "logs" / "engine-0.segments").write_text(str(segment))
    rows = [{"steps": [1], "leaves": True, "end": -9}, {"from": 1, "steps": [2], "end": 0}]
    assert supervised(monkeypatch, folder, 1, *rows) == 0
    assert not psutil.pid_exists(int((folder / "left").read_text()))
    assert foreign.exists() and not dead.exists() and not segment.exists()


def test_a_supervisor_below_another_is_refused(monkeypatch, folder):
    monkeypatch.setenv(supervisor.SUPERVISED, "4711")
    with pytest.raises(ConfigError, match="process 4711 starts this run again already"):
        supervised(monkeypatch, folder, 1, {"end": 0})
    assert not starts(folder)


@pytest.mark.parametrize("given", ["-1", "0", "many"])
def test_a_number_of_restarts_that_is_none_is_usage(capsys, given):
    with pytest.raises(SystemExit) as ended:
        main(["train", "parallel_configs/tiny-moe/cpu.yaml", "--restarts", given])
    assert ended.value.code == ConfigError.exit_code
    assert "--restarts" in capsys.readouterr().err


def test_every_start_gets_the_arguments_of_the_command(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(supervisor, "supervise", lambda *arguments: given.append(arguments) or 0)
    preset = "parallel_configs/tiny-moe/cpu.yaml"
    more = ["--recipe", "grpo", "--set", "trainer.save_freq=-1", "--set", "rollout.n=4", "--run-dir", str(tmp_path)]
    main(["train", preset, *more, "--resume", "--restarts", "3"])
    ((arguments, folder, restarts),) = given
    assert (folder, restarts) == (tmp_path, 3)
    sets = ["--set=trainer.save_freq=-1", "--set=rollout.n=4"]
    assert arguments == [preset, "--recipe=grpo", f"--run-dir={tmp_path}", *sets, "--resume"]
