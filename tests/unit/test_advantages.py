"""Group advantages and the mismatch between generation and training."""

import math

import numpy as np
import pytest

from mrl.algo.advantages import ADVANTAGE_FUNCTIONS, compute_advantages, grpo
from mrl.algo.mismatch import mismatch_metrics
from mrl.algo.spec import ADVANTAGES
from mrl.errors import ConfigError, NumericAbort
from mrl.record.spec import metric_spec


def test_every_advantage_in_the_table_has_an_implementation():
    assert set(ADVANTAGE_FUNCTIONS) == set(ADVANTAGES)


def test_grpo_worked_by_hand():
    """Scores 1, 0, 0, 1: mean 1/2, unbiased variance 4 x 1/4 / 3 = 1/3."""
    std = math.sqrt(1 / 3)
    expected = np.array([0.5, -0.5, -0.5, 0.5]) / (std + 1e-6)
    np.testing.assert_allclose(grpo(np.array([1.0, 0, 0, 1]), np.zeros(4)), expected, rtol=1e-14)


def test_dr_grpo_subtracts_the_mean_and_divides_by_nothing():
    np.testing.assert_allclose(grpo(np.array([3.0, 1, 2, 6]), np.array([7, 7, 9, 9]), False), [1, -1, -2, 2])


def test_groups_do_not_see_each_other_and_may_be_interleaved():
    rng = np.random.default_rng(0)
    scores, groups = rng.normal(size=12), np.array([5, 2, 5, 9, 2, 9, 5, 2, 9, 5, 2, 9])
    together = grpo(scores, groups)
    for group in (2, 5, 9):
        alone = scores[groups == group]
        np.testing.assert_allclose(together[groups == group], (alone - alone.mean()) / (alone.std(ddof=1) + 1e-6), rtol=1e-12)


@pytest.mark.parametrize("score", [0.0, 1.0, 0.1, 1e9 + 0.1])
@pytest.mark.parametrize("normalised", [True, False])
def test_equal_scores_give_exactly_zero(score, normalised):
    assert (grpo(np.full(7, score), np.zeros(7), normalised) == 0.0).all()


def test_a_group_of_one_keeps_its_score_as_in_verl():
    np.testing.assert_allclose(grpo(np.array([2.0]), np.array([3])), [2.0 / (1 + 1e-6)], rtol=1e-14)
    np.testing.assert_allclose(grpo(np.array([2.0]), np.array([3]), False), [2.0])


def test_a_responses_advantage_stands_on_its_tokens_only():
    mask = np.array([[True, True], [True, False]])
    out = compute_advantages("grpo", np.array([1.0, 0.0]), np.array([0, 0]), mask, norm_adv_by_std_in_grpo=False)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, [[0.5, 0.5], [-0.5, 0.0]])
    with pytest.raises(ConfigError, match="grpo"):
        compute_advantages("nope", np.array([1.0]), np.array([0]), mask[:1])


def test_mismatch_worked_by_hand():
    """Probabilities 0.5 against 0.25 and 0.2 against 0.4; the third token is padding."""
    rollout, actor = np.log([[0.5, 0.2, 0.9]]), np.log([[0.25, 0.4, 0.1]])
    metrics = mismatch_metrics(rollout, actor, np.array([[True, True, False]]))
    log2 = math.log(2)
    expected = {
        "training/rollout_probs_diff_mean": 0.225,
        "training/rollout_probs_diff_max": 0.25,
        "training/rollout_probs_diff_std": 0.05 / math.sqrt(2),
        "training/rollout_log_probs_abs_diff_mean": log2,
        "training/rollout_log_probs_abs_diff_max": log2,
        "training/rollout_actor_probs_pearson_corr": -1.0,
        "rollout_corr/kl": 0.0,
        "rollout_corr/k3_kl": ((0.5 + log2 - 1) + (2 - log2 - 1)) / 2,
    }
    assert metrics == pytest.approx(expected, abs=1e-12)
    assert all(metric_spec(name) for name in metrics)


def test_equal_log_probs_have_no_mismatch():
    log_probs = -np.random.default_rng(0).random((3, 4))
    metrics = mismatch_metrics(log_probs, log_probs, np.ones((3, 4), bool))
    assert metrics.pop("training/rollout_actor_probs_pearson_corr") == pytest.approx(1.0)
    assert set(metrics.values()) == {0.0}


def test_one_token_and_no_token_give_finite_answers():
    one = np.array([[-1.0]])
    assert all(math.isfinite(v) for v in mismatch_metrics(one, one, np.array([[True]])).values())
    assert mismatch_metrics(one, one, np.array([[False]])) == {}


def test_a_log_prob_that_is_not_finite_stops_the_run_and_says_where():
    bad = np.array([[-1.0, -1.0], [-1.0, np.nan]])
    with pytest.raises(NumericAbort, match=r"old_log_probs.*row 1, token 1"):
        mismatch_metrics(np.zeros((2, 2)), bad, np.ones((2, 2), bool))
    assert mismatch_metrics(np.zeros((2, 2)), bad, np.array([[True, True], [True, False]]))
