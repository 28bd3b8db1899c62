"""Advantages and returns of tokens from a critic's values. numpy: ranks compute them, and the driver reads their sums.

Context tokens of a response of several turns are stepped over: no value is taken of them, and the last sampled token
before them is followed by the first sampled one after them.
"""

from dataclasses import dataclass

import numpy as np

from mrl.algo.rows import RowValues, moments, on_tokens, places, row_sums


@dataclass(frozen=True)
class Estimate:
    """What a critic's values make of rewards; both float64 [tokens], 0 of context."""

    advantages: np.ndarray  # not whitened yet
    returns: np.ndarray  # advantages and values: what values are trained towards


def estimate(
    rewards: np.ndarray, values: np.ndarray, sampled: np.ndarray, lengths: np.ndarray, gamma: float, lam: float
) -> Estimate:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), response by response.

    delta_t = reward_t + gamma value_(t+1) - value_t;  A_t = delta_t + gamma lam A_(t+1); 0 follows the last token.

    `rewards`, `values` and `sampled` (bool) are [tokens], rows of `lengths` end to end.
    """
    of_rows = row_sums(sampled, lengths)
    now = np.asarray(values, np.float64)[sampled]
    is_last = _last_of(of_rows)
    following = np.append(now[1:], 0.0)
    following[is_last] = 0.0
    deltas = np.asarray(rewards, np.float64)[sampled] + gamma * following - now
    advantages = np.zeros(len(sampled))
    advantages[sampled] = _discounted_sums(deltas, of_rows, gamma * lam)
    returns = np.zeros(len(sampled))
    returns[sampled] = advantages[sampled] + now
    return Estimate(advantages, returns)


def _last_of(lengths: np.ndarray) -> np.ndarray:
    """int64: places of the last token of each row that has one."""
    return (np.cumsum(lengths) - 1)[lengths > 0]


def _discounted_sums(values: np.ndarray, lengths: np.ndarray, discount: float) -> np.ndarray:
    """[tokens]: each value and those after it in its row, `discount` to the power of their distance.

    Works on all rows at once, from their last tokens to the first ones.
    """
    longest = int(lengths.max(initial=0))
    row = np.repeat(np.arange(len(lengths)), lengths)
    column = longest - on_tokens(lengths, lengths) + places(lengths)  # the last tokens stand below each other
    table = np.zeros((longest, len(lengths)))
    table[column, row] = values
    for place in range(longest - 2, -1, -1):
        table[place] += discount * table[place + 1]
    return table[column, row]


def token_rewards(
    scores: np.ndarray, penalties: np.ndarray | None, sampled: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """float64 [tokens]: each response's score at its last sampled token, less what is taken off the reward of tokens.

    `scores` [rows]; `penalties` [tokens], 0 of context.
    """
    rewards = np.zeros(len(sampled))
    if penalties is not None:
        rewards -= penalties
    of_rows = row_sums(sampled, lengths)
    rewards[np.flatnonzero(sampled)[_last_of(of_rows)]] += np.asarray(scores, np.float64)[of_rows > 0]
    return rewards


VALUES = "values"
RETURNS = "returns"
ERRORS = "errors"  # returns less values


def value_moments(returns: np.ndarray, values: np.ndarray, mask: np.ndarray, lengths: np.ndarray) -> RowValues:
    """Numbers a row of what the critic said and should have said, over the masked tokens: NAME.MOMENT."""
    columns = {VALUES: values.astype(np.float64), RETURNS: returns, ERRORS: returns - values}
    return {
        f"{name}.{moment}": numbers
        for name, column in columns.items()
        for moment, numbers in moments(column, mask, lengths).items()
    }
