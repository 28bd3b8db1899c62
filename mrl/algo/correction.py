"""The gap between generation's numerics and the trainer's: metrics, correction, and tokens left out; numpy.

[tokens] are the response tokens of some rows, end to end; `lengths` [rows] says how many each row has.

The metrics have verl's names and formulas. The correction has two axes (mrl.algo.spec.CORRECTIONS names points on
them): the level, which ratio is looked at, and the mode, what is done with it. The ratio is old / rollout of a token,
of the whole response (the product), or the geometric mean over the response's tokens.
"""

from dataclasses import dataclass

import numpy as np

from mrl.algo.rows import on_tokens, places, row_sums
from mrl.errors import NumericAbort

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
    """`keep` bool [tokens]: those that stay, a part of the mask. `weights` float32 [tokens]: 1 where none is due."""

    keep: np.ndarray
    weights: np.ndarray
    metrics: dict[str, float]


def log_ratios(old_log_probs: np.ndarray, rollout_log_probs: np.ndarray, mask: np.ndarray, lengths: np.ndarray, level: str) -> np.ndarray:
    """float64 [tokens]: log of the level's ratio on every token of the mask, within [-20, 20]; 0 outside it."""
    difference = np.where(mask, np.asarray(old_log_probs, np.float64) - np.asarray(rollout_log_probs, np.float64), 0.0)
    if level != "token":
        by_row = row_sums(difference, lengths)
        if level == "geometric":
            by_row = by_row / np.maximum(row_sums(mask, lengths), 1)
        difference = on_tokens(by_row, lengths)
    return np.where(mask, np.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)


def correct(
    parameters: CorrectionParameters, old_log_probs: np.ndarray, rollout_log_probs: np.ndarray, mask: np.ndarray, lengths: np.ndarray
) -> Correction:
    """Weights and rejections for one step; arrays are [tokens], `mask` bool, `lengths` int [rows].

    `truncate` bounds the ratio above and `clip` on both sides, as a weight of the policy loss; `mask` rejects what is
    outside the band, and what it keeps has the ratio as its weight. The geometric mean is a test of a response and not
    its importance weight, so `mask` at that level keeps responses as they are, with weight 1. What is rejected leaves
    the loss's denominators too.
    """
    ratio = np.exp(log_ratios(old_log_probs, rollout_log_probs, mask, lengths, parameters.level))
    low = 0.0 if parameters.low is None else parameters.low
    inside = (ratio >= low) & (ratio <= parameters.high)
    keep, weights = mask, np.ones(mask.shape)
    if parameters.mode == "mask":
        keep = mask & inside
        weights = weights if parameters.level == "geometric" else np.where(keep, ratio, 1.0)
    else:
        weights = np.where(mask, np.clip(ratio, low if parameters.mode == "clip" else None, parameters.high), 1.0)
    return Correction(keep, weights.astype(np.float32), _correction_metrics(weights, keep, mask, inside, lengths))


def _correction_metrics(
    weights: np.ndarray, keep: np.ndarray, mask: np.ndarray, inside: np.ndarray, lengths: np.ndarray
) -> dict[str, float]:
    tokens, kept = int(mask.sum()), weights[keep]
    if not tokens:
        return {}
    metrics = {
        "rollout_corr/outside_share": float((mask & ~inside).sum() / tokens),
        "rollout_corr/rejected_token_share": 1.0 - float(keep.sum() / tokens),
        "rollout_corr/rejected_sequence_share": 1.0 - float((row_sums(keep, lengths) > 0).sum() / (row_sums(mask, lengths) > 0).sum()),
    }
    if kept.size:
        metrics |= {
            "rollout_corr/weight_mean": float(kept.mean()),
            "rollout_corr/weight_max": float(kept.max()),
            "rollout_corr/weight_min": float(kept.min()),
            "rollout_corr/effective_sample_share": float(kept.mean() ** 2 / (kept**2).mean()),
        }
    return metrics


def without_truncated(mask: np.ndarray, truncated: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The mask [tokens] without the rows of responses that were cut off ([rows] bool): DAPO's over-long filter.

    A response that ends by itself on the last token that it may have is whole.
    """
    return mask & ~on_tokens(np.asarray(truncated, bool), lengths)


def mismatch_metrics(rollout_log_probs: np.ndarray, actor_log_probs: np.ndarray, lengths: np.ndarray) -> dict[str, float]:
    """Metrics over all response tokens; log-probs are [tokens], `lengths` int [rows].

    `rollout_log_probs` are the engine's, `actor_log_probs` the trainer's with the same weights. The KL pair estimates
    KL(rollout || actor) in nats per token: the mean log ratio, and k3, which is never negative. The correlation of two
    constant arrays is 1 if they are equal, else 0. Raises NumericAbort if a value on a response token is not finite.
    """
    rollout = _finite("rollout_log_probs", rollout_log_probs, lengths)
    actor = _finite("old_log_probs", actor_log_probs, lengths)
    if rollout.size == 0:
        return {}
    probs_diff = np.abs(np.exp(actor) - np.exp(rollout))
    log_diff = np.abs(actor - rollout)
    log_ratio = np.clip(actor - rollout, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    values = {
        "training/rollout_probs_diff_mean": probs_diff.mean(),
        "training/rollout_probs_diff_max": probs_diff.max(),
        "training/rollout_probs_diff_std": probs_diff.std(ddof=1) if probs_diff.size > 1 else 0.0,
        "training/rollout_log_probs_abs_diff_mean": log_diff.mean(),
        "training/rollout_log_probs_abs_diff_max": log_diff.max(),
        "training/rollout_actor_probs_pearson_corr": _pearson(np.exp(rollout), np.exp(actor)),
        "rollout_corr/kl": (rollout - actor).mean(),
        "rollout_corr/k3_kl": (np.expm1(log_ratio) - log_ratio).mean(),
        "rollout_corr/chi2_token": np.expm1(2 * log_ratio).mean(),
        **_sequence_metrics(rollout, actor, lengths),
    }
    return {name: float(value) for name, value in values.items()}


def _sequence_metrics(rollout: np.ndarray, actor: np.ndarray, lengths: np.ndarray) -> dict[str, float]:
    """Perplexities of responses and the chi-square divergence of whole responses, over those that have a token."""
    filled = lengths > 0
    tokens = lengths[filled]
    sums = [row_sums(x, lengths)[filled] for x in (rollout, actor)]
    rollout_ppl, actor_ppl = (np.exp(-total / tokens) for total in sums)
    log_ratio = sums[1] - sums[0]
    log_ppl_diff = -log_ratio / tokens  # positive where the trainer is the more surprised
    return {
        "rollout_corr/training_ppl": actor_ppl.mean(),
        "rollout_corr/rollout_ppl": rollout_ppl.mean(),
        "rollout_corr/ppl_ratio": np.exp(log_ppl_diff).mean(),
        "rollout_corr/log_ppl_diff": log_ppl_diff.mean(),
        "rollout_corr/log_ppl_abs_diff": np.abs(log_ppl_diff).mean(),
        "rollout_corr/chi2_seq": np.expm1(2 * np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).mean(),
    }


def _finite(name: str, log_probs: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """float64 [tokens]."""
    values = np.asarray(log_probs, dtype=np.float64)
    bad = ~np.isfinite(values)
    if bad.any():
        first = int(np.argmax(bad))
        row, column = on_tokens(np.arange(len(lengths)), lengths)[first], places(lengths)[first]
        raise NumericAbort(
            f"{name}: {int(bad.sum())} of {values.size} response tokens are not finite, the first at row {row}, token {column} "
            f"({values[bad][0]}); the weights or the logits have overflowed"
        )
    return values


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    x_centred, y_centred = x - x.mean(), y - y.mean()
    scale = np.sqrt((x_centred**2).sum() * (y_centred**2).sum())
    if scale == 0:
        return float(np.array_equal(x, y))
    return (x_centred * y_centred).sum() / scale
