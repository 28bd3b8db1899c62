"""The gap between the numerics of generation and training: its metrics, its correction, and which tokens to leave out.

numpy only. [tokens] are the response tokens of some rows, end to end. `lengths` [rows] is the number of tokens a row.

The metrics have verl's names and formulas. The correction has two axes (mrl.algo.spec.CORRECTIONS names points on
them). The level says which ratio is tested, the mode says what is done with it. The ratio is old / rollout of a token
or of the whole response (the product). Or it is the geometric mean over the response's tokens.

A rejected token leaves the loss, its denominators, lengths and ratios (mode mask). A token of weight 0 stays in all of
them, and only its own part of the policy loss is 0 (mode icepop).
"""

import math
from dataclasses import dataclass

import numpy as np

from mrl.algo.rows import RowValues, on_tokens, positions, row_extremes, row_sums, second_moment, total
from mrl.algo.spec import BAND_MODES, LOG_RATIO_LIMIT
from mrl.errors import NumericAbort


@dataclass(frozen=True)
class CorrectionParameters:
    """Level, mode and bounds of a correction. Without `low` there is no lower bound.

    `weigh`: modes mask and icepop weigh what is inside the band by its ratio; otherwise by 1. None: at every level but
    geometric, since the geometric mean tests a response and is not its importance weight.

    `reject` is a second level, beside the weights: what is outside `reject_low` to `reject_high` there is rejected.
    """

    level: str
    mode: str
    low: float | None
    high: float
    weigh: bool | None = None
    reject: str | None = None
    reject_low: float | None = None
    reject_high: float = math.inf

    @property
    def weighs_inside(self) -> bool:
        """Whether what is inside the band is weighed by its ratio."""
        if self.weigh is None:
            return self.level != "geometric"
        return self.weigh


@dataclass(frozen=True)
class Correction:
    """The result of a correction. `keep` bool [tokens] marks the tokens of the mask that stay.

    `weights` float32 [tokens] multiply the policy loss; they are 1 where no correction applies.
    """

    keep: np.ndarray
    weights: np.ndarray
    of_rows: RowValues  # the argument of `correction_metrics`


def log_ratios(
    old_log_probs: np.ndarray, rollout_log_probs: np.ndarray, mask: np.ndarray, lengths: np.ndarray, level: str
) -> np.ndarray:
    """Returns the log of the level's ratio at every masked token, float64 [tokens], within [-20, 20]; 0 outside the
    mask.
    """
    difference = np.where(mask, np.asarray(old_log_probs, np.float64) - np.asarray(rollout_log_probs, np.float64), 0.0)
    if level != "token":
        by_row = row_sums(difference, lengths)
        if level == "geometric":
            by_row = by_row / np.maximum(row_sums(mask, lengths), 1)
        difference = on_tokens(by_row, lengths)
    return np.where(mask, np.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)


def correct(
    parameters: CorrectionParameters,
    old_log_probs: np.ndarray,
    rollout_log_probs: np.ndarray,
    mask: np.ndarray,
    lengths: np.ndarray,
) -> Correction:
    """Computes the weights and rejections of one step. Arrays are [tokens], `mask` is bool, `lengths` int [rows].

    Mode `truncate` bounds the ratio above and `clip` on both sides; the result weighs the policy loss. Mode `mask`
    rejects what is outside the band, mode `icepop` (arXiv:2510.18855; arXiv:2512.16144, eq. 1) gives it the weight 0.
    What is inside is weighed as `CorrectionParameters.weigh` says.

    A second level rejects beside these weights, as verl's rollout_rs does beside its rollout_is (its preset
    Geo-RS-Token-TIS). Both ratios are over the tokens of `mask`.
    """
    ratio = np.exp(log_ratios(old_log_probs, rollout_log_probs, mask, lengths, parameters.level))
    low = 0.0
    if parameters.low is not None:
        low = parameters.low
    inside = (ratio >= low) & (ratio <= parameters.high)
    keep = mask
    weights = ratio
    if parameters.mode in BAND_MODES and not parameters.weighs_inside:
        weights = np.ones(mask.shape)
    match parameters.mode:
        case "mask":
            keep = mask & inside
        case "icepop":
            weights = np.where(inside, weights, 0.0)
        case "clip":
            weights = np.clip(weights, low, parameters.high)
        case "truncate":
            weights = np.clip(weights, None, parameters.high)
    if parameters.reject is not None:
        tested = np.exp(log_ratios(old_log_probs, rollout_log_probs, mask, lengths, parameters.reject))
        kept = (tested >= (parameters.reject_low or 0.0)) & (tested <= parameters.reject_high)
        keep = keep & kept
        inside = inside & kept
    weights = np.where(keep, weights, 1.0)
    return Correction(keep, weights.astype(np.float32), _of_rows(weights, keep, mask, inside, lengths))


def _of_rows(
    weights: np.ndarray, keep: np.ndarray, mask: np.ndarray, inside: np.ndarray, lengths: np.ndarray
) -> RowValues:
    kept = np.where(keep, weights, 0.0)
    return {
        "tokens": row_sums(mask, lengths),
        "outside": row_sums(mask & ~inside, lengths),
        "kept": row_sums(keep, lengths),
        "taken": row_sums(kept > 0, lengths),
        "weight_sum": row_sums(kept, lengths),
        "weight_square": row_sums(kept**2, lengths),
        "weight_low": row_extremes(np.minimum, np.where(keep, weights, np.inf), lengths, np.inf),
        "weight_high": row_extremes(np.maximum, np.where(keep, weights, -np.inf), lengths, -np.inf),
    }


def correction_metrics(of_rows: RowValues) -> dict[str, float]:
    """Returns the metrics of all rows, given the `Correction.of_rows` of each.

    Weights are those of the tokens that stay in the denominators. A token of weight 0 counts as rejected.
    """
    tokens = int(of_rows["tokens"].sum())
    kept = int(of_rows["kept"].sum())
    if not tokens:
        return {}
    metrics = {
        "rollout_corr/outside_share": int(of_rows["outside"].sum()) / tokens,
        "rollout_corr/rejected_token_share": 1.0 - int(of_rows["taken"].sum()) / tokens,
        "rollout_corr/rejected_sequence_share": 1.0
        - int((of_rows["taken"] > 0).sum()) / int((of_rows["tokens"] > 0).sum()),
    }
    if of_rows["taken"].any():
        mean = total(of_rows["weight_sum"]) / kept
        square = total(of_rows["weight_square"]) / kept
        metrics |= {
            "rollout_corr/weight_mean": mean,
            "rollout_corr/weight_max": float(of_rows["weight_high"].max()),
            "rollout_corr/weight_min": float(of_rows["weight_low"].min()),
            "rollout_corr/effective_sample_share": mean**2 / square,
        }
    return metrics


def without_truncated(mask: np.ndarray, truncated: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Drops the rows of truncated responses from the mask: DAPO's over-long filter.

    `mask` is bool [tokens], `truncated` bool [rows]. A response that ends by itself on its last allowed token is not
    truncated.
    """
    return mask & ~on_tokens(np.asarray(truncated, bool), lengths)


def mismatch_of_rows(rollout_log_probs: np.ndarray, actor_log_probs: np.ndarray, lengths: np.ndarray) -> RowValues:
    """Returns the numbers of each row that `mismatch_metrics` needs. Log-probs are [tokens], `lengths` int [rows].

    `rollout_log_probs` come from the engine, `actor_log_probs` from the trainer with the same weights. A value that is
    not finite is counted in `bad_*` and replaced by 0.
    """
    given = {"rollout": np.asarray(rollout_log_probs, np.float64), "actor": np.asarray(actor_log_probs, np.float64)}
    bad = {f"bad_{name}": row_sums(~np.isfinite(values), lengths) for name, values in given.items()}
    first = {f"first_bad_{name}": _first_bad(values, lengths) for name, values in given.items()}
    rollout, actor = (np.where(np.isfinite(values), values, 0.0) for values in given.values())
    probs = {"rollout_probs": np.exp(rollout), "actor_probs": np.exp(actor)}
    gap = np.abs(probs["actor_probs"] - probs["rollout_probs"])
    log_gap = np.abs(actor - rollout)
    log_ratio = np.clip(actor - rollout, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    summed = {
        "rollout": rollout,
        "actor": actor,
        "gap": gap,
        "log_gap": log_gap,
        "kl": rollout - actor,
        "k3": np.expm1(log_ratio) - log_ratio,
        "chi2": np.expm1(2 * log_ratio),
        **probs,
    }
    sums = {name: row_sums(values, lengths) for name, values in summed.items()}
    centred = {name: summed[name] - on_tokens(sums[name] / np.maximum(lengths, 1), lengths) for name in ("gap", *probs)}
    products = {
        "gap_m2": centred["gap"] ** 2,
        "rollout_probs_m2": centred["rollout_probs"] ** 2,
        "actor_probs_m2": centred["actor_probs"] ** 2,
        "probs_product": centred["rollout_probs"] * centred["actor_probs"],
    }
    return {
        "tokens": lengths.astype(np.int64),
        **bad,
        **first,
        **sums,
        **{name: row_sums(values, lengths) for name, values in products.items()},
        "gap_high": row_extremes(np.maximum, gap, lengths, 0.0),
        "log_gap_high": row_extremes(np.maximum, log_gap, lengths, 0.0),
    }


def mismatch_metrics(of_rows: RowValues) -> dict[str, float]:
    """Returns metrics over all response tokens, given the `mismatch_of_rows` of each row.

    The KL pair estimates KL(rollout || actor) in nats per token: by the mean log ratio, and by k3, which is never
    negative. The correlation of two constant arrays is 1 if they are equal, else 0. Raises NumericAbort if a value is
    not finite.
    """
    _check_finite(of_rows)
    tokens = int(of_rows["tokens"].sum())
    if not tokens:
        return {}
    mean = {name: total(of_rows[name]) / tokens for name in ("gap", "log_gap", "kl", "k3", "chi2")}
    spread = second_moment(of_rows["gap_m2"], of_rows["gap"], of_rows["gap"], of_rows["tokens"])
    values = {
        "training/rollout_probs_diff_mean": mean["gap"],
        "training/rollout_probs_diff_max": of_rows["gap_high"].max(),
        "training/rollout_probs_diff_std": math.sqrt(spread / (tokens - 1)) if tokens > 1 else 0.0,
        "training/rollout_log_probs_abs_diff_mean": mean["log_gap"],
        "training/rollout_log_probs_abs_diff_max": of_rows["log_gap_high"].max(),
        "training/rollout_actor_probs_pearson_corr": _pearson(of_rows),
        "rollout_corr/kl": mean["kl"],
        "rollout_corr/k3_kl": mean["k3"],
        "rollout_corr/chi2_token": mean["chi2"],
        **_sequence_metrics(of_rows),
    }
    return {name: float(value) for name, value in values.items()}


def _sequence_metrics(of_rows: RowValues) -> dict[str, float]:
    """Returns perplexities and the chi-square divergence of whole responses. Responses without a token are left out."""
    filled = of_rows["tokens"] > 0
    tokens, rollout, actor = (of_rows[name][filled] for name in ("tokens", "rollout", "actor"))
    log_ratio = actor - rollout
    log_ppl_diff = -log_ratio / tokens  # positive where the trainer is the more surprised
    values = {
        "rollout_corr/training_ppl": np.exp(-actor / tokens),
        "rollout_corr/rollout_ppl": np.exp(-rollout / tokens),
        "rollout_corr/ppl_ratio": np.exp(log_ppl_diff),
        "rollout_corr/log_ppl_diff": log_ppl_diff,
        "rollout_corr/log_ppl_abs_diff": np.abs(log_ppl_diff),
        "rollout_corr/chi2_seq": np.expm1(2 * np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)),
    }
    return {name: total(each) / len(each) for name, each in values.items()}


def _first_bad(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the position of the first non-finite value of each row, float64 [rows]; infinity where there is none."""
    return row_extremes(np.minimum, np.where(np.isfinite(values), np.inf, positions(lengths)), lengths, np.inf)


def _check_finite(of_rows: RowValues) -> None:
    for name, title in (("rollout", "rollout_log_probs"), ("actor", "old_log_probs")):
        bad = of_rows[f"bad_{name}"]
        if bad.any():
            row = int(np.argmax(bad > 0))
            token = int(of_rows[f"first_bad_{name}"][row])
            raise NumericAbort(
                f"{title}: {int(bad.sum())} of {int(of_rows['tokens'].sum())} response tokens are not finite, the "
                f"first at row {row + 1}, token {token}; the weights or the logits have "
                "overflowed"
            )


def _pearson(of_rows: RowValues) -> float:
    x = of_rows["rollout_probs"]
    y = of_rows["actor_probs"]
    counts = of_rows["tokens"]
    squares = second_moment(of_rows["rollout_probs_m2"], x, x, counts) * second_moment(
        of_rows["actor_probs_m2"], y, y, counts
    )
    if squares <= 0:
        return float(of_rows["gap_high"].max() == 0)
    return second_moment(of_rows["probs_product"], x, y, counts) / math.sqrt(squares)
