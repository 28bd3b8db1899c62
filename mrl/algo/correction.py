"""Correction of the gap between the policy that generated and the trainer's own numerics; numpy.

Two axes (mrl.algo.spec.CORRECTIONS names points on them): the level, which ratio is looked at, and the mode, what is done with it. The
ratio is old / rollout of a token, of the whole response (the product), or the geometric mean over the response's tokens.
"""

from dataclasses import dataclass

import numpy as np

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class CorrectionParameters:
    """`low` None: no lower bound."""

    level: str
    mode: str
    low: float | None
    high: float


@dataclass(frozen=True)
class Correction:
    """`keep` bool [batch, response_length]: tokens that stay, a part of the mask. `weights` float32, same shape: 1 where none is due."""

    keep: np.ndarray
    weights: np.ndarray
    metrics: dict[str, float]


def log_ratios(old_log_probs: np.ndarray, rollout_log_probs: np.ndarray, mask: np.ndarray, level: str) -> np.ndarray:
    """float64 [batch, response_length]: log of the level's ratio on every token of the mask, within [-20, 20]; 0 outside it."""
    difference = np.where(mask, np.asarray(old_log_probs, np.float64) - np.asarray(rollout_log_probs, np.float64), 0.0)
    if level != "token":
        difference = np.broadcast_to(difference.sum(-1, keepdims=True), mask.shape)
        if level == "geometric":
            difference = difference / np.maximum(mask.sum(-1, keepdims=True), 1)
    return np.where(mask, np.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)


def correct(parameters: CorrectionParameters, old_log_probs: np.ndarray, rollout_log_probs: np.ndarray, mask: np.ndarray) -> Correction:
    """Weights and rejections for one step; all arrays are [batch, response_length], `mask` bool.

    `truncate` bounds the ratio above and `clip` on both sides, as a weight of the policy loss; `mask` rejects what is outside the band,
    and what it keeps has the ratio as its weight. The geometric mean is a test of a response and not its importance weight, so `mask` at
    that level keeps responses as they are, with weight 1. What is rejected leaves the loss's denominators too.
    """
    ratio = np.exp(log_ratios(old_log_probs, rollout_log_probs, mask, parameters.level))
    low = 0.0 if parameters.low is None else parameters.low
    inside = (ratio >= low) & (ratio <= parameters.high)
    keep, weights = mask, np.ones(mask.shape)
    if parameters.mode == "mask":
        keep = mask & inside
        weights = weights if parameters.level == "geometric" else np.where(keep, ratio, 1.0)
    else:
        weights = np.where(mask, np.clip(ratio, low if parameters.mode == "clip" else None, parameters.high), 1.0)
    return Correction(keep, weights.astype(np.float32), _metrics(weights, keep, mask, inside))


def _metrics(weights: np.ndarray, keep: np.ndarray, mask: np.ndarray, inside: np.ndarray) -> dict[str, float]:
    tokens, kept = int(mask.sum()), weights[keep]
    if not tokens:
        return {}
    metrics = {
        "rollout_corr/outside_share": float((mask & ~inside).sum() / tokens),
        "rollout_corr/rejected_token_share": 1.0 - float(keep.sum() / tokens),
        "rollout_corr/rejected_sequence_share": 1.0 - float(keep.any(-1).sum() / mask.any(-1).sum()),
    }
    if kept.size:
        metrics |= {
            "rollout_corr/weight_mean": float(kept.mean()),
            "rollout_corr/weight_max": float(kept.max()),
            "rollout_corr/weight_min": float(kept.min()),
            "rollout_corr/effective_sample_share": float(kept.mean() ** 2 / (kept**2).mean()),
        }
    return metrics
