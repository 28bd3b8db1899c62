"""What data parallelism exchanges, beside what computes: gradients of a bucket are summed as soon as the backward of
the last micro-batch has made them, and updated weights are gathered as the next forward comes to them.

Megatron's DistributedDataParallel does both (0.16.1, core/distributed) where `actor.override_ddp_config` asks for it.
Here is what its training script has to do for that, and what readers of weights other than a forward need.
"""

from collections.abc import Sequence

from megatron.core.distributed import finalize_model_grads
from torch.nn import Module

from mrl.exercised import exercised
from mrl.megatron.logprob import REDUCES_EARLY


def set_gradient_reduction(chunks: Sequence[Module]) -> None:
    """Says how the chunks of a rank sum their gradients over replicas: beside the backward where that is asked for.

    Only the last micro-batch of a pass may then begin to sum; without that each would, and each again what those before
    it had summed.
    """
    overlaps = chunks[0].ddp_config.overlap_grad_reduce
    no_syncs = [chunk.no_sync for chunk in chunks]
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        if overlaps:
            exercised("actor.override_ddp_config.overlap_grad_reduce")
            chunk.config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
            for parameter in chunk.parameters():
                setattr(parameter, REDUCES_EARLY, True)


def gather_weights(chunks: Sequence[Module]) -> None:
    """Makes the weights whole on every rank, for those who read them without a forward. Collective.

    These are the weight sync, checkpoints and the host's copy. Does nothing where every optimizer step gathers them
    itself.
    """
    if chunks[0].ddp_config.overlap_param_gather:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)
