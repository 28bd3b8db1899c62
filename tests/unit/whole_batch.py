"""A step's per-token work with all tokens in one process, by numpy's own means:
what replicas together have to come to.
"""

import numpy as np

from mrl.algo.advantages import ADVANTAGE_FUNCTIONS, PENALTIES_TO_COME, WHITENED, AdvantageInputs
from mrl.algo.correction import CorrectionParameters, correct
from mrl.algo.losses import kl_in_reward
from mrl.algo.selection import SELECTIONS
from mrl.generate.rollouts import metric_values


def rows_of(values, lengths):
    return np.split(values, np.cumsum(lengths)[:-1])


def row_sums(values, lengths):
    return np.array([row.sum() for row in rows_of(values, lengths)])


def mismatch(rollout, actor, lengths):
    rollout, actor = rollout.astype(np.float64), actor.astype(np.float64)
    gap, log_ratio = np.abs(np.exp(actor) - np.exp(rollout)), actor - rollout
    ppl = [np.exp([-row.mean() for row in rows_of(x, lengths)]) for x in (rollout, actor)]
    apart, whole = np.log(ppl[1] / ppl[0]), row_sums(log_ratio, lengths)
    return {
        "training/rollout_probs_diff_mean": gap.mean(), "training/rollout_probs_diff_max": gap.max(),
        "training/rollout_probs_diff_std": gap.std(ddof=1),
        "training/rollout_log_probs_abs_diff_mean": np.abs(log_ratio).mean(),
        "training/rollout_log_probs_abs_diff_max": np.abs(log_ratio).max(),
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(np.exp(rollout), np.exp(actor))[0, 1],
        "rollout_corr/kl": -log_ratio.mean(), "rollout_corr/k3_kl": (np.exp(log_ratio) - 1 - log_ratio).mean(),
        "rollout_corr/chi2_token": np.exp(2 * log_ratio).mean() - 1,
        "rollout_corr/chi2_seq": np.exp(2 * np.clip(whole, -20, 20)).mean() - 1,
        "rollout_corr/training_ppl": ppl[1].mean(), "rollout_corr/rollout_ppl": ppl[0].mean(),
        "rollout_corr/ppl_ratio": (ppl[1] / ppl[0]).mean(), "rollout_corr/log_ppl_diff": apart.mean(),
        "rollout_corr/log_ppl_abs_diff": np.abs(apart).mean(),
    }  # fmt: skip


def corrected(algorithm, old, rollout, truncated, lengths):
    """Mask, weights or None, metrics."""
    mask, setting = np.ones(len(old), bool), algorithm.rollout_correction
    metrics = {}
    if algorithm.overlong_filter:
        mask, metrics = ~np.repeat(truncated, lengths), {"train/overlong_filtered_share": truncated.mean()}
    if setting.level is None:
        return mask, None, metrics
    found = correct(
        CorrectionParameters(setting.level, setting.mode, setting.low, setting.high), old, rollout, mask, lengths
    )
    log_ratio = np.where(mask, old.astype(np.float64) - rollout, 0)
    sums, counts = row_sums(log_ratio, lengths), row_sums(mask, lengths)
    seen = {
        "token": log_ratio,
        "sequence": np.repeat(sums, lengths),
        "geometric": np.repeat(sums / np.maximum(counts, 1), lengths),
    }
    ratio = np.exp(seen[setting.level])
    outside = mask & ((ratio > setting.high) | (ratio < (setting.low or 0)))
    kept = np.where(setting.level == "geometric" and setting.mode == "mask", 1.0, np.clip(ratio, None, setting.high))[
        found.keep
    ]
    return found.keep, found.weights, metrics | {
        "rollout_corr/outside_share": outside.sum() / mask.sum(),
        "rollout_corr/rejected_token_share": 1 - found.keep.sum() / mask.sum(),
        "rollout_corr/rejected_sequence_share": 1 - (row_sums(found.keep, lengths) > 0).sum() / (counts > 0).sum(),
        "rollout_corr/weight_mean": kept.mean(), "rollout_corr/weight_max": kept.max(),
        "rollout_corr/weight_min": kept.min(),
        "rollout_corr/effective_sample_share": kept.mean() ** 2 / (kept**2).mean(),
    }  # fmt: skip


def advantages(algorithm, rollouts, penalties, mask, lengths):
    inputs = AdvantageInputs(
        rollouts.rewards, rollouts.samples.rows.group_id, lengths, algorithm.norm_adv_by_std_in_grpo,
        None if penalties is None else row_sums(penalties, lengths),
        {key: metric_values(key, rollouts.results, rollouts.rewards) for key in algorithm.gdpo_reward_keys},
    )  # fmt: skip
    values = np.repeat(ADVANTAGE_FUNCTIONS[algorithm.adv_estimator](inputs), lengths)
    if algorithm.adv_estimator in PENALTIES_TO_COME and penalties is not None:
        values = values - np.concatenate([row[::-1].cumsum()[::-1] for row in rows_of(penalties, lengths)])
    returns = values
    if algorithm.adv_estimator in WHITENED:
        values = (values - values[mask].mean()) / np.sqrt(values[mask].var(ddof=1) + 1e-8)
    of_tokens = np.where(mask, values, 0).astype(np.float32)
    if algorithm.adv_estimator not in ("reinforce_plus_plus", "turn_return"):  # verl's first, and the same by turn
        returns = of_tokens
    return of_tokens, returns


def selected(loss, advantages, log_probs, mask, lots):
    """Of one mini-batch."""
    a, p = advantages.astype(np.float64), log_probs.astype(np.float64)
    covariance = (a - a[mask].mean()) * (p - p[mask].mean())
    allowed, order = mask, covariance
    if loss.loss_mode == "clip_cov":
        allowed, order = mask & (covariance > loss.clip_cov_lb) & (covariance < loss.clip_cov_ub), lots
    count = max(int({"clip_cov": loss.clip_cov_ratio, "kl_cov": loss.kl_cov_ratio}[loss.loss_mode] * mask.sum()), 1)
    chosen = np.zeros(len(mask), bool)
    chosen[sorted(np.flatnonzero(allowed), key=lambda token: order[token])[-count:]] = True
    return chosen


def mini_batches(lengths, rows) -> list[tuple[slice, slice]]:
    """Of each mini-batch of so many rows, the last one of what is left: its rows, and its tokens."""
    parts = [slice(first, min(first + rows, len(lengths))) for first in range(0, len(lengths), rows)]
    return [(part, slice(int(lengths[: part.start].sum()), int(lengths[: part.stop].sum()))) for part in parts]


def whole_batch(config, rollouts, old, ref, lots) -> tuple[dict, dict]:
    """Metrics and columns of all tokens before the update; `old`, `ref` [response tokens].

    `lots`: of a token, where they are drawn.
    """
    algorithm, samples = config.algorithm, rollouts.samples.read()
    rollout, lengths, penalties = samples.rollout_log_probs, samples.response_lengths, None
    metrics, columns = mismatch(rollout, old, lengths), {}
    if algorithm.use_kl_in_reward:
        coefficient = algorithm.kl_ctrl.kl_coef
        kl = kl_in_reward(old, ref, algorithm.kl_penalty)
        penalties = coefficient * kl
        metrics |= {"actor/reward_kl_penalty": row_sums(penalties, lengths).mean(), "actor/kl_coef": coefficient}
        metrics["actor/reward_kl"] = np.mean([row.mean() for row in rows_of(kl, lengths)])
        rewards = rollouts.rewards - row_sums(penalties, lengths)
        metrics |= {f"critic/rewards/{name}": getattr(rewards, name)() for name in ("mean", "max", "min")}
    mask, weights, more = corrected(algorithm, old, rollout, samples.truncated, lengths)
    metrics |= more
    anchor = rollout if algorithm.anchor == "rollout" else old
    of_tokens, returns = advantages(algorithm, rollouts, penalties, mask, lengths)
    columns |= {"old_log_probs": anchor, "keep": mask, "advantages": of_tokens}
    columns |= ({} if weights is None else {"loss_weights": weights}) | (
        {"ref_log_probs": ref} if algorithm.needs_reference else {}
    )
    for what, values in (("advantages", of_tokens), ("returns", returns)):
        trained = values[mask].astype(np.float64)
        metrics |= {f"critic/{what}/{name}": getattr(trained, name)() for name in ("mean", "max", "min")}
    parts = mini_batches(lengths, config.actor.ppo_mini_batch_size * config.rollout.n)
    for number, (part, span) in enumerate(parts):
        metrics[f"count {number}"] = (int(mask[span].sum()), int((row_sums(mask[span], lengths[part]) > 0).sum()))
    if algorithm.policy_loss.loss_mode in SELECTIONS:
        found = [
            selected(
                algorithm.policy_loss,
                columns["advantages"][span],
                anchor[span],
                mask[span],
                lots(anchor[span], lengths[part]),
            )
            for part, span in parts
        ]
        columns["selected"] = np.concatenate(found)
    return metrics, columns
