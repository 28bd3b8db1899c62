"""The distance of the policy from a teacher on its own tokens: numbers a row on the ranks, metrics on the driver.

numpy only. The formula of a token is `kl_to_teacher` in losses.py.
"""

import numpy as np

from mrl.algo.rows import RowValues, moments, row_sums, total


def gaps_of_rows(
    log_probs: np.ndarray, teacher_log_probs: np.ndarray, mask: np.ndarray, lengths: np.ndarray
) -> RowValues:
    """Sums `reverse_kl`, in nats, over the masked tokens of each row."""
    gaps = log_probs.astype(np.float64) - teacher_log_probs
    return {"reverse_kl": row_sums(np.where(mask, gaps, 0.0), lengths)}


def mass_of_rows(log_probs: np.ndarray, mask: np.ndarray, lengths: np.ndarray) -> RowValues:
    """Sums the probability that a teacher gives its top tokens, over the masked tokens of each row.

    `log_probs` is [tokens, k].
    """
    mass = np.exp(log_probs.astype(np.float64)).sum(-1)
    return {"teacher_mass": row_sums(np.where(mask, mass, 0.0), lengths)}


def distilled_of_rows(values: np.ndarray, mask: np.ndarray, lengths: np.ndarray) -> RowValues:
    """Returns sums and extremes of each row of `values`, float64 [tokens], which are taken off the advantages."""
    of_rows = moments(values, mask, lengths)
    return {
        "distilled": of_rows["sum"],
        "distilled_abs": row_sums(np.where(mask, np.abs(values), 0.0), lengths),
        "distilled_low": of_rows["low"],
        "distilled_high": of_rows["high"],
    }


def distillation_metrics(of_rows: RowValues) -> dict[str, float]:
    """Returns means over the `trained` tokens, given what the functions above return. There must be a trained token."""
    tokens = int(of_rows["trained"].sum())
    means = {
        "reverse_kl": "reverse_kl",
        "teacher_mass": "teacher_mass",
        "loss": "distilled",
        "abs_loss": "distilled_abs",
    }
    metrics = {
        f"distillation/{name}": total(of_rows[column]) / tokens for name, column in means.items() if column in of_rows
    }
    if "distilled" in of_rows:
        metrics["distillation/loss_min"] = float(of_rows["distilled_low"].min())
        metrics["distillation/loss_max"] = float(of_rows["distilled_high"].max())
    return metrics
