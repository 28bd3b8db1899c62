"""What data parallelism exchanges, beside what computes: gradients of a bucket are summed as soon as the backward of
the last micro-batch has made them, and updated weights are gathered as the next forward comes to them.

Megatron's DistributedDataParallel does both (0.16.1, core/distributed) where `actor.override_ddp_config` asks for it.
Here is what its training script has to do for that, and what readers of weights other than a forward need.
"""

from collections.abc import Sequence

from torch.nn import Module

from mrl.megatron.logprob import REDUCES_EARLY


def hold_reduction(chunks: Sequence[Module]) -> None:
    """Lets only the last micro-batch of a pass reduce gradients early; without it each would, and each again what those
    before it had summed. Nothing where gradients are reduced at the end.
    """
    if not chunks[0].ddp_config.overlap_grad_reduce:
        return
    held = [chunk.no_sync for chunk in chunks]
    for chunk in chunks:
        chunk.config.no_sync_func = held if len(held) > 1 else held[0]
        for parameter in chunk.parameters():
            setattr(parameter, REDUCES_EARLY, True)


def gather_weights(chunks: Sequence[Module]) -> None:
    """Makes the weights whole on every rank, for whoever reads them without a forward: the weight sync, checkpoints,
    the host's copy. Collective. Nothing where every optimizer step gathers them itself.
    """
    if chunks[0].ddp_config.overlap_param_gather:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)
