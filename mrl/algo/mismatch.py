"""How far training's probabilities of the sampled tokens are from generation's; numpy, names and formulas as in verl."""

import numpy as np

from mrl.errors import NumericAbort

LOG_RATIO_LIMIT = 20.0


def mismatch_metrics(rollout_log_probs: np.ndarray, actor_log_probs: np.ndarray, response_mask: np.ndarray) -> dict[str, float]:
    """Metrics over all response tokens; all three arguments are [batch, response_length], the mask bool.

    `rollout_log_probs` are the engine's, `actor_log_probs` the trainer's with the same weights. The KL pair estimates
    KL(rollout || actor) in nats per token: the mean log ratio, and k3, which is never negative. The correlation of two constant
    arrays is 1 if they are equal, else 0. Raises NumericAbort if a value on a response token is not finite.
    """
    rollout = _finite("rollout_log_probs", rollout_log_probs, response_mask)
    actor = _finite("old_log_probs", actor_log_probs, response_mask)
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
        **_sequence_metrics(rollout_log_probs, actor_log_probs, response_mask),
    }
    return {name: float(value) for name, value in values.items()}


def _sequence_metrics(rollout: np.ndarray, actor: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """Perplexities of responses and the chi-square divergence of whole responses, over those that have a token."""
    rows = mask.any(-1)
    lengths = mask[rows].sum(-1)
    sums = [np.where(mask, x, 0.0)[rows].astype(np.float64).sum(-1) for x in (rollout, actor)]
    rollout_ppl, actor_ppl = (np.exp(-total / lengths) for total in sums)
    log_ratio = sums[1] - sums[0]
    log_ppl_diff = -log_ratio / lengths  # positive where the trainer is the more surprised
    return {
        "rollout_corr/training_ppl": actor_ppl.mean(),
        "rollout_corr/rollout_ppl": rollout_ppl.mean(),
        "rollout_corr/ppl_ratio": np.exp(log_ppl_diff).mean(),
        "rollout_corr/log_ppl_diff": log_ppl_diff.mean(),
        "rollout_corr/log_ppl_abs_diff": np.abs(log_ppl_diff).mean(),
        "rollout_corr/chi2_seq": np.expm1(2 * np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).mean(),
    }


def _finite(name: str, log_probs: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """float64 [tokens] under the mask."""
    values = np.asarray(log_probs, dtype=np.float64)[mask]
    bad = ~np.isfinite(values)
    if bad.any():
        row, column = np.argwhere(mask)[np.argmax(bad)]
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
