"""Tokens that a loss treats differently, chosen from a whole mini-batch before it is cut into micro-batches. numpy
alone.

Clip-Cov and KL-Cov (arXiv:2505.22617) act on the tokens whose advantage and log-probability vary together the most.
Upstream chooses them inside each micro-batch, so its choice changes with the cut. Here the covariance is taken once a
mini-batch, with the anchor's log-probabilities. These are known before the forward pass, and equal the current ones at
the first update of a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mrl.algo.plain import PolicyLossParameters
from mrl.algo.rows import positions, total


@dataclass(frozen=True)
class Means:
    """Means of the advantages and of the anchor's log-probabilities over the trained tokens of one mini-batch.

    `tokens` counts the trained tokens.
    """

    advantage: float
    log_prob: float
    tokens: int


# (numbers, allowed), both [tokens]: allowed tokens are chosen in falling order of their number
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
    """Returns the tokens of some rows of a mini-batch that its loss may select.

    Arrays are [tokens], rows end to end; `lengths` int [rows] is the number of tokens a row.
    """
    covariances = covariance(advantages, log_probs, mask, means)
    return SELECTIONS[parameters.loss_mode](parameters, covariances, log_probs, mask, lengths)


def largest(parameters: PolicyLossParameters, found: Candidates, means: Means) -> np.ndarray:
    """Returns the largest numbers of the candidates, in falling order, as many as a mini-batch selects.

    `least_chosen` decides over those of all parts of a mini-batch together.
    """
    values, allowed = found
    return np.sort(values[allowed])[::-1][: _count(parameters, means)]


def least_chosen(parameters: PolicyLossParameters, parts: Sequence[np.ndarray], means: Means) -> float | int | None:
    """Returns the smallest number that is chosen, given the `largest` of all parts; None without a candidate."""
    picked = np.sort(np.concatenate(parts))[::-1][: _count(parameters, means)]
    if picked.size:
        return picked[-1]
    return None


def chosen(found: Candidates, least: float | int | None) -> np.ndarray:
    """Returns bool [tokens]: the candidates whose number is at least `least`. Ties with it are taken too."""
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
    """Returns the tokens that the loss treats differently, bool [tokens]; None for a loss that has none.

    The arrays hold a whole mini-batch.
    """
    if parameters.loss_mode not in SELECTIONS:
        return None
    means = means_of(
        *(total(np.where(mask, x, 0.0).astype(np.float64)) for x in (advantages, log_probs)), int(mask.sum())
    )
    eligible = candidates(parameters, advantages, log_probs, mask, lengths, means)
    return chosen(eligible, least_chosen(parameters, [largest(parameters, eligible, means)], means))


def means_of(advantages: float, log_probs: float, tokens: int) -> Means:
    """Makes means from sums over the trained tokens."""
    return Means(advantages / max(tokens, 1), log_probs / max(tokens, 1), tokens)


@_selection("clip_cov")
def clip_cov(
    parameters: PolicyLossParameters,
    covariances: np.ndarray,
    log_probs: np.ndarray,
    mask: np.ndarray,
    lengths: np.ndarray,
) -> Candidates:
    """Chooses a random clip_cov_ratio of all tokens, at least one.

    Only tokens whose covariance lies between clip_cov_lb and clip_cov_ub may be chosen.
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
    """Chooses the kl_cov_ratio of all tokens, at least one, with the highest covariance."""
    return covariances, mask


def _lots(log_probs: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Draws a random number for each token, uint64 [tokens].

    It is made of the token's log-probability and its position in the response. So it moves with its row.
    """
    bits = np.ascontiguousarray(log_probs, dtype=np.float64).view(np.uint64)
    mixed = bits + (positions(lengths) + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64's mixing of one word
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
