"""What data parallelism exchanges, beside what computes: gradients of a bucket are summed as soon as the backward of
the last micro-batch has made them, and updated weights are gathered as the next forward comes to them.

Megatron's DistributedDataParallel does both (0.16.1, core/distributed) where `actor.override_ddp_config` asks for it.
Here is what its training script has to do for that, and what readers of weights other than a forward need.
"""

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import finalize_model_grads
from torch.nn import Module

from mrl.megatron.logprob import REDUCES_EARLY


class GradientReduction:
    """How the chunks of a rank sum their gradients over replicas.

    `early`: of the update under way, the groups of buckets whose sums had begun when the backward was over.
    """

    def __init__(self, chunks: Sequence[Module]):
        """Only the last micro-batch of a pass may reduce early; without that each would, and each again what those
        before it had summed.
        """
        self.early = 0
        overlaps = chunks[0].ddp_config.overlap_grad_reduce
        no_syncs = [chunk.no_sync for chunk in chunks]
        for chunk in chunks:
            chunk.config.finalize_model_grads_func = self._finalize if overlaps else finalize_model_grads
            if overlaps:
                chunk.config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
                for parameter in chunk.parameters():
                    setattr(parameter, REDUCES_EARLY, True)

    def _finalize(self, chunks: list[Module], *arguments: Any, **named: Any) -> None:
        groups = (group for chunk in chunks for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups)
        self.early += sum(group.grad_reduce_handle is not None for group in groups)
        finalize_model_grads(chunks, *arguments, **named)


def gather_weights(chunks: Sequence[Module]) -> None:
    """Makes the weights whole on every rank, for whoever reads them without a forward: the weight sync, checkpoints,
    the host's copy. Collective. Nothing where every optimizer step gathers them itself.
    """
    if chunks[0].ddp_config.overlap_param_gather:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)
