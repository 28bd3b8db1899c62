"""The update of the actor, and what it says of itself."""

from collections.abc import Sequence

import numpy as np

from mrl.cluster.actor_group import ActorGroup
from mrl.data.batch import TrainBatch
from mrl.megatron.batching import MiniBatchLoad
from mrl.record.metrics import reduce_parts, seqlen_metrics


def update(actor: ActorGroup, batch: TrainBatch) -> dict[str, float]:
    """All optimizer steps on the batch; reduced metrics. Raises NumericAbort when too many in a row could not be applied."""
    result = actor.update(batch)
    metrics = reduce_parts(result.parts)
    applied = len(result.loads) - metrics["actor/skipped_updates"]
    return metrics | {"actor/updates": applied} | load_metrics(batch.prompt_lengths + batch.response_lengths, result.loads)


def load_metrics(lengths: np.ndarray, loads: Sequence[MiniBatchLoad]) -> dict[str, float]:
    """How evenly an update lies on the data-parallel ranks, and how much of it is padding, means over its mini-batches.

    `lengths` [batch] are tokens a sequence; `loads` come from the ranks, one a mini-batch.
    """
    trained_tokens = [sum(tokens) for tokens in zip(*(load.tokens for load in loads), strict=True)]
    return seqlen_metrics(lengths, trained_tokens) | {
        "actor/padding_share": float(np.mean([load.padding_share for load in loads])),
        "actor/dp_imbalance": float(np.mean([load.imbalance for load in loads])),
    }
