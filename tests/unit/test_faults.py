"""Faults one by one (tests/proofs): seconds of a fault by the lines that a run prints, and which runs it makes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).resolve().parents[1] / "proofs"))

import faults

SAID = (
    ("fault: engines started in 12.50 s\n", 20.0),
    ("fault: loop begins\n", 30.0),
    ("engine 1 serves again, with the weights of step 3\n", 31.0),  # of another loss, before
    ("fault: sent\n", 40.0),
    ("engine 0 is lost: it died\n", 41.5),
    ("engine 0 serves again, with the weights of step 1\n", 49.0),
    ("engine 0 is lost: once more\n", 60.0),
)


def test_seconds_are_those_of_the_first_line_behind_the_signal():
    found = {}
    for text, now in SAID:
        faults.take(found, text, now)
    assert found.pop("said") == "engine 0 is lost: it died"
    assert found == {"engines_start_s": 12.5, "loop": 30.0, "sent": 40.0, "noticed": 41.5, "back": 49.0}


def test_ranks_are_back_when_the_driver_says_so():
    found = {}
    said = "update: rank 1 died\nafter step 2 the ranks are started again\n"
    for text, now in (("fault: sent\n", 1.0), (said, 2.0)):
        faults.take(found, text, now)
    assert "back" not in found
    faults.take(found, "fault: ranks are back\n", 9.0)
    assert (found["noticed"], found["back"], found["said"]) == (2.0, 9.0, "update: rank 1 died")


def test_who_was_stopped_is_told_to_go_on_once_the_run_has_noticed_it(tmp_path):
    """Not before, and once; a process that is gone by then is none."""
    with subprocess.Popen(["sleep", "60"]) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        wait_for(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED)
        gone = subprocess.Popen(["true"])
        gone.wait()
        log = tmp_path / "log"
        log.write_text(f"fault: sent\nfault: stopped {stopped.pid} {gone.pid}\n")

        class Run:
            looks = 0

            def poll(self):
                self.looks += 1
                if self.looks == 3:
                    assert psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED
                    log.write_text(log.read_text() + "engine 0 is lost: no token for 10 s\n")
                return 0 if self.looks == 5 else None

        found = faults.follow(Run(), log, tmp_path, time.monotonic(), tmp_path / "fired")
        assert found["continued"] == 1 and "stopped" not in found
        wait_for(lambda: psutil.Process(stopped.pid).status() != psutil.STATUS_STOPPED)
        stopped.kill()


def wait_for(happened) -> None:
    deadline = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_that_crashes_by_itself_is_given_its_place_and_the_file_that_says_when(tmp_path, monkeypatch):
    """The undisturbed one is not, and neither is one to whose processes a signal is sent."""
    given = {}

    class Process:
        returncode = 0

        def __init__(self, command, env, **_):
            given[command[3]] = env.get("MRL_CRASH_AT")

        def wait(self):
            return 0

    monkeypatch.setattr(faults.subprocess, "Popen", Process)
    monkeypatch.setattr(faults, "follow", lambda *_: {})
    made = faults.Faults(tmp_path, tmp_path)
    row = faults.Row("rank 1 collective:400", "rank", "skip")
    sent = faults.Row("ranks update", "rank")
    made._run(sent, sent.name, True)
    assert given == {"ranks update": None}
    made._run(row, row.whole, False)
    assert given.pop("none") is None
    made._run(row, row.name, True)
    assert given["none"] == f"rank 1 collective:400:skip:{tmp_path / row.name}.fired"


def test_a_row_is_held_against_the_same_step_of_the_undisturbed_run(tmp_path, monkeypatch):
    row = faults.Row("ranks update", "rank")
    whole = {"loop": 30.0, "lines": [36.0, 38.0, 41.0], "engines_start_s": 12.5}
    own = {"loop": 30.0, "lines": [36.0, 60.0, 62.0], "sent": 37.0, "noticed": 38.5, "back": 55.0}
    for name, run in ((row.whole, whole), (row.name, own)):
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    made = faults.Faults(tmp_path, tmp_path)
    monkeypatch.setattr(made, "_difference", lambda row: None)
    result = made.result(row)
    assert (result["noticed_s"], result["back_s"], result["stood_s"], result["step_s"]) == (1.5, 18.0, 22.0, 2.0)


def test_an_undisturbed_run_is_made_once_for_all_rows_that_it_is_for_and_no_run_twice(tmp_path, monkeypatch):
    made = faults.Faults(tmp_path, tmp_path)
    ran = []
    monkeypatch.setattr(made, "_run", lambda row, name, disturbed: ran.append(name) or {})
    assert list(made.missing()) == ran and len(set(ran)) == len(ran)
    assert set(ran) == {row.name for row in faults.ROWS} | {row.whole for row in faults.ROWS}
    assert list(made.missing()) == []


def test_a_row_keeps_the_name_under_which_its_run_is_stored():
    assert faults.Row("ranks update", "rank").name == "ranks_update-rank-SIGKILL-1-sync"
    assert faults.Row("engines wake", "vllm", shares=True).name == "engines_wake-vllm-SIGKILL-1-sync-shares"
    assert faults.Row("engines wake", "vllm", shares=True).whole == "whole-sync-1-shares"
    assert len({row.name for row in faults.ROWS}) == len(faults.ROWS)
