"""Numbers a row, errors and wishes go between ranks over gloo, also to a rank of an earlier pipeline stage."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from exchange_rank import ROWS

from mrl.process.free_ports import free_port
from mrl.rank.exchange import Exchange

WORKER = Path(__file__).with_name("exchange_rank.py")


@pytest.fixture(scope="module")
def said() -> list[dict]:
    done = subprocess.run([sys.executable, WORKER, str(free_port())], stdout=subprocess.PIPE, timeout=100, check=True)
    return json.loads(done.stdout)


def test_all_ranks_have_the_numbers_of_all_rows_bit_by_bit_in_the_steps_order(said):
    expected = {
        "lots": np.array([2**64 - 1, 2**53 + 1, 3, 4, 5], np.uint64),
        "floats": np.array([0.1, -0.0, np.nan, np.inf, 1e-310]),
        "flags": np.arange(ROWS) > 2,
        "small": np.arange(ROWS).astype(np.float16),
    }
    for rank in said:
        for name, values in expected.items():
            assert rank[name] == [values.dtype.str, values.tobytes().hex()], name


def test_parts_come_in_rank_order_from_those_that_gave_some_whatever_their_sizes(said):
    assert all(rank["parts"] == [{}, {"none": [], "table": [[0, 1], [2, 3]]}] for rank in said)


def test_all_ranks_end_with_the_words_of_the_one_that_failed_at_any_stage(said):
    assert [rank["rank 0 fails"] for rank in said] == ["NumericAbort: not finite"] * 3
    others = "FailedElsewhere: rank 2 failed: a defect"
    assert [rank["rank 2 fails"] for rank in said] == [others, others, "ValueError: a defect"]


def test_all_ranks_stop_where_one_was_asked_to(said):
    assert [rank["stops"] for rank in said] == ["Interrupted: the ranks were asked to stop"] * 3


def test_a_row_that_nobody_gives_is_told():
    with pytest.raises(RuntimeError, match=r"no rank answered for rows \[1\]"):
        Exchange(lambda data: [data], 0, 3).rows(np.array([0, 2]), {"a": np.zeros(2)})
