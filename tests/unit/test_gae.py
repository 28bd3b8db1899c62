"""Advantages and returns from a critic's values, and its loss, against formulas written anew and verl's."""

import math

import numpy as np
import pytest
import torch

from mrl.algo.advantages import TokenAdvantages, whitened
from mrl.algo.aggregate import count
from mrl.algo.gae import estimate, token_rewards, value_moments
from mrl.algo.plain import Denominators, ValueLossParameters
from mrl.algo.rows import moments
from mrl.algo.value_loss import ValueInputs, value_loss
from mrl.rank.rank_step import value_metrics

LENGTHS = np.array([5, 0, 1, 9, 4])
SETTINGS = [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.5)]


def rows(seed=0):
    """Rewards, values and which tokens were sampled, of rows with context inside, at the end, and alone."""
    rng = np.random.default_rng(seed)
    tokens = int(LENGTHS.sum())
    sampled = np.ones(tokens, bool)
    sampled[[1, 2, 8, 9, 14]] = False  # inside, inside; inside the long row and its last token
    sampled[15:] = False  # a row of context alone
    return rng.normal(size=tokens), rng.normal(size=tokens).astype(np.float32), sampled


def summed(rewards, values, sampled, gamma, lam):
    """A_t as the sum over later temporal differences (arXiv:1506.02438, eq. 16), each written out; of one row."""
    own = np.flatnonzero(sampled)
    advantages = np.zeros(len(sampled))
    for first in range(len(own)):
        for later in range(first, len(own)):
            follows = float(values[own[later + 1]]) if later + 1 < len(own) else 0.0
            delta = rewards[own[later]] + gamma * follows - float(values[own[later]])
            advantages[own[first]] += (gamma * lam) ** (later - first) * delta
    return advantages


def verls(rewards, values, mask, gamma, lam):
    """What compute_gae_advantage_return of verl 0.9.1 (core_algos.py) does before it whitens; [rows, length]."""
    after = torch.zeros(len(values), dtype=torch.float64)
    gathered = torch.zeros(len(values), dtype=torch.float64)
    advantages = torch.zeros_like(values)
    for t in range(values.shape[1] - 1, -1, -1):
        here = mask[:, t]
        one_more = rewards[:, t] + gamma * after - values[:, t] + gamma * lam * gathered
        after = values[:, t] * here + after * (1 - here)
        gathered = one_more * here + gathered * (1 - here)
        advantages[:, t] = gathered
    return advantages, advantages + values


@pytest.mark.parametrize(("gamma", "lam"), SETTINGS)
def test_advantages_are_discounted_sums_of_temporal_differences(gamma, lam):
    rewards, values, sampled = rows()
    made = estimate(rewards, values, sampled, LENGTHS, gamma, lam)
    ends = np.cumsum(LENGTHS)
    for start, end in zip(ends - LENGTHS, ends, strict=True):
        row = slice(start, end)
        expected = summed(rewards[row], values[row], sampled[row], gamma, lam)
        np.testing.assert_allclose(made.advantages[row], expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(made.returns, np.where(sampled, made.advantages + values, 0.0), rtol=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), SETTINGS)
def test_advantages_of_sampled_tokens_are_verls(gamma, lam):
    rewards, values, sampled = rows(3)
    inside = np.arange(LENGTHS.max()) < LENGTHS[:, None]

    def table(column):
        padded = torch.zeros(inside.shape, dtype=torch.float64)
        padded[torch.from_numpy(inside)] = torch.from_numpy(column.astype(np.float64))
        return padded

    advantages, returns = verls(*map(table, (rewards, values, sampled)), gamma, lam)
    made = estimate(rewards, values, sampled, LENGTHS, gamma, lam)
    for ours, theirs in ((made.advantages, advantages), (made.returns, returns)):
        np.testing.assert_allclose(ours[sampled], theirs.numpy()[inside][sampled], rtol=1e-12, atol=1e-14)


def test_without_discounts_a_return_is_the_rewards_to_come_whatever_the_critic_says():
    rewards, _, sampled = rows(1)
    rewards = np.where(sampled, rewards, 0.0)
    to_come = np.concatenate([row[::-1].cumsum()[::-1] for row in np.split(rewards, np.cumsum(LENGTHS)[:-1])])
    for seed in (0, 5):
        _, values, _ = rows(seed)
        made = estimate(rewards, values, sampled, LENGTHS, 1.0, 1.0)
        np.testing.assert_allclose(made.returns[sampled], to_come[sampled], rtol=1e-12, atol=1e-12)


def test_a_critic_that_knows_all_rewards_leaves_no_advantage():
    rewards = np.array([0.0, 0.0, 1.0, 0.5])
    values = np.array([0.81, 0.9, 1.0, 0.5])
    made = estimate(rewards, values, np.ones(4, bool), np.array([3, 1]), 0.9, 0.7)
    np.testing.assert_allclose(made.advantages, 0.0, atol=1e-15)


@pytest.mark.parametrize("values", [np.full(3, -1.0), np.array([-1.0])])
def test_estimates_that_are_all_the_same_become_exactly_nothing(values):
    """As those of a critic that begins at 0 where all rewards are -1: nobody did better than another."""
    lengths = np.ones(len(values), int)
    none = TokenAdvantages(np.zeros(len(values)))
    taken = moments(values, np.ones(len(values), bool), lengths)
    whole = whitened(none, taken).of_tokens(lengths, np.ones(len(values), bool), None, values)
    assert (whole == 0).all()


def test_what_a_tool_says_is_worth_nothing_and_breaks_no_chain():
    """The same tokens with and without context between: the same numbers."""
    rewards, values, sampled = rows(7)
    whole = estimate(np.where(sampled, rewards, 9.0), np.where(sampled, values, 7.0), sampled, LENGTHS, 0.9, 0.8)
    lengths = np.array([part.sum() for part in np.split(sampled, np.cumsum(LENGTHS)[:-1])])
    kept = estimate(rewards[sampled], values[sampled], np.ones(sampled.sum(), bool), lengths, 0.9, 0.8)
    np.testing.assert_array_equal(whole.advantages[sampled], kept.advantages)
    assert not whole.advantages[~sampled].any() and not whole.returns[~sampled].any()


def test_a_score_stands_at_the_last_sampled_token_and_penalties_at_their_own():
    sampled = np.array([True, True, False, False, True])
    penalties = np.array([0.1, 0.2, 0.0, 0.0, 0.3])
    rewards = token_rewards(np.array([1.0, 5.0, 2.0]), penalties, sampled, np.array([3, 1, 1]))
    np.testing.assert_allclose(rewards, [-0.1, 0.8, 0.0, 0.0, 1.7])


# ---------------------------------------------------------------- metrics


def test_metrics_of_values_are_those_of_all_tokens_together():
    rng = np.random.default_rng(0)
    values, returns = rng.normal(size=(2, 19))
    mask = rng.random(19) < 0.7
    metrics = value_metrics(value_moments(returns, values, mask, LENGTHS))
    ours, theirs = values[mask], returns[mask]
    explained = 1 - np.var(theirs - ours, ddof=1) / (np.var(theirs, ddof=1) + 1e-5)
    assert metrics["critic/vf_explained_var"] == pytest.approx(explained, rel=1e-12)
    for name, column in (("values", ours), ("returns", theirs)):
        found = [metrics[f"critic/{name}/{kind}"] for kind in ("mean", "max", "min")]
        assert found == pytest.approx([column.mean(), column.max(), column.min()], rel=1e-12)


def test_a_step_without_trained_tokens_has_no_metrics_of_values():
    nothing = np.zeros(19, bool)
    assert value_metrics(value_moments(np.ones(19), np.ones(19), nothing, LENGTHS)) == {}


# ---------------------------------------------------------------- loss


def micro_batch(seed=0):
    rng = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn((3, 4, 6), generator=rng, dtype=torch.float64)
    mask = torch.rand((4, 6), generator=rng) < 0.6
    mask[2] = False
    return ValueInputs(values.requires_grad_(), old, returns, mask)


def test_the_value_loss_worked_by_hand():
    """1.4 from 0.5 is clipped to 1, the return, and 2 to 1, where 0 is wanted: both squares of their own count."""
    inputs = ValueInputs(*(torch.tensor([row], dtype=torch.float64) for row in ([1.4, 2.0], [0.5, 0.5], [1.0, 0.0])),
                         torch.ones(1, 2, dtype=torch.bool))  # fmt: skip
    output = value_loss(ValueLossParameters(0.5), inputs, Denominators(2, 1))
    assert float(output.loss) == pytest.approx(0.5 * (0.16 + 4.0) / 2)
    assert float(output.metrics["critic/vf_clipfrac"][0]) == 0.0
    # 0 where the value was, 1 wanted, and 0.9 reached: only 0.5 counts
    inputs = ValueInputs(
        *(torch.tensor([[x]], dtype=torch.float64) for x in (0.9, 0.0, 1.0)), inputs.response_mask[:, :1]
    )
    output = value_loss(ValueLossParameters(0.5), inputs, Denominators(1, 1))
    assert float(output.loss) == pytest.approx(0.125)
    assert [float(part) for part in output.metrics["critic/vf_clipfrac"]] == [1.0, 1.0]


@pytest.mark.parametrize("reach", [0.1, 0.5, 100.0])
def test_the_value_loss_is_verls(reach):
    """verl 0.9.1, trainer/ppo/core_algos.py, compute_value_loss: token-mean of the larger square, halved."""
    inputs = micro_batch()
    mask = inputs.response_mask
    output = value_loss(ValueLossParameters(reach), inputs, count(mask))
    near = torch.clamp(inputs.values, inputs.old_values - reach, inputs.old_values + reach)
    first, second = (inputs.values - inputs.returns) ** 2, (near - inputs.returns) ** 2
    expected = 0.5 * torch.max(first, second)[mask].mean()
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=0)
    clipped, tokens = output.metrics["critic/vf_clipfrac"]
    torch.testing.assert_close(clipped / tokens, (second > first)[mask].float().mean())
    (gradient,) = torch.autograd.grad(output.loss, inputs.values, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected, inputs.values)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_value_loss_and_its_gradient_do_not_depend_on_how_a_batch_is_cut(mode):
    whole = micro_batch(1)
    parameters = ValueLossParameters(0.3, mode)
    counts = count(whole.response_mask)
    loss = value_loss(parameters, whole, counts).loss
    (gradient,) = torch.autograd.grad(loss, whole.values)
    pieces = [ValueInputs(whole.values[row], whole.old_values[row], whole.returns[row], whole.response_mask[row])
              for row in (slice(0, 1), slice(1, 4))]  # fmt: skip
    total = sum(value_loss(parameters, piece, counts).loss for piece in pieces)
    torch.testing.assert_close(total, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(total, whole.values)[0], gradient, rtol=1e-12, atol=1e-15)


def test_whatever_stands_outside_the_mask_has_no_gradient():
    inputs = micro_batch(2)
    with torch.no_grad():
        inputs.values[~inputs.response_mask] = math.nan
    output = value_loss(ValueLossParameters(), inputs, count(inputs.response_mask))
    (gradient,) = torch.autograd.grad(output.loss, inputs.values)
    assert math.isfinite(output.loss.detach()) and not gradient[~inputs.response_mask].any()


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_mean_value_and_the_clipped_share_are_of_tokens_whatever_the_loss_averages(mode):
    """By hand: three tokens that count, with values 1, 2 and 6, of which the last has moved beyond 0.5 (verl's
    vpred_mean and vf_clipfrac, masked_mean over tokens)."""
    mask = torch.tensor([[True, True], [True, False]])
    values = torch.tensor([[1.0, 2.0], [6.0, 50.0]])
    old = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    inputs = ValueInputs(values, old, torch.full((2, 2), 9.0), mask)
    metrics = value_loss(ValueLossParameters(0.5, mode), inputs, count(mask)).metrics
    mean = {name: float(total) / float(weight) for name, (total, weight) in metrics.items()}
    assert mean["critic/vpred_mean"] == 3.0
    assert mean["critic/vf_clipfrac"] == pytest.approx(1 / 3)
