"""The table of faults (docs/source/faults.yaml): every row has tests, and every test that it names is there."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import fault_rows

ROWS = 25


def test_there_are_25_rows_and_none_without_a_test_that_is_there():
    table = fault_rows.rows()
    assert len(table["matrix"]) == ROWS
    assert fault_rows.wrong(table["matrix"]) == [] == fault_rows.wrong(table["bad_input"])
    titles = [row["fault"] for row in [*table["matrix"], *table["bad_input"]]]
    assert len(set(titles)) == len(titles)


GONE = {
    "a file that is gone": ("tests", ["unit/test_no_more.py::test_x"], "no unit/test_no_more.py::test_x"),
    "a function that is gone": ("tests", ["unit/test_spool.py::test_x"], "no unit/test_spool.py::test_x"),
    "a file alone": ("tests", ["unit/test_spool.py"], "no unit/test_spool.py"),
    "no test": ("tests", [], "no tests"),
    "nothing that must happen": ("must", "", "no must"),
}


@pytest.mark.parametrize(("key", "value", "said"), GONE.values(), ids=GONE)
def test_what_is_wrong_with_a_row_is_one_message(key, value, said):
    (fault,) = fault_rows.wrong([fault_rows.rows()["matrix"][0] | {key: value}])
    assert said in fault


def test_a_test_is_said_to_be_long_where_all_of_it_is():
    functions = fault_rows.functions("real/test_rank_restart.py")
    assert functions["test_ranks_come_back_inside_the_run_and_change_no_bit"]
    assert not functions["test_a_rank_comes_back_inside_the_run_and_changes_no_bit"]
    assert all(fault_rows.functions("real/test_submit.py").values()), "a file that is marked as a whole"
