"""What a step runs is noted by a hook outside of production, in threads and forks too, and counted by process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "scripts" / "executed"
PROGRAM = """
import os, threading
from mrl.plain_files import parse_json
from mrl.whole_file import appears_whole
from mrl.data.order import DataCursor

def in_a_thread():
    parse_json("{}", "a text")

thread = threading.Thread(target=in_a_thread)
thread.start()
thread.join()
if os.fork() == 0:
    DataCursor()
    os._exit(0)
os.wait()
"""


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("sitecustomize", "measure"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("measure", FOLDER / "measure.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "measure", module)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("sitecustomize", None)


def test_functions_of_threads_and_objects_of_a_fork_are_noted(measure, tmp_path):
    environment = os.environ | {"PYTHONPATH": f"{FOLDER}{os.pathsep}{ROOT}", "EXECUTED_FOLDER": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, cwd=tmp_path)
    first, fork = sorted(map(measure.Process.of_file, tmp_path.iterdir()), key=lambda one: -len(one.ran))
    names = {(ran.file, ran.name) for ran in first.ran}
    assert ("plain_files.py", "parse_json") in names and ("whole_file.py", "appears_whole") not in names
    assert first.modules() == fork.modules() >= {"plain_files.py", "whole_file.py", "data/order.py"}
    assert [ran.name for ran in fork.ran if not ran.last] == ["DataCursor"]


def line(seconds: float, what: str) -> str:
    return f"{round(seconds / 0.02)} {what}\n"


def test_what_ran_within_the_measured_step_is_counted(measure, tmp_path, monkeypatch):
    """Neither what ran before it alone, nor modules' own lines; a verb is what `do` was told."""
    monkeypatch.setattr(measure, "MEASURED", 1)
    driver = "".join(f"{at} {event}\n" for at, event in ((1, "call"), (2, "return"), (3, "call"), (5, "return")))
    driver += (
        line(4, "errors.py 10 19 train_step") + line(1.5, "errors.py 20 29 first") + line(4, "errors.py 1 1 <module>")
    )
    rank = line(0, "units.py 1 9 ActorWorker.__init__") + line(4, "worker.py 1 9 ActorWorker.do")
    rank += line(4, "worker.py 1 9 ActorWorker.do:update") + line(4.5, "worker.py 5 14 ActorWorker.score")
    rank += line(4, "worker.py 20 21 ActorWorker._helper") + line(4, "mrl.a 0 0 Rows") + line(6, "mrl.a 0 0 Late")
    for number, text in enumerate((driver, rank)):
        (tmp_path / str(number)).write_text(text)
    found = measure.measured(tmp_path)
    counted = {
        kind: [one[key] for key in ("functions", "files", "lines", "types")]
        for kind, one in found["by_process"].items()
    }
    assert counted["driver"] == [1, 1, 10, []] and counted["rank"] == [3, 1, 16, ["Rows"]]
    assert counted["all"] == [4, 2, 26, ["Rows"]]
    assert found["verbs"] == {"rank": ["score", "update"], "engine": []}
