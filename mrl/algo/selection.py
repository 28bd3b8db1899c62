"""Tokens that a loss treats apart, chosen from a whole mini-batch before it is cut into micro-batches; numpy.

Clip-Cov and KL-Cov (arXiv:2505.22617) act on tokens whose advantage and log-probability vary together the most. Chosen
inside each micro-batch, as upstream does, the choice would change with the cut. Here the covariance is taken once a
mini-batch, with the anchor's log-probabilities, which are known before the forward and equal the current ones at a
rollout's first update.
"""

from collections.abc import Callable

import numpy as np

from mrl.algo.losses import PolicyLossParameters
from mrl.algo.rows import places

Selection = Callable[[PolicyLossParameters, np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
SELECTIONS: dict[str, Selection] = {}


def _selection(loss_mode: str) -> Callable[[Selection], Selection]:
    def bind(function: Selection) -> Selection:
        SELECTIONS[loss_mode] = function
        return function

    return bind


def select(
    parameters: PolicyLossParameters, advantages: np.ndarray, old_log_probs: np.ndarray, mask: np.ndarray, lengths: np.ndarray
) -> np.ndarray | None:
    """bool [tokens] for a loss that treats some tokens apart, else None.

    Arrays are [tokens], the response tokens of one mini-batch, rows end to end; `lengths` int [rows] are tokens a row.
    """
    function = SELECTIONS.get(parameters.loss_mode)
    return None if function is None else function(parameters, advantages, old_log_probs, mask, lengths)


def covariance(advantages: np.ndarray, log_probs: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """float64: (A - mean A) (log p - mean log p) of each token, means over the mask; 0 outside it."""
    if not mask.any():
        return np.zeros(mask.shape)
    a, p = (np.where(mask, x, 0.0).astype(np.float64) for x in (advantages, log_probs))
    return np.where(mask, (a - a[mask].mean()) * (p - p[mask].mean()), 0.0)


@_selection("clip_cov")
def clip_cov(
    parameters: PolicyLossParameters, advantages: np.ndarray, old_log_probs: np.ndarray, mask: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """A random clip_cov_ratio of all tokens, at least one, among those whose covariance lies between clip_cov_lb and clip_cov_ub."""
    values = covariance(advantages, old_log_probs, mask)
    candidates = mask & (values > parameters.clip_cov_lb) & (values < parameters.clip_cov_ub)
    return _largest(_lots(old_log_probs, lengths), candidates, parameters.clip_cov_ratio * mask.sum())


@_selection("kl_cov")
def kl_cov(
    parameters: PolicyLossParameters, advantages: np.ndarray, old_log_probs: np.ndarray, mask: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """The kl_cov_ratio of all tokens, at least one, with the highest covariance."""
    return _largest(covariance(advantages, old_log_probs, mask), mask, parameters.kl_cov_ratio * mask.sum())


def _largest(values: np.ndarray, candidates: np.ndarray, count: float) -> np.ndarray:
    """bool: the max(1, floor(count)) candidates of the largest values; those tied with the last of them are taken too."""
    picked = np.sort(values[candidates])[::-1][: max(int(count), 1)]
    return candidates & (values >= picked[-1]) if picked.size else np.zeros(candidates.shape, dtype=bool)


def _lots(log_probs: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """uint64 [tokens]: a token's lot, from its own log-probability's bits and its place in the response, so that it moves with its row."""
    bits = np.ascontiguousarray(log_probs, dtype=np.float64).view(np.uint64)
    mixed = bits + (places(lengths) + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64's mixing of one word
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
