"""Responses whose environment failed, in the groups that a step is made of: no failed rewards, and no values."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from replicas import stored

from mrl.config.load import load_config
from mrl.data.order import DataCursor
from mrl.data.samples import Sample
from mrl.driver.reporting import sample_metrics, time_metrics
from mrl.errors import DataError, EnvironmentFault, NumericAbort
from mrl.generate.group_writer import GroupParts
from mrl.generate.judged_groups import JudgedGroups
from mrl.generate.rollouts import Judge, group_metrics
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


def rollouts_of(reasons: list[str], share: float = 1.0):
    config = load_config(
        TINY, None, [f"reward.max_failure_share={share}", "algorithm.overlong_buffer={enable: true, len: 4}"]
    ).config
    lengths = (2, 4, 8)
    rows = stored([Sample(0, 0, i, 0, (1,), (2,) * n, (0.0,) * n, "stop", 0) for i, n in enumerate(lengths)])
    results = [replace(result(i, 1.0), reason=reason) for i, reason in enumerate(reasons)]
    return config, Judge(config.algorithm, config.reward, 8).rollouts(rows, results, DataCursor(), {})


def test_what_was_sampled_is_measured_as_it_was_sampled_whatever_became_of_it():
    """Lengths 2, 4 and 8 have the mean 14 / 3, also where the last has log-probs that are no numbers; of the penalty
    of 1 at 8 tokens of 8, half of it behind 4, nobody who is not judged has a part.
    """
    config, found = rollouts_of([OK, OK, NOT_FINITE])
    assert sample_metrics(config.data, 0, found)["response_length/mean"] == 14 / 3
    assert found.samples.rows.sampled_lengths.tolist() == [2, 4, 0]
    timed = time_metrics(config.trainer, 1, SimpleNamespace(seconds={"gen": 14.0}, metrics=dict), found)
    assert timed["timing_per_token_ms/gen"] == 1000.0
    assert found.metrics["train/overlong_penalty_mean"] == 0.0
    assert rollouts_of([OK, OK, OK])[1].metrics["train/overlong_penalty_mean"] == pytest.approx(-1 / 3)


def test_a_step_without_one_finite_log_prob_ends_the_run_whatever_share_may_fail():
    with pytest.raises(NumericAbort, match="of 3 responses all that have a token have log-probs that are not finite"):
        rollouts_of([NOT_FINITE] * 3)


def test_shares_of_what_nobody_judged_are_of_all_that_was_generated():
    """A group all of whose log-probs are no numbers does not differ, and is filtered: it has to be seen."""
    made = [result(0, 1.0), result(1, NOT_FINITE), result(2, NOT_FINITE), result(3, LEFT_OUT)]
    metrics = group_metrics(1.0, 0.5, 1, made)
    assert (metrics["train/not_finite_share"], metrics["turns/left_out"]) == (0.5, 0.25)
    assert not {"train/not_finite_share", "turns/left_out"} & group_metrics(1.0, 0.0, 1, made[:1]).keys()
