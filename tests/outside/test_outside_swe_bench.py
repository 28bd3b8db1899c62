"""Tasks of SWE-bench count as solved where swebench's own package says so, by what it reads of pytest's logs."""

import pytest
from golden import differences, golden

from mrl.acting.sandboxes.sandbox import Ran
from mrl.acting.sandboxes.task_rows import swe_bench
from mrl.acting.sandboxes.tasks import Task

PARSERS = sorted({case["parser"] for case in golden("swe_bench")})


def solves(case: dict) -> bool:
    row = {
        "image": "a", "eval_script": "b", "problem_statement": "c", "log_parser": case["parser"],
        "FAIL_TO_PASS": case["fail_to_pass"], "PASS_TO_PASS": case["pass_to_pass"],
    }  # fmt: skip
    task = Task.of(swe_bench(row)["extra_info"])
    return task.share(Ran(1, case["log"].encode()), 0.0) == 1.0


@pytest.mark.parametrize("parser", PARSERS)
def test_a_task_is_solved_where_swebench_says_so(parser):
    cases = [case for case in golden("swe_bench") if case["parser"] == parser]
    assert len(cases) == 600 and 100 < sum(case["resolved"] for case in cases) < 500
    differing = [case for case in cases if solves(case) != case["resolved"]]
    row = differences("swe_bench").get(parser.removeprefix("parse_log_"), {"cases": 0})
    assert len(differing) == row["cases"]
    for case in differing:  # a cut name for which tests do not agree is taken for the last of them
        assert solves(case) and any(name.count("[") > name.count("]") for name in case["pass_to_pass"])
