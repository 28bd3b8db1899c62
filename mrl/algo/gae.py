"""Advantages and returns of tokens from a critic's values. numpy: ranks compute them, and the driver reads their sums.

Context tokens of a response of several turns are skipped. They have no value, and the last sampled token before them is
followed by the first sampled one after them.
"""

from dataclasses import dataclass

import numpy as np

from mrl.algo.rows import RowValues, moments, on_tokens, positions, row_sums


@dataclass(frozen=True)
class Estimate:
    """Advantages and returns, both float64 [tokens]; 0 at context tokens."""

    advantages: np.ndarray  # not whitened yet
    returns: np.ndarray  # advantages + values: the critic is trained towards them


def estimate(
    rewards: np.ndarray, values: np.ndarray, sampled: np.ndarray, lengths: np.ndarray, gamma: float, lam: float
) -> Estimate:
    """Computes generalised advantage estimation (arXiv:1506.02438, eq. 16) of each response.

      delta_t = reward_t + gamma value_(t+1) - value_t;  A_t = delta_t + gamma lam A_(t+1);  0 follows the last token.

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
    """Returns the positions of the last token of each row that has one, int64."""
    return (np.cumsum(lengths) - 1)[lengths > 0]


def _discounted_sums(values: np.ndarray, lengths: np.ndarray, discount: float) -> np.ndarray:
    """Returns [tokens]: the discounted sum of the value of each token and of all later ones in its row.

    All rows are computed at once, from their last tokens to their first ones.
    """
    longest = int(lengths.max(initial=0))
    row = np.repeat(np.arange(len(lengths)), lengths)
    column = longest - on_tokens(lengths, lengths) + positions(lengths)  # the last tokens stand below each other
    table = np.zeros((longest, len(lengths)))
    table[column, row] = values
    for position in range(longest - 2, -1, -1):
        table[position] += discount * table[position + 1]
    return table[column, row]


def token_rewards(
    scores: np.ndarray, penalties: np.ndarray | None, sampled: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Returns float64 [tokens]: the score of each response at its last sampled token, less the penalties of tokens.

    `scores` is [rows]; `penalties` is [tokens], 0 at context tokens.
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
    """Returns moments of values, returns and their differences, over the masked tokens of each row.

    The names are NAME.MOMENT.
    """
    columns = {VALUES: values.astype(np.float64), RETURNS: returns, ERRORS: returns - values}
    return {
        f"{name}.{moment}": numbers
        for name, column in columns.items()
        for moment, numbers in moments(column, mask, lengths).items()
    }
