"""The table of faults (docs/source/faults.yaml): every row has tests, and every test that it names is there."""

import copy
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("claims", ROOT / "scripts" / "claims.py")
claims = importlib.util.module_from_spec(_spec)
sys.modules["claims"] = claims
_spec.loader.exec_module(claims)

ROWS = 25


@pytest.fixture
def table() -> dict:
    return copy.deepcopy(claims.load(claims.FAULTS))


def faults(rows: list[dict]) -> list[str]:
    return claims.fault_faults(rows, claims.results(claims.load()))


def test_there_are_25_rows_and_none_without_a_test_that_is_there(table):
    assert len(table["matrix"]) == ROWS
    assert faults(table["matrix"]) == []
    assert faults(table["bad_input"]) == []
    titles = [row["fault"] for row in [*table["matrix"], *table["bad_input"]]]
    assert len(set(titles)) == len(titles)


GONE = {
    "a file that is gone": ("tests", ["unit/test_no_more.py::test_x"], "no unit/test_no_more.py::test_x"),
    "a function that is gone": ("tests", ["unit/test_spool.py::test_x"], "no unit/test_spool.py::test_x"),
    "a file alone": ("tests", ["unit/test_spool.py"], "no unit/test_spool.py"),
    "no test": ("tests", [], "no test"),
    "no such result": ("results", ["no_more"], "no result no_more"),
    "nothing that must happen": ("must", "", "no must"),
    "a long cell": ("must", "so " * 41, "more than 40 words"),
}


@pytest.mark.parametrize(("key", "value", "said"), GONE.values(), ids=GONE)
def test_what_is_wrong_with_a_row_is_one_message(table, key, value, said):
    row = table["matrix"][0] | {key: value}
    (fault,) = faults([row])
    assert said in fault


def test_a_test_is_said_to_be_long_where_all_of_it_is():
    functions = claims.functions("tests/real/test_rank_restart.py")
    assert functions["test_ranks_come_back_inside_the_run_and_change_no_bit"]
    assert not functions["test_a_rank_comes_back_inside_the_run_and_changes_no_bit"]
    assert all(claims.functions("tests/real/test_submit.py").values()), "a file that is marked as a whole"


def test_the_page_has_every_row_with_its_tests_and_what_it_lacks(table):
    made = claims.fault_table(table["matrix"], claims.results(claims.load()))
    for number, row in enumerate(table["matrix"], 1):
        (line,) = [line for line in made.splitlines() if line.startswith(f"| {number} | {row['fault']} |")]
        assert all(test.partition("::test_")[2] in line for test in row["tests"])
        assert row.get("lacks", "") in line
    text = (ROOT / "docs" / "source" / "evidence.txt").read_text()
    assert "{faults}" in text and "{bad_input}" in text
