"""From samples to updated weights: log-probs of the policies, KL penalties, rejections, advantages; the update.

    samples --old log-probs--> batch --reference log-probs--> batch --anchor, rejections, weights--> batch --advantages--> batch --> update

Each phase but the last returns the batch with one thing more; the formulas stand in mrl.algo.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mrl.algo.advantages import AdvantageInputs, compute_advantages
from mrl.algo.correction import CorrectionParameters, correct, mismatch_metrics, without_truncated
from mrl.algo.losses import kl_in_reward
from mrl.algo.rows import row_sums
from mrl.cluster.actor_group import ActorGroup
from mrl.config.schema import AlgorithmConfig, RunConfig
from mrl.data.batch import TrainBatch
from mrl.data.routes import MISSING
from mrl.data.samples import Samples
from mrl.errors import EnvironmentFault, NumericAbort
from mrl.megatron.batching import MiniBatchLoad
from mrl.record.metrics import reduce_parts, seqlen_metrics
from mrl.train.rollouts import Rollouts, metric_values


def with_old_log_probs(config: RunConfig, actor: ActorGroup, samples: Samples) -> tuple[TrainBatch, dict[str, float]]:
    """The samples as a batch, with log-probs of the same weights under Megatron's numerics; the policy's entropy, and
    the mismatch between generation and training.

    Raises NumericAbort for log-probs that are not finite, EnvironmentFault when no sample has a route of R3.
    """
    if config.actor.router_replay == "R3":
        check_any_route(samples)
    batch = TrainBatch.of(samples, config.rollout.temperature)
    log_probs, entropy = actor.log_probs(batch)
    mismatch = mismatch_metrics(batch.rollout_log_probs, log_probs, batch.response_lengths)
    return replace(batch, old_log_probs=log_probs), {"actor/entropy": entropy} | mismatch


def check_any_route(samples: Samples) -> None:
    """Some may be missing, as those of cached prompts are; where all are, nothing would be replayed under the name of R3."""
    if samples.routes is None or not (samples.routes != MISSING).any():
        raise EnvironmentFault(
            f"actor.router_replay: R3, and the vLLM engines (rollout) returned no route for any of {len(samples)} samples; "
            "see logs/engine-N.log in the run directory, or set actor.router_replay: R2 or disabled, which need none"
        )


def with_ref_log_probs(actor: ActorGroup, batch: TrainBatch) -> TrainBatch:
    """The batch with the reference model's log-probs."""
    return replace(batch, ref_log_probs=actor.ref_log_probs(batch))


def kl_penalties(algorithm: AlgorithmConfig, batch: TrainBatch) -> tuple[np.ndarray | None, dict[str, float]]:
    """What the KL to the reference model takes off each token's reward, [response tokens]; None without use_kl_in_reward."""
    if not algorithm.use_kl_in_reward:
        return None, {}
    coefficient = algorithm.kl_ctrl.kl_coef
    penalties = kl_in_reward(batch.old_log_probs, batch.ref_log_probs, algorithm.kl_penalty, coefficient)
    by_response = row_sums(penalties, batch.response_lengths)
    return penalties, {"actor/reward_kl_penalty": float(by_response.mean()), "actor/kl_coef": coefficient}


def with_corrections(algorithm: AlgorithmConfig, batch: TrainBatch, samples: Samples) -> tuple[TrainBatch, dict[str, float]]:
    """The batch without what the over-long filter and the rollout correction reject, weighted, under the chosen anchor; and metrics.

    `batch.old_log_probs` are the trainer's. What is rejected is out of the loss alone: its score stays in its group's
    mean and standard deviation, as in DAPO, whose filter masks the loss. Raises NumericAbort when nothing is left to
    train on.
    """
    mask, metrics, lengths = np.ones(len(batch.rollout_log_probs), bool), {}, batch.response_lengths
    if algorithm.overlong_filter:
        mask = without_truncated(mask, samples.truncated, lengths)
        metrics["train/overlong_filtered_share"] = float(samples.truncated.mean())
    weights, correction = None, algorithm.rollout_correction
    if correction.level is not None:
        parameters = CorrectionParameters(correction.level, correction.mode, correction.low, correction.high)
        result = correct(parameters, batch.old_log_probs, batch.rollout_log_probs, mask, lengths)
        mask, weights = result.keep, result.weights
        metrics |= result.metrics
    _check_something_left(algorithm, mask, metrics)
    anchor = batch.rollout_log_probs if algorithm.anchor == "rollout" else batch.old_log_probs
    return replace(batch, old_log_probs=anchor, keep=mask, loss_weights=weights), metrics


def _check_something_left(algorithm: AlgorithmConfig, mask: np.ndarray, metrics: dict[str, float]) -> None:
    if mask.any() or not mask.size:
        return
    dropped, cures = [], []
    if algorithm.overlong_filter:
        dropped.append(f"algorithm.overlong_filter dropped {metrics['train/overlong_filtered_share']:.0%} of the responses")
        cures.append("raise data.max_response_length, or look at why no response ends")
    if algorithm.rollout_correction.level is not None:
        dropped.append("algorithm.rollout_correction rejected every token" + " of the rest" * bool(dropped))
        cures.append(
            "widen the band of the correction, or look at rollout_corr/k3_kl: generation and training may not hold the same weights"
        )
    raise NumericAbort(f"nothing of the step is left to train on: {' and '.join(dropped)}. To cure it: {'; '.join(cures)}")


def with_advantages(algorithm: AlgorithmConfig, batch: TrainBatch, rollouts: Rollouts, penalties: np.ndarray | None) -> TrainBatch:
    """The batch with every response's advantage on its trained tokens.

    `penalties`, [response tokens] or None, are taken off the reward of each token.
    """
    inputs = AdvantageInputs(
        scores=rollouts.rewards,
        group_ids=rollouts.samples.group_id,
        lengths=batch.response_lengths,
        mask=batch.loss_mask,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        token_penalties=penalties,
        parts={key: metric_values(key, rollouts.results, rollouts.rewards) for key in algorithm.gdpo_reward_keys},
        part_weights=dict(zip(algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights, strict=False)),
    )
    return replace(batch, advantages=compute_advantages(algorithm.adv_estimator, inputs))


def update(actor: ActorGroup, batch: TrainBatch) -> dict[str, float]:
    """All optimizer steps on the batch; reduced metrics. Raises NumericAbort when too many in a row could not be applied."""
    result = actor.update(batch)
    metrics = reduce_parts(result.parts)
    applied = len(result.loads) - metrics["actor/skipped_updates"]
    return metrics | {"actor/updates": applied} | load_metrics(batch.lengths, result.loads)


def load_metrics(lengths: np.ndarray, loads: Sequence[MiniBatchLoad]) -> dict[str, float]:
    """How evenly an update lies on the data-parallel ranks, and how much of it is padding, means over its mini-batches.

    `lengths` [batch] are tokens a sequence; `loads` come from the ranks, one a mini-batch.
    """
    trained_tokens = [sum(tokens) for tokens in zip(*(load.tokens for load in loads), strict=True)]
    packed = [load.packed_sequences for load in loads if load.packed_sequences is not None]
    budgets = [load.budget_share for load in loads if load.budget_share is not None]
    return seqlen_metrics(lengths, trained_tokens) | {
        "actor/padding_share": float(np.mean([load.padding_share for load in loads])),
        "actor/dp_imbalance": float(np.mean([load.imbalance for load in loads])),
        **({"actor/packed_sequences": float(np.mean(packed))} if packed else {}),
        **({"actor/token_budget_share": max(budgets)} if budgets else {}),
    }
