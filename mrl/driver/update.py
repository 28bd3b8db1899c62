"""From samples to updated weights: log-probs of the policies, KL penalties, rejections, advantages; the update.

    samples --> ranks: old log-probs --> reference's --> anchor, rejections, weights, penalty --> advantages --> update
    driver:     mismatch                                 trained tokens, penalties a row   <-->   advantages a response

If a step is one update, algorithm.anchor on_policy omits the first pass: the update's own log-probs are the old ones. A
critic's values are computed after the reference's log-probs. Ranks estimate advantages of tokens from them
(mrl/algo/gae.py). The critic is updated first.

Tokens and values of tokens stay on the ranks (rank/rank_batch.py). This file has numbers for each row, and computations
over all rows: metrics, baselines of groups, whitening, the loss's denominators. The formulas are in mrl.algo.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from mrl.algo.advantages import (
    WHITENED,
    AdvantageInputs,
    TokenAdvantages,
    load_custom_advantage,
    response_advantages,
    whitened,
)
from mrl.algo.correction import correction_metrics, mismatch_metrics
from mrl.algo.distillation import distillation_metrics
from mrl.algo.gae import ERRORS, RETURNS, VALUES
from mrl.algo.plain import FloatParts
from mrl.algo.rows import RowValues, second_moment, total
from mrl.algo.selection import SELECTIONS, least_chosen, means_of
from mrl.config.schema import ActorConfig, AlgorithmConfig
from mrl.data.samples import SampleRows
from mrl.driver.step_batch import Mismatch, StepBatch, counts_of
from mrl.errors import EnvironmentFault, NumericAbort
from mrl.generate.rollouts import Rollouts, metric_values
from mrl.rank.batching import MiniBatchLoad
from mrl.rank.loss_parameters import loss_parameters
from mrl.record.metrics import advantage_metrics, reduce_parts, seqlen_metrics

EXPLAINED_EPS = 1e-5  # verl's, added to a variance of returns
_MOMENTS = ("count", "sum", "m2", "low", "high")


def old_log_probs(actor: ActorConfig, algorithm: AlgorithmConfig, step: StepBatch) -> dict[str, float]:
    """Computes log-probs of the same weights under Megatron's numerics. Returns their entropy and distance from
    generation's.

    With algorithm.anchor on_policy, the update computes them instead. Raises NumericAbort for log-probs that are not
    finite, EnvironmentFault if too few samples have routes of R3.
    """
    if actor.router_replay == "R3":
        check_routed(step.rows, actor.max_unrouted_share)
    if algorithm.on_policy:
        return {}
    return _metrics_of(step.log_probs())


def _metrics_of(mismatch: Mismatch) -> dict[str, float]:
    return {"actor/entropy": mismatch.entropy} | mismatch_metrics(mismatch.of_rows)


def check_routed(rows: SampleRows, most: float) -> None:
    """Raises EnvironmentFault if a larger share than `most` of the samples, or all, have no route.

    Routes of single tokens may be missing, as those of cached prompts are. The update counts these.
    """
    without = int((~rows.routed).sum())
    if without <= most * len(rows) and without < len(rows):
        return
    found = f"no route for any of {len(rows)} samples"
    if without < len(rows):
        found = f"no route for {without} of {len(rows)} samples, more than actor.max_unrouted_share ({most:g}) allows"
    raise EnvironmentFault(
        f"actor.router_replay: R3, and the vLLM engines (rollout) returned {found}; see logs/engine-N.log in the run "
        "directory, or set actor.router_replay: R2 or disabled, which need none"
    )


def corrections(
    algorithm: AlgorithmConfig, step: StepBatch, counted: np.ndarray | None = None
) -> tuple[RowValues, dict[str, float]]:
    """Removes the tokens that the overlong filter and the rollout correction reject, as RankBatch.correct.

    `counted`, bool [rows], is from mrl.generate.rollouts.compared. Other rows are removed completely. None: all count.
    Returns numbers for each row, such as `trained` tokens and `penalties`, and metrics. Raises NumericAbort if nothing
    is left to train on.
    """
    of_rows = step.correct(counted)
    metrics = {}
    if algorithm.use_kl_in_reward:
        penalty = total(of_rows["penalties"]) / len(step.rows)
        metrics |= {"actor/reward_kl_penalty": penalty, "actor/kl_coef": algorithm.kl_ctrl.kl_coef}
    if algorithm.overlong_filter:
        metrics["train/overlong_filtered_share"] = float(step.rows.overlong.mean())
    if algorithm.rollout_correction.level is not None:
        metrics |= correction_metrics(of_rows)
    _check_something_left(algorithm, of_rows.get("taken", of_rows["trained"]), metrics, counted)
    if "not_finite" in of_rows:
        _check_teacher(of_rows)
        metrics |= distillation_metrics(of_rows)
    return of_rows, metrics


def _check_teacher(of_rows: RowValues) -> None:
    """Raises NumericAbort for a teacher's log-probs that are not finite."""
    if lost := int(of_rows["not_finite"].sum()):
        raise NumericAbort(
            f"the teacher's log-probs of {lost} of {int(of_rows['trained'].sum())} tokens are no finite numbers: look "
            "at the weights in distillation.teacher_model.model_path, or set model.dtype: float32"
        )


def _check_something_left(
    algorithm: AlgorithmConfig, taken: np.ndarray, metrics: dict[str, float], counted: np.ndarray | None
) -> None:
    """Raises NumericAbort where no row has a token left. `taken` [rows] are its tokens of a weight above 0."""
    if taken.any():
        return
    dropped = []
    cures = []
    if counted is not None and not counted.all():
        dropped.append(
            f"{1 - counted.mean():.0%} of the responses are left out, since environments failed or log-probs are no "
            "numbers"
        )
        cures.append("look at logs/engine-N.tools.log and logs/engine-N.log in the run directory")
    if algorithm.overlong_filter:
        dropped.append(
            f"algorithm.overlong_filter dropped {metrics['train/overlong_filtered_share']:.0%} of the responses"
        )
        cures.append("raise data.max_response_length, or look at why no response ends")
    if algorithm.rollout_correction.level is not None:
        dropped.append("algorithm.rollout_correction rejected every token" + " of the rest" * bool(dropped))
        cures.append(
            "widen the band of the correction, or look at rollout_corr/k3_kl: generation and training may "
            "not hold the same weights"
        )
    raise NumericAbort(
        f"nothing of the step is left to train on: {' and '.join(dropped)}. To cure it: {'; '.join(cures)}"
    )


def advantages(
    algorithm: AlgorithmConfig,
    step: StepBatch,
    rollouts: Rollouts,
    corrected: RowValues,
    counted: np.ndarray | None = None,
) -> dict[str, float]:
    """Sets every response's advantage on its trained tokens, and marks the tokens that the loss treats separately.

    `corrected`: numbers for each row from `corrections`. Their penalties are subtracted from the rewards. `counted` as
    there. Returns metrics.
    """
    custom = algorithm.custom_advantage
    if custom is not None:
        load_custom_advantage(custom.path, algorithm.adv_estimator)
    if counted is None:
        counted = np.ones(len(rollouts.results), dtype=bool)
    penalties = corrected.get("penalties")
    parts = {key: metric_values(key, rollouts.results, rollouts.rewards) for key in algorithm.gdpo_reward_keys}
    inputs = AdvantageInputs(
        scores=rollouts.rewards[counted],
        group_ids=step.rows.group_id[counted],
        lengths=step.rows.sampled_lengths[counted],
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        penalties=None if penalties is None else penalties[counted],
        parts={key: values[counted] for key, values in parts.items()},
        part_weights=dict(zip(algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights, strict=False)),
        custom=custom.parameters if custom else {},
    )
    of_responses = response_advantages(algorithm.adv_estimator, inputs).among(counted)
    of_values = {}
    if algorithm.needs_critic:
        of_values = _estimated(step, np.where(counted, rollouts.rewards, 0.0))
    if algorithm.adv_estimator in WHITENED:
        of_responses = whitened(of_responses, _moments(algorithm, step, of_responses, corrected["trained"]))
    of_rows = step.set_advantages(of_responses)
    if algorithm.policy_loss.loss_mode in SELECTIONS:
        _select(algorithm, step, of_rows["sum"], corrected)
    return advantage_metrics(of_rows) | of_values


def _estimated(step: StepBatch, rewards: np.ndarray) -> dict[str, float]:
    """Returns metrics of values and returns, after ranks have estimated tokens' advantages.

    Raises NumericAbort for values that are not finite. Whitening would spread one of them to all advantages.
    """
    of_rows = step.estimate(rewards)
    # returns also depend on values of tokens that a correction rejected
    if not all(np.isfinite(of_rows[f"{name}.sum"]).all() for name in (VALUES, RETURNS)):
        raise NumericAbort(
            "values of the critic are not finite, so nothing of the step can be trained on; resume from a checkpoint "
            "before with a smaller critic.optim.lr"
        )
    return value_metrics(of_rows)


def value_metrics(of_rows: RowValues) -> dict[str, float]:
    """Returns `critic/values/*`, `critic/returns/*` and the share of the returns' variance that values explain, as in
    verl.

    `of_rows`: `mrl.algo.gae.value_moments`.
    """
    moments = {name: {key: of_rows[f"{name}.{key}"] for key in _MOMENTS} for name in (VALUES, RETURNS, ERRORS)}
    count = int(moments[VALUES]["count"].sum())
    if not count:
        return {}
    metrics = {}
    for name in (VALUES, RETURNS):
        metrics[f"critic/{name}/mean"] = total(moments[name]["sum"]) / count
        metrics[f"critic/{name}/max"] = float(moments[name]["high"].max())
        metrics[f"critic/{name}/min"] = float(moments[name]["low"].min())
    missed = _variance(moments[ERRORS])
    return metrics | {"critic/vf_explained_var": 1.0 - missed / (_variance(moments[RETURNS]) + EXPLAINED_EPS)}


def _variance(of_rows: RowValues) -> float:
    """Returns the variance over n - 1; 0 for a single token."""
    count = int(of_rows["count"].sum())
    squares = second_moment(of_rows["m2"], of_rows["sum"], of_rows["sum"], of_rows["count"])
    return squares / max(count - 1, 1)


def _moments(
    algorithm: AlgorithmConfig, step: StepBatch, of_responses: TokenAdvantages, trained: np.ndarray
) -> RowValues:
    """Returns moments of each response's advantages.

    They are equal on all its tokens, unless penalties or a critic make them differ.
    """
    if of_responses.to_come or algorithm.needs_critic:
        return step.moments(of_responses)
    values = of_responses.per_response
    some = trained > 0
    low = np.where(some, values, np.inf)
    high = np.where(some, values, -np.inf)
    return {"count": trained, "sum": trained * values, "m2": np.zeros(len(values)), "low": low, "high": high}


def _select(algorithm: AlgorithmConfig, step: StepBatch, advantages: np.ndarray, corrected: RowValues) -> None:
    """Selects tokens by `advantages` [rows], which are sums over trained tokens, as are the anchor's log-probs in
    `corrected`.
    """
    parameters = loss_parameters(algorithm)
    columns = [step.by_mini_batch(values) for values in (advantages, corrected["anchor"], corrected["trained"])]
    means = [means_of(total(a), total(p), int(count.sum())) for a, p, count in zip(*columns, strict=True)]
    candidates = step.find(means)
    step.select([least_chosen(parameters, parts, mean) for parts, mean in zip(candidates, means, strict=True)])


def update_critic(step: StepBatch, corrected: RowValues) -> dict[str, float]:
    """Runs all optimizer steps of the critic. Returns reduced metrics. Raises NumericAbort as `update` does."""
    return reduce_parts(step.update_critic(corrected["trained"]))


def leave_actor(step: StepBatch) -> dict[str, float]:
    """Ends a step that trains only the critic. Returns metrics of an unchanged actor."""
    step.forget()
    return {"actor/updates": 0.0, "actor/skipped_updates": 0.0}


def update(
    step: StepBatch,
    corrected: RowValues,
    watch: Callable[[list[float], list[np.ndarray]], None] = lambda norms, sample_ids: None,
) -> dict[str, float]:
    """Runs all optimizer steps. Returns reduced metrics, on policy with those of `old_log_probs`.

    `watch` gets each update's gradient norm, and the ids of its samples. Raises NumericAbort if too many updates in a
    row could not be applied. On policy it also raises it for log-probs that are not finite, before any change.
    """
    result, mismatch = step.update(counts_of(step.by_mini_batch(corrected["trained"])))
    metrics = {}
    if mismatch is not None:
        metrics = _metrics_of(mismatch)
    metrics |= reduce_parts(result.parts)
    watch(gradient_norms(result.parts), step.by_mini_batch(step.rows.sample_id))
    applied = len(result.loads) - metrics["actor/skipped_updates"]
    return metrics | {"actor/updates": applied} | load_metrics(step.rows.lengths, result.loads)


def gradient_norms(parts: Sequence[FloatParts]) -> list[float]:
    """Returns the norms of all updates in order, before clipping; NaN for a skipped one.

    One rank returns the norm, which is equal on all ranks, and with it `actor/skipped_updates` for every update.
    """
    return [part.get("actor/grad_norm", (math.nan, 1.0))[0] for part in parts if "actor/skipped_updates" in part]


def load_metrics(lengths: np.ndarray, loads: Sequence[MiniBatchLoad]) -> dict[str, float]:
    """Returns how evenly an update is spread over the data-parallel ranks, and its share of padding.

    Metrics are means over its mini-batches. `lengths` [batch] are tokens of each sequence. `loads` come from the ranks,
    one for each mini-batch.
    """
    tokens_of_loads = [load.tokens for load in loads]
    trained_tokens = [sum(of_rank) for of_rank in zip(*tokens_of_loads, strict=True)]
    packed = [load.packed_sequences for load in loads if load.packed_sequences is not None]
    budgets = [load.budget_share for load in loads if load.budget_share is not None]
    return seqlen_metrics(lengths, trained_tokens) | {
        "actor/padding_share": float(np.mean([load.padding_share for load in loads])),
        "actor/dp_imbalance": float(np.mean([load.imbalance for load in loads])),
        **({"actor/packed_sequences": float(np.mean(packed))} if packed else {}),
        **({"actor/token_budget_share": max(budgets)} if budgets else {}),
    }
