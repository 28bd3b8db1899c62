"""A crash point does what its variable says, once, at its place and nowhere else; without the variable nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.rank import rank_worker as workers

PROGRAM = """
from mrl.crash_points import crash_point
from mrl.errors import MrlError
try:
    for number in range(4):
        for place in ("rank 0", "rank 1"):
            if crash_point(*place.split(), "update"):
                print(place, number, "leaves out", flush=True)
            else:
                print(place, number, flush=True)
except MrlError as error:
    print(error)
"""
ALL = [f"rank {rank} {number}" for number in range(4) for rank in (0, 1)]


def run(wanted: str | None) -> tuple[int, list[str]]:
    environment = {name: value for name, value in os.environ.items() if name != "MRL_CRASH_AT"}
    if wanted is not None:
        environment["MRL_CRASH_AT"] = wanted
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True)
    return done.returncode, done.stdout.splitlines()


def test_it_ends_the_process_at_its_place_and_once_only(tmp_path):
    wanted = f"rank 1 update:2:SIGKILL:{tmp_path / 'fired'}"
    assert run(wanted) == (-signal.SIGKILL, ALL[:3])
    assert run(wanted) == (0, ALL), "the next start goes on"


def test_what_comes_next_is_left_out_once(tmp_path):
    code, said = run(f"rank 0 update:3:skip:{tmp_path / 'fired'}")
    assert code == 0
    assert said == [*ALL[:4], "rank 0 2 leaves out", *ALL[5:]]


def test_another_place_and_no_variable_are_nothing(tmp_path):
    assert run(f"rank 2 update:1:SIGKILL:{tmp_path / 'fired'}") == (0, ALL)
    assert not (tmp_path / "fired").exists()
    assert run(None) == (0, ALL)


@pytest.mark.parametrize(
    "text", ["", "rank 0", "rank 0 update:x:SIGKILL:/f", "rank 0 update:1:SIGNONE:/f", "a:1:skip:"]
)
def test_a_variable_that_says_nothing_is_refused(text):
    code, said = run(text)
    assert code == 0
    assert said == [
        f"MRL_CRASH_AT={text} is no crash point; write PLACE:NTH:ACTION:FILE with a signal or skip, or unset it"
    ]


class Reached(Exception):
    pass


def reach(*place: object) -> None:
    raise Reached(*place)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("score_by", ["teacher", None, None]), ("update_critic", []), ("update", [])],
)
def test_a_rank_comes_to_one_before_it_begins_what_it_is_asked(method, arguments, monkeypatch):
    monkeypatch.setattr(workers, "crash_point", reach)
    worker = workers.ActorWorker.__new__(workers.ActorWorker)
    worker.rank = 3
    with pytest.raises(Reached) as reached:
        getattr(worker, method)(*arguments)
    assert reached.value.args == ("rank", 3, method)


def test_there_is_one_name_for_it():
    """Whoever else reads the environment for a crash would be a second way."""
    root = Path(__file__).resolve().parents[2] / "mrl"
    readers = [file.name for file in root.rglob("*.py") if "MRL_CRASH" in file.read_text(encoding="utf-8")]
    assert readers == ["crash_points.py"]
