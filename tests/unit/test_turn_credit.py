"""Credit by turn: returns and advantages by hand, their invariants, and what a response's tokens get of them."""

import numpy as np
import pytest
import torch

from mrl.algo.advantages import WHITENED, AdvantageInputs, TokenAdvantages, response_advantages, whitened
from mrl.algo.aggregate import count
from mrl.algo.losses import LossInputs, policy_loss
from mrl.algo.plain import PolicyLossParameters
from mrl.algo.rows import moments
from mrl.algo.spec import BY_TURN
from mrl.algo.turn_credit import TurnNumbers, compared, turn_numbers, turn_returns

EPS = 1e-6


def turns(counts, rewards, states=None, starts=None) -> TurnNumbers:
    counts = np.array(counts)
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    states = np.zeros(len(places), np.uint64) if states is None else np.array(states, np.uint64)
    return turn_numbers(counts, places * 2 if starts is None else np.array(starts), np.array(rewards, float), states)


def advantages(name: str, inputs: AdvantageInputs) -> np.ndarray:
    return response_advantages(name, inputs).per_turn.values


def inputs(scores, groups, of_turns: TurnNumbers, **more) -> AdvantageInputs:
    return AdvantageInputs(np.array(scores, float), np.array(groups), np.ones(len(scores), int), turns=of_turns, **more)


def test_the_example_of_the_module():
    one = turns([3], [0, 1, 0])
    assert turn_returns(one, np.array([3.0]), 0.5, "session").tolist() == [1.0, 2.0, 2.0]
    assert turn_returns(one, np.array([1.0]), 1.0, "session").tolist() == [1.0, 1.0, 0.0]


def test_branches_have_their_own_rewards_and_by_session_the_responses_last_too():
    """By hand: turns 0 1 | 2 | 3 with rewards 1 0 | 2 | 0, and a score of 7, of which 4 are of the last turn."""
    numbers = turn_numbers(
        np.array([4]), np.array([0, 3, 8, 14]), np.array([1.0, 0, 2, 0]), np.zeros(4, np.uint64),
        np.array([3]), np.array([0, 6, 12]),
    )  # fmt: skip
    assert numbers.parents.tolist() == [-1, 0, -1, -1]
    assert turn_returns(numbers, np.array([7.0]), 0.5, "own").tolist() == [1.0, 0.0, 2.0, 4.0]
    assert turn_returns(numbers, np.array([7.0]), 0.5, "session").tolist() == [3.0, 4.0, 6.0, 4.0]


@pytest.mark.parametrize(
    "branch_rewards, gamma, wanted",
    [("own", 1.0, [0.5, 0, 1]), ("own", 0.5, [0.25, 0, 1]), ("session", 1.0, [1, 1, 1])],
)
def test_a_turn_that_branches_share_has_the_mean_of_what_they_return(branch_rewards, gamma, wanted):
    """By hand: turns 1 and 2 both follow 0, and 2 has the reward of 1. A response before it changes nothing."""
    numbers = turn_numbers(
        np.array([1, 3]), np.array([0, 0, 10, 30]), np.array([0.0, 0, 0, 1]), np.zeros(4, np.uint64),
        np.array([1, 2]), np.array([0, 0, 20]), np.array([-1, -1, 0, 0]),
    )  # fmt: skip
    found = turn_returns(numbers, np.array([4.0, 1.0]), gamma, branch_rewards)
    assert found.tolist() == [4.0, *wanted]
    only = turn_returns(numbers.keep(np.array([1])), np.array([1.0]), gamma, branch_rewards)
    assert only.tolist() == wanted


def test_branches_of_several_rows_do_not_mix():
    numbers = turn_numbers(
        np.array([1, 3, 2]), np.array([0, 0, 9, 30, 0, 5]), np.zeros(6), np.zeros(6, np.uint64),
        np.array([1, 2, 1]), np.array([0, 0, 20, 0]),
    )  # fmt: skip
    assert numbers.parents.tolist() == [-1, -1, 0, -1, -1, 0]


def test_turns_are_compared_with_the_groups_at_the_same_turn():
    """By hand: returns 3 2 | 1 0 | 5 of one group; 9 alone in another, which has nothing to be compared with."""
    given = turns([2, 2, 1, 1], [1, 2, 1, 0, 5, 9])
    found = advantages("grpo_turn", inputs([3, 1, 5, 9], [0, 0, 0, 1], given))
    first = np.array([3, 1, 5]) - 3.0
    second = np.array([2, 0]) - 1.0
    std = [2.0 + EPS, np.sqrt(2) + EPS]
    wanted = [first[0] / std[0], second[0] / std[1], first[1] / std[0], second[1] / std[1], first[2] / std[0], 0.0]
    assert np.allclose(found, wanted, rtol=1e-12)
    plain = advantages("grpo_turn", inputs([3, 1, 5, 9], [0, 0, 0, 1], given, norm_adv_by_std_in_grpo=False))
    assert plain.tolist() == [0.0, 1.0, -2.0, -1.0, 2.0, 0.0]


def test_gigpo_adds_what_a_turn_brought_among_turns_of_the_same_state():
    """By hand, without std: scores 1, 0. States a b | a c; the second state of each is met once, and says nothing."""
    given = turns([2, 2], [0, 1, 0, 0], states=[0, 7, 0, 8])
    of = inputs([1, 0], [0, 0], given, norm_adv_by_std_in_grpo=False, gamma=0.5, step_advantage_weight=2.0)
    assert advantages("gigpo", of).tolist() == [0.5 + 2 * 0.25, 0.5, -0.5 - 2 * 0.25, -0.5]


def test_a_state_that_is_met_again_in_one_response_is_one_state_and_groups_do_not_mix():
    """A turn that leads back counts against the one that leads on: returns 1 at both, 0.25 and 1 when discounted."""
    given = turns([3, 1], [0, 0, 1, 1], states=[5, 6, 5, 5])
    of = inputs([1, 1], [0, 1], given, norm_adv_by_std_in_grpo=False, gamma=0.5)
    assert advantages("gigpo", of).tolist() == [1 + (0.25 - 0.625), 1.0, 1 + 0.375, 1.0]


@pytest.mark.parametrize("seed", range(20))
def test_where_all_have_one_turn_credit_by_turn_is_grpos(seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 3, 12).astype(float)
    groups = rng.integers(0, 3, 12)
    given = inputs(scores, groups, turns([1] * 12, np.zeros(12)), gamma=0.5)
    whole = response_advantages("grpo", given).per_response
    many = np.bincount(groups)[groups] > 1
    assert np.allclose(advantages("grpo_turn", given)[many], whole[many], rtol=1e-12)
    assert np.allclose(advantages("gigpo", given)[many], 2 * whole[many], rtol=1e-12)
    assert advantages("turn_return", given).tolist() == scores.tolist()


@pytest.mark.parametrize("name", BY_TURN)
def test_the_order_of_responses_changes_nothing(name):
    rng = np.random.default_rng(1)
    counts = rng.integers(1, 5, 10)
    total = counts.sum()
    given = turns(counts, rng.normal(size=total), rng.integers(0, 4, total))
    scores = rng.normal(size=10)
    groups = rng.integers(0, 2, 10)
    order = rng.permutation(10)
    found = response_advantages(name, inputs(scores, groups, given, gamma=0.9))
    other = response_advantages(name, inputs(scores[order], groups[order], given.keep(order), gamma=0.9))
    assert np.allclose(found.rows(order).per_turn.values, other.per_turn.values, rtol=1e-9, atol=1e-12)


def test_equal_returns_are_worth_nothing():
    assert compared(np.array([0.1 + 0.2, 0.1 + 0.2, 5.0]), np.array([0, 0, 1]), True).tolist() == [0.0, 0.0, 0.0]


def test_tokens_have_the_advantage_of_their_turn_and_responses_that_do_not_count_none():
    given = turns([2, 1, 2], [1, 0, 5, 0, 2], starts=[0, 3, 0, 0, 1])
    counted = np.array([True, False, True])
    some = inputs([1, 2], [0, 0], given.keep(counted), norm_adv_by_std_in_grpo=False)
    every = response_advantages("grpo_turn", some).among(counted, given)
    mask = np.array([1, 1, 0, 1, 1, 1, 1, 1, 1], bool)
    found = every.of_tokens(np.array([5, 1, 3]), mask, None)
    assert found.tolist() == [-0.5, -0.5, 0.0, -1.0, -1.0, 0.0, 0.5, 1.0, 1.0]
    assert every.rows(np.array([2, 0])).of_tokens(np.array([3, 5]), np.ones(8, bool), None).tolist() == [
        0.5, 1.0, 1.0, -0.5, -0.5, -0.5, -1.0, -1.0,
    ]  # fmt: skip
    assert every.differ and not TokenAdvantages(np.zeros(2)).differ


KEYS, ACTIONS, TURNS, GROUPS, EACH = 8, 4, 8, 4, 8


def learned(name: str, seed: int, steps: int) -> float:
    """A world of turns: of half of the keys one action is worth 1, the others are lotteries whatever is done.

    A table of logits is the policy, trained by gspo-token; each turn is a token. Returns the mean probability of the
    right actions.
    """
    rng = np.random.default_rng(seed)
    right = torch.tensor(rng.integers(0, ACTIONS, KEYS))
    policy = torch.zeros(KEYS, ACTIONS, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([policy], lr=0.1)
    rows = GROUPS * EACH
    lengths = np.full(rows, TURNS)
    mask = torch.ones(rows, TURNS, dtype=torch.bool)
    for _ in range(steps):
        keys = np.repeat(rng.integers(0, KEYS, (GROUPS, TURNS)), EACH, axis=0)
        shown = torch.tensor(keys)
        chances = policy.detach().softmax(-1)[shown].numpy().cumsum(-1)
        actions = torch.tensor((rng.random((rows, TURNS, 1)) > chances).sum(-1).clip(max=ACTIONS - 1))
        rewards = np.where(keys < KEYS // 2, (actions == right[shown]).numpy(), 4 * rng.normal(size=keys.shape))
        of_turns = turns(lengths, rewards.ravel(), keys.ravel() + 1, np.tile(np.arange(TURNS), rows))
        given = inputs(rewards.sum(1), np.repeat(np.arange(GROUPS), EACH), of_turns, gamma=0.1)
        found = response_advantages(name, given)
        if name in WHITENED:
            found = whitened(found, moments(found.values(lengths, None), mask.numpy().ravel(), lengths))
        advantages = torch.tensor(found.of_tokens(lengths, mask.numpy().ravel(), None).reshape(rows, TURNS))
        log_probs = policy.log_softmax(-1)[shown].gather(-1, actions[..., None])[..., 0]
        batch = LossInputs(log_probs, None, advantages.double(), mask)
        optimizer.zero_grad()
        policy_loss(PolicyLossParameters("gspo-token"), batch, count(mask)).loss.backward()
        optimizer.step()
    worth = torch.arange(KEYS // 2)
    return float(policy.detach().softmax(-1)[worth, right[worth]].mean())


@pytest.mark.parametrize("seed", range(3))
def test_credit_by_turn_learns_what_credit_by_response_does_not_in_the_same_steps(seed):
    """One reward for all of a response drowns the turns that are worth something in those that are not."""
    assert learned("grpo", seed, 25) < 0.8
    assert min(learned(name, seed, 25) for name in BY_TURN) > 0.9
