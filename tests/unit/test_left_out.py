"""Responses whose environment failed, in the groups that a step is made of: no failed rewards, and no values."""

import pytest
from replicas import stored

from mrl.config.load import load_config
from mrl.data.samples import Sample
from mrl.errors import DataError, EnvironmentFault, NumericAbort
from mrl.flow.group_writer import GroupParts
from mrl.reward.items import (
    FELL,
    LEFT_OUT,
    NOT_FINITE,
    OK,
    RAISED,
    RewardResult,
    failure_counts,
    failures_at_the_bottom,
)
from mrl.train.judged_groups import JudgedGroups
from mrl.train.rollouts import Judge

TINY = "parallel_configs/tiny-moe/cpu.yaml"


def judged(*groups: list[float | str], share: float = 0.5) -> JudgedGroups:
    """Groups of three: a score, or the reason why there is none."""
    config = load_config(TINY, None, [f"reward.max_failure_share={share}"]).config
    made = JudgedGroups(Judge(config.algorithm, config.reward, 8), None, 3, None)
    for number, scores in enumerate(groups):
        rows = stored([Sample(0, 0, i, 0, (1,), (2,), (0.0,), "stop", 0) for i in range(3)])
        responses = {i: rows.row(i) for i in range(3)}
        results = {i: result(3 * number + i, score) for i, score in enumerate(scores)}
        made.made[number] = GroupParts(number, 0, responses, results)
    return made


def result(sample_id: int, score: float | str) -> RewardResult:
    if score == FELL:
        return RewardResult(sample_id, 0.0, {}, LEFT_OUT, f"act: {FELL}", "toy")
    if isinstance(score, str):
        return RewardResult(sample_id, 0.0, {}, score, "act: timeout", "toy")
    return RewardResult(sample_id, score, {}, OK, "", "toy")


@pytest.mark.parametrize(
    ("scores", "differs"),
    [
        ([1.0, 0.0, LEFT_OUT], True),
        ([1.0, 1.0, LEFT_OUT], False),  # its 0 would be another
        ([1.0, LEFT_OUT, LEFT_OUT], False),
        ([LEFT_OUT, LEFT_OUT, LEFT_OUT], False),
        ([1.0, 0.0, NOT_FINITE], True),
        ([1.0, 1.0, NOT_FINITE], False),
    ],
)
def test_a_group_differs_in_what_was_judged(scores, differs):
    groups = judged(scores)
    assert groups.differs(0) == differs
    assert groups.uniform(*groups.take([0])) == (not differs)


def test_failures_of_the_two_kinds_are_bounded_apart():
    made = judged([1.0, LEFT_OUT, RAISED], [0.0, LEFT_OUT, RAISED])
    made._any_failed = True
    made.check_failures([0, 1], [], 2)  # a third each, two thirds together
    with pytest.raises(EnvironmentFault, match=r"failed in 2 of 3 responses.*\n  2 act: timeout"):
        judged([1.0, LEFT_OUT, LEFT_OUT]).check_all([result(0, 1.0), result(1, LEFT_OUT), result(2, LEFT_OUT)])
    with pytest.raises(DataError, match="the reward failed on 2 of 3 responses"):
        judged([1.0]).check_all([result(0, 1.0), result(1, RAISED), result(2, RAISED)])


def test_a_step_is_given_up_once_too_many_environments_have_failed():
    made = judged([1.0, LEFT_OUT, LEFT_OUT], [0.0, LEFT_OUT, LEFT_OUT])
    made._any_failed = True
    with pytest.raises(EnvironmentFault, match="failed in 4 of 6 responses"):
        made.check_failures([0, 1], [], 2)


def test_those_that_fell_with_anothers_process_are_no_failures_of_their_own():
    """One of six hung, and three were in its process."""
    made = judged([1.0, LEFT_OUT, FELL], [0.0, FELL, FELL], share=0.2)
    made._any_failed = True
    made.check_failures([0, 1], [], 2)
    made.check_all([*made.results_of(0), *made.results_of(1)])
    with pytest.raises(EnvironmentFault, match=r"failed in 2 of 6 responses.*\n  2 act: timeout$"):
        made.check_all([*made.results_of(0), result(8, LEFT_OUT), result(9, FELL), result(10, FELL)])


def test_log_probs_that_are_no_numbers_end_the_run_beyond_the_share():
    made = judged([1.0, 0.0, NOT_FINITE], [0.0, 1.0, LEFT_OUT], share=0.2)
    made._any_failed = True
    made.check_failures([0, 1], [], 2)
    made = judged([1.0, 0.0, NOT_FINITE], [0.0, 1.0, NOT_FINITE], share=0.2)
    made._any_failed = True
    with pytest.raises(NumericAbort, match="2 of 6 responses have log-probs that are not finite") as ended:
        made.check_failures([0, 1], [], 2)
    assert ended.value.exit_code == 6


def test_none_is_scored_at_the_bottom():
    results = [result(0, 1.0), result(1, -2.0), result(2, LEFT_OUT), result(3, RAISED)]
    assert [each.score for each in failures_at_the_bottom(results)] == [1.0, -2.0, 0.0, -2.0]
    assert failure_counts(results) == {RAISED: 1}
