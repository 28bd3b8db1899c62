"""Overlaps the communication of data parallelism with computation.

Gradients of a bucket are summed as soon as the last micro-batch's backward has made them. Updated weights are gathered
when the next forward reaches them. Megatron's DistributedDataParallel does both (0.16.1, core/distributed) if
`actor.override_ddp_config` switches them on. This file does the part of Megatron's training script, and gathers weights
for readers other than a forward.
"""

from collections.abc import Sequence

from megatron.core.distributed import finalize_model_grads
from torch.nn import Module

from mrl.rank.logprob import REDUCES_EARLY


def set_gradient_reduction(chunks: Sequence[Module]) -> None:
    """Configures how a rank's chunks sum their gradients over replicas: during the backward if that is switched on.

    Only the last micro-batch of a pass may then begin to sum. Otherwise every micro-batch would, and would sum earlier
    gradients again.
    """
    overlaps = chunks[0].ddp_config.overlap_grad_reduce
    no_syncs = [chunk.no_sync for chunk in chunks]
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        if overlaps:
            chunk.config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
            for parameter in chunk.parameters():
                setattr(parameter, REDUCES_EARLY, True)


def gather_weights(chunks: Sequence[Module]) -> None:
    """Makes the weights complete on every rank, for readers without a forward. Collective.

    Such readers are the weight sync, checkpoints and the copy on the host. Does nothing if every optimizer step gathers
    weights itself.
    """
    if chunks[0].ddp_config.overlap_param_gather:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)
