"""Tokens that a loss treats apart, chosen from a whole mini-batch before it is cut into micro-batches; numpy.

Clip-Cov and KL-Cov (arXiv:2505.22617) act on tokens whose advantage and log-probability vary together the most. Chosen
inside each micro-batch, as upstream does, the choice would change with the cut. Here the covariance is taken once a
mini-batch, with the anchor's log-probabilities, which are known before the forward and equal the current ones at a
rollout's first update.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mrl.algo.plain import PolicyLossParameters
from mrl.algo.rows import places, total


@dataclass(frozen=True)
class Means:
    """Means of advantages and of the anchor's log-probabilities over the trained tokens of one mini-batch.

    `tokens`: how many there are.
    """

    advantage: float
    log_prob: float
    tokens: int


# a number and bool, both [tokens]: those that may be chosen, by falling number
Candidates = tuple[np.ndarray, np.ndarray]
Selection = Callable[[PolicyLossParameters, np.ndarray, np.ndarray, np.ndarray, np.ndarray], Candidates]
SELECTIONS: dict[str, Selection] = {}
RATIOS = {"clip_cov": "clip_cov_ratio", "kl_cov": "kl_cov_ratio"}  # share of a mini-batch's tokens that is chosen


def _selection(loss_mode: str) -> Callable[[Selection], Selection]:
    def bind(function: Selection) -> Selection:
        SELECTIONS[loss_mode] = function
        return function

    return bind


def covariance(advantages: np.ndarray, log_probs: np.ndarray, mask: np.ndarray, means: Means) -> np.ndarray:
    """float64: (A - mean A) (log p - mean log p) of each token; 0 outside the mask."""
    a, p = (np.where(mask, x, 0.0).astype(np.float64) for x in (advantages, log_probs))
    return np.where(mask, (a - means.advantage) * (p - means.log_prob), 0.0)


def candidates(
    parameters: PolicyLossParameters,
    advantages: np.ndarray,
    log_probs: np.ndarray,
    mask: np.ndarray,
    lengths: np.ndarray,
    means: Means,
) -> Candidates:
    """Tokens of some rows of a mini-batch that its loss may select.

    Arrays are [tokens], rows end to end; `lengths` int [rows] are tokens a row.
    """
    covariances = covariance(advantages, log_probs, mask, means)
    return SELECTIONS[parameters.loss_mode](parameters, covariances, log_probs, mask, lengths)


def largest(parameters: PolicyLossParameters, found: Candidates, means: Means) -> np.ndarray:
    """The numbers that may be among those of the chosen, falling: of a mini-batch's parts together they decide
    (`least_chosen`).
    """
    values, allowed = found
    return np.sort(values[allowed])[::-1][: _count(parameters, means)]


def least_chosen(parameters: PolicyLossParameters, parts: Sequence[np.ndarray], means: Means) -> float | int | None:
    """The smallest number that is chosen, from the `largest` of all parts; None: there is no candidate."""
    picked = np.sort(np.concatenate(parts))[::-1][: _count(parameters, means)]
    if picked.size:
        return picked[-1]
    return None


def chosen(found: Candidates, least: float | int | None) -> np.ndarray:
    """bool [tokens]: candidates from `least` on; those tied with it are taken too."""
    values, allowed = found
    if least is None:
        return np.zeros(allowed.shape, bool)
    return allowed & (values >= least)


def _count(parameters: PolicyLossParameters, means: Means) -> int:
    return max(int(getattr(parameters, RATIOS[parameters.loss_mode]) * means.tokens), 1)


def select(
    parameters: PolicyLossParameters,
    advantages: np.ndarray,
    log_probs: np.ndarray,
    mask: np.ndarray,
    lengths: np.ndarray,
) -> np.ndarray | None:
    """bool [tokens] for a loss that treats some tokens apart, else None; arrays are of a whole mini-batch."""
    if parameters.loss_mode not in SELECTIONS:
        return None
    means = means_of(
        *(total(np.where(mask, x, 0.0).astype(np.float64)) for x in (advantages, log_probs)), int(mask.sum())
    )
    eligible = candidates(parameters, advantages, log_probs, mask, lengths, means)
    return chosen(eligible, least_chosen(parameters, [largest(parameters, eligible, means)], means))


def means_of(advantages: float, log_probs: float, tokens: int) -> Means:
    """Makes means of sums over the trained tokens."""
    return Means(advantages / max(tokens, 1), log_probs / max(tokens, 1), tokens)


@_selection("clip_cov")
def clip_cov(
    parameters: PolicyLossParameters,
    covariances: np.ndarray,
    log_probs: np.ndarray,
    mask: np.ndarray,
    lengths: np.ndarray,
) -> Candidates:
    """A random clip_cov_ratio of all tokens, at least one,
    among those whose covariance lies between clip_cov_lb and clip_cov_ub.
    """
    return _lots(log_probs, lengths), mask & (covariances > parameters.clip_cov_lb) & (
        covariances < parameters.clip_cov_ub
    )


@_selection("kl_cov")
def kl_cov(
    parameters: PolicyLossParameters,
    covariances: np.ndarray,
    log_probs: np.ndarray,
    mask: np.ndarray,
    lengths: np.ndarray,
) -> Candidates:
    """The kl_cov_ratio of all tokens, at least one, with the highest covariance."""
    return covariances, mask


def _lots(log_probs: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """uint64 [tokens]: a token's lot, from its own log-probability's bits and its place in the response,
    so that it moves with its row.
    """
    bits = np.ascontiguousarray(log_probs, dtype=np.float64).view(np.uint64)
    mixed = bits + (places(lengths) + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64's mixing of one word
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
