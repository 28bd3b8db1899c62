"""What scripts/bench/cold_start.py counts as the first answer and the first step, and how parts are told."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("cold_start", ROOT / "scripts" / "bench" / "cold_start.py")
cold_start = sys.modules["cold_start"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cold_start)
Mark = cold_start.Mark

MARKS = [
    Mark("import torch", 7, 1.0, 2.0),
    Mark("import torch", 8, 1.5, 3.0),
    Mark("VllmEngine._complete", 7, 6.0, 0.5),  # of the start-up check
    Mark("VllmEngine._check_order", 7, 5.5, 2.0),
    Mark("VllmEngine._complete", 7, 9.0, 0.5),
    Mark("VllmEngine._complete", 7, 9.0, 1.5),
    Mark("train_step", 6, 8.5, 4.0),
    Mark("train_step", 6, 13.0, 1.0),
]


def test_the_first_answer_is_none_of_the_start_up_checks_and_the_first_step_ends_with_it():
    told = cold_start.told(MARKS)
    assert (told["first_answer_s"], told["first_step_s"]) == (9.5, 12.5)


def test_a_part_of_several_processes_is_told_once_with_the_longest():
    parts = cold_start.parts(MARKS)
    assert parts["import torch"] == {"began": 1.0, "seconds": 3.0, "processes": 2}
    assert "VllmEngine._complete" not in parts, "one a request"


@pytest.mark.parametrize("missing", ["VllmEngine._complete", "train_step"])
def test_parts_that_have_other_names_by_now_are_said_to_be_missing(missing):
    with pytest.raises(SystemExit, match="its parts have other names by now"):
        cold_start.told([mark for mark in MARKS if mark.name != missing])


def test_marks_are_written_by_any_process_and_functions_stay_what_they_are(tmp_path):
    program = (
        "import mrl.driver.preflight as timed\n"
        "assert timed.check_inputs.__name__ == 'check_inputs' and timed.check_inputs.__wrapped__\n"
    )
    paths = f"{ROOT / 'scripts' / 'bench' / 'cold_marks'}:{ROOT}"
    environment = {"PYTHONPATH": paths, "MRL_COLD_MARKS": str(tmp_path / "marks"), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
    (mark,) = [mark for mark in cold_start.read(tmp_path / "marks", 0.0) if mark.name == "import mrl.driver.preflight"]
    assert mark.seconds > 0
