"""Advantages from scores, one number a response; numpy, because the driver holds scores and nothing else."""

from collections.abc import Callable

import numpy as np

from mrl.algo.spec import ADVANTAGES
from mrl.errors import ConfigError

STD_EPS = 1e-6

AdvantageFunction = Callable[[np.ndarray, np.ndarray, bool], np.ndarray]
ADVANTAGE_FUNCTIONS: dict[str, AdvantageFunction] = {}


def _advantage(name: str) -> Callable[[AdvantageFunction], AdvantageFunction]:
    def bind(function: AdvantageFunction) -> AdvantageFunction:
        ADVANTAGE_FUNCTIONS[ADVANTAGES[name].name] = function
        return function

    return bind


@_advantage("grpo")
def grpo(scores: np.ndarray, group_ids: np.ndarray, norm_adv_by_std_in_grpo: bool = True) -> np.ndarray:
    """(score - group mean) / (group std + 1e-6), std over n - 1 (arXiv:2402.03300); without the std it is Dr.GRPO (arXiv:2503.20783).

    A group of one has mean 0 and std 1, as in verl: its advantage is its score. A group whose scores are all equal has advantage 0
    exactly, free of rounding. `scores` [batch], `group_ids` [batch] in any order; float64 [batch] out.
    """
    scores = np.asarray(scores, dtype=np.float64)
    _, group, size = np.unique(np.asarray(group_ids), return_inverse=True, return_counts=True)
    mean = np.where(size > 1, np.bincount(group, scores, len(size)) / size, 0.0)
    centred = np.where(_equal_scores(scores, group, size)[group], 0.0, scores - mean[group])
    if not norm_adv_by_std_in_grpo:
        return centred
    variance = np.bincount(group, centred**2, len(size)) / np.maximum(size - 1, 1)
    std = np.where(size > 1, np.sqrt(variance), 1.0)
    return centred / (std[group] + STD_EPS)


def _equal_scores(scores: np.ndarray, group: np.ndarray, size: np.ndarray) -> np.ndarray:
    """[groups] bool: more than one score and all the same."""
    low, high = np.full(len(size), np.inf), np.full(len(size), -np.inf)
    np.minimum.at(low, group, scores)
    np.maximum.at(high, group, scores)
    return (low == high) & (size > 1)


def compute_advantages(
    adv_estimator: str, scores: np.ndarray, group_ids: np.ndarray, response_mask: np.ndarray, norm_adv_by_std_in_grpo: bool = True
) -> np.ndarray:
    """float32 [batch, response_length]: the response's advantage on each of its tokens, 0 in padding.

    `scores` and `group_ids` are [batch], `response_mask` bool [batch, response_length]. Raises ConfigError for an unknown estimator.
    """
    function = ADVANTAGE_FUNCTIONS.get(adv_estimator)
    if function is None:
        raise ConfigError(f"algorithm.adv_estimator: {adv_estimator!r} is unknown; allowed: {', '.join(ADVANTAGES)}")
    per_response = function(scores, group_ids, norm_adv_by_std_in_grpo)
    return (per_response[:, None] * response_mask).astype(np.float32)
