"""Metrics of updates, made of what ranks return of them, and which samples can be trained on at all."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from mrl.algo.plain import FloatParts
from mrl.config.schema import ActorConfig
from mrl.data.samples import SampleRows
from mrl.driver.step_batch import StepBatch
from mrl.errors import EnvironmentFault
from mrl.rank.batching import MiniBatchLoad
from mrl.record.metrics import reduce_parts, seqlen_metrics


def check_routed(actor: ActorConfig, rows: SampleRows) -> None:
    """Raises EnvironmentFault with R3 if a larger share of the samples than allowed, or all, have no route.

    Routes of single tokens may be missing, as those of cached prompts are. The update counts these.
    """
    if actor.router_replay != "R3":
        return
    most = actor.max_unrouted_share
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


def update_critic(step: StepBatch) -> dict[str, float]:
    """Runs all optimizer steps of the critic. Returns reduced metrics. Raises NumericAbort as `update` does."""
    return reduce_parts(step.update_critic())


def leave_actor(step: StepBatch) -> dict[str, float]:
    """Ends a step that trains only the critic. Returns metrics of an unchanged actor."""
    step.leave_actor()
    return {"actor/updates": 0.0, "actor/skipped_updates": 0.0}


def update(
    step: StepBatch, watch: Callable[[list[float], list[np.ndarray]], None] = lambda norms, sample_ids: None
) -> dict[str, float]:
    """Runs all optimizer steps. Returns reduced metrics, on policy with those of old log-probs.

    `watch` gets each update's gradient norm, and the ids of its samples. Raises NumericAbort if too many updates in a
    row could not be applied. On policy it also raises it for log-probs that are not finite, before any change.
    """
    parts, metrics = step.update()
    metrics = metrics | reduce_parts(parts)
    watch(gradient_norms(parts), step.sample_ids())
    loads = step.cut.loads
    applied = len(loads) - metrics["actor/skipped_updates"]
    return metrics | {"actor/updates": applied} | load_metrics(step.rows.lengths, loads, step.cut.epochs)


def gradient_norms(parts: Sequence[FloatParts]) -> list[float]:
    """Returns the norms of all updates in order, before clipping; NaN for a skipped one.

    One rank returns the norm, which is equal on all ranks, and with it `actor/skipped_updates` for every update.
    """
    return [part.get("actor/grad_norm", (math.nan, 1.0))[0] for part in parts if "actor/skipped_updates" in part]


def load_metrics(lengths: np.ndarray, loads: Sequence[MiniBatchLoad], epochs: int = 1) -> dict[str, float]:
    """Returns how evenly an update is spread over the data-parallel ranks, and its share of padding.

    Metrics are means over its mini-batches. `lengths` [batch] are tokens of each sequence. `loads` come from the ranks,
    one for each mini-batch of all `epochs`. Each epoch trains a rank on the same rows.
    """
    tokens_of_loads = [load.tokens for load in loads]
    trained_tokens = [sum(of_rank) // epochs for of_rank in zip(*tokens_of_loads, strict=True)]
    packed = [load.packed_sequences for load in loads if load.packed_sequences is not None]
    budgets = [load.budget_share for load in loads if load.budget_share is not None]
    return seqlen_metrics(lengths, trained_tokens) | {
        "actor/padding_share": float(np.mean([load.padding_share for load in loads])),
        "actor/dp_imbalance": float(np.mean([load.imbalance for load in loads])),
        **({"actor/packed_sequences": float(np.mean(packed))} if packed else {}),
        **({"actor/token_budget_share": max(budgets)} if budgets else {}),
    }
