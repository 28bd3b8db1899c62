"""Which tests run for a mutant, and that one whose text is gone is not passed over: tests/proofs/mutants.py."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tests" / "proofs" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


FILES = {
    "helper.py": "from mrl.algo import losses\n",
    "test_through_a_helper.py": "from helper import x\n",
    "test_by_name.py": "def test(monkeypatch):\n    monkeypatch.setattr('mrl.algo.losses.K3_LIMIT', 1)\n",
    "test_itself.py": "import mrl.algo.losses\n",
    "test_its_package.py": "from mrl.algo.rows import total\n",
    "test_mutants.py": "import mrl.algo.losses\n",  # which sees each by its text
    "test_elsewhere.py": "from mrl.schedule.rate import Rate\n",
}


def test_files_that_name_the_module_come_first_and_those_of_its_package_then(runner, tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    mutant = runner.Mutant("mrl/algo/losses.py", "a", "b", "why")
    assert (mutant.module, mutant.room) == ("mrl.algo.losses", "algo")
    found = [(stage, sorted(files)) for stage, files in runner.stages(mutant, runner.modules_of_tests(tmp_path))]
    assert found == [
        ("direct", ["test_by_name.py", "test_itself.py"]),
        ("helper", ["test_through_a_helper.py"]),
        ("package", ["test_its_package.py"]),
    ]


@pytest.mark.parametrize("text", ["x = 1\n", "y = 2\nx = 2\nx = 2\n"], ids=["gone", "twice"])
def test_a_mutant_whose_text_is_not_there_exactly_once_is_stale(runner, text):
    with pytest.raises(ValueError, match=r"stale: its text is there [02] times"):
        runner.Mutant("mrl/a.py", "x = 2", "x = 3", "why").applied(text)


def test_a_mutant_is_code_that_python_reads_and_changes_one_place(runner):
    assert runner.Mutant("mrl/a.py", "x = 2", "x = 3", "why").applied("x = 2\ny = 2\n") == "x = 3\ny = 2\n"
    with pytest.raises(SyntaxError):
        runner.Mutant("mrl/a.py", "x = 2", "x =", "why").applied("x = 2\n")


def test_each_of_ours_stands_in_the_code_and_says_what_is_wrong(runner):
    listed = runner.mutants()  # raises for one that is stale or listed twice
    assert len(listed) >= 100 and all(mutant.why and mutant.file.startswith("mrl/") for mutant in listed)
