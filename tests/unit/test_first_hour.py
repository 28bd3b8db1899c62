"""The script of the first hour: what it asks of a message, and that the stored result is of its steps and mistakes."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("first_hour", ROOT / "tests" / "proofs" / "first_hour.py")
hour = sys.modules["first_hour"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hour)
MISTAKE = hour.Mistake("a port in use", "true", 4, ["is in use"])


def ran(code: int, message: str):
    return hour.Ran("a port in use", "true", code, 1.0, 1.0, message)


@pytest.mark.parametrize(
    ("code", "message", "faults"),
    [
        (4, "port 1 is in use", []),
        (1, "port 1 is in use", ["ended with 1, not 4"]),
        (4, "port 1 is taken", ["no 'is in use'"]),
        (4, "Traceback (most recent call last):\nport 1 is in use", ["a traceback"]),
    ],
)
def test_a_mistake_is_told_by_its_code_and_words_and_no_traceback(code, message, faults):
    assert hour.judged(MISTAKE, ran(code, message)) == faults


def test_a_step_ends_with_its_own_code_and_words():
    step = hour.Step("a job for another's head", "true", code=4, words=["another token"])
    assert hour.wrong([(step, ran(4, "requires another token"))]) == []
    (line,) = hour.wrong([(step, ran(0, "succeeded"))])
    assert "no 'another token', ended with 0, not 4: succeeded" in line


def test_the_line_that_says_it_is_stored_and_no_folder_of_the_machine(tmp_path):
    told = ran(4, f"first\n  {tmp_path}/x: port 1 is in use\nlast")
    (row,) = hour.mistakes_of([(MISTAKE, told)], tmp_path)["rows"]
    assert row["said"] == "./x: port 1 is in use" and str(tmp_path) not in json.dumps(row)


def test_the_clock_and_the_processors_are_each_held_to_the_limit(tmp_path):
    slow, heavy = (hour.Ran(name, "", 4, clock, cpu, "is in use") for name, clock, cpu in (("a", 3, 1), ("b", 1, 3)))
    result = hour.mistakes_of([(MISTAKE, slow), (MISTAKE, heavy)], tmp_path)
    assert (result["above_the_limit"], result["above_the_limit_on_the_processors"]) == (["a"], ["b"])


def test_a_mistake_that_took_long_is_made_again_and_the_shortest_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(hour, "LIMIT_S", 0.5)
    slow_once = f"test -e {tmp_path}/done || {{ touch {tmp_path}/done; sleep 0.6; }}; exit 4"
    found = hour.shortest(hour.Mistake("slow", slow_once, 4, [""]), tmp_path, {"PATH": "/usr/bin:/bin"})
    assert found.seconds < hour.LIMIT_S and found.code == 4


def test_launchs_commands_are_steps_as_their_page_has_them():
    of_launch = [step.command for step in hour.steps() if step.of_launch]
    written = hour.launch_commands()
    assert [command for command in of_launch if command in written] == written and written[0] == "launch/start_head.sh"


def test_the_stored_result_is_of_these_steps_and_mistakes():
    """Each told as it has to be; a step may be left out where the command says so."""
    stored = json.loads(hour.RESULTS.read_text(encoding="utf-8"))
    done, told = stored["steps"], stored["mistakes"]
    wanted = [(step.name, step.code) for step in hour.steps() if repr(step.name) not in done["command"]]
    assert [(row["name"], row["code"]) for row in done["rows"]] == wanted
    known = {mistake.name: mistake for mistake in hour.mistakes(1)}
    lacking = known.keys() - {row["name"] for row in told["rows"]}
    assert all(known[name].of_a_run for name in lacking), "those of a run need one"
    assert all(row["code"] == known[row["name"]].code for row in told["rows"])
    slow = [row["name"] for row in told["rows"] if row["seconds"] > told["limit_s"]]
    assert told["above_the_limit"] == slow
