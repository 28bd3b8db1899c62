"""Norms of the gradients that data-parallel replicas hand over, before they are summed.

Megatron sums a group of buckets as soon as its gradients are complete, at the end of a pass or beside its backward
(mrl/rank/overlap.py), and writes the sum over them. So each group is read right before its sum: once an update, by one
reduction that writes nothing and needs no memory of that size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from torch.nn import Module

_NAME = "actor/replica_grad_norm/*"


class ReplicaNorms:
    """Squares of one rank's gradients of an update, as it hands them over.

    Gradients of experts that are spread over replicas are left out: a rank has those of several replicas' tokens.
    """

    def __init__(self, chunks: Sequence[Module], device: torch.device) -> None:
        self._squares = torch.zeros(mpu.get_data_parallel_world_size(), device=device)
        for chunk in chunks:
            of_experts = chunk.expert_parallel_bucket_groups if mpu.get_expert_model_parallel_world_size() == 1 else []
            for group in (*chunk.bucket_groups, *of_experts):
                group.start_grad_sync = partial(self._counted, group, group.start_grad_sync)

    def _counted(self, group: Any, start: Callable[..., None], *arguments: Any, **named: Any) -> None:
        """Adds a group's squares, and begins its sum. Megatron asks a second time for a group that is under way."""
        if group.grad_reduce_handle is None:
            own = self._squares[mpu.get_data_parallel_rank()]
            for bucket in group.buckets:
                # in the gradients' own format: another one would copy all of them
                own += torch.linalg.vector_norm(bucket.grad_data).float().square()
        start(*arguments, **named)

    def begin(self) -> None:
        """Forgets an earlier update."""
        self._squares.zero_()

    def read(self) -> list[float]:
        """Returns the norm of each replica's gradient, over the parts of all ranks that compute it. Collective, and
        waits for the device.

        They are norms of summands: Megatron divides what replicas hand over by their number, and adds it up.
        """
        torch.distributed.all_reduce(self._squares)
        return (self._squares.sqrt() / mpu.get_data_parallel_world_size(with_context_parallel=True)).tolist()


def replica_norms(chunks: Sequence[Module], device: torch.device) -> ReplicaNorms | None:
    """Returns the norms of replicas from now on; None where there is only one."""
    if mpu.get_data_parallel_world_size() == 1:
        return None
    return ReplicaNorms(chunks, device)


def norm_metrics(norms: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Returns the metrics of an update's norms, one a replica."""
    return {_NAME.replace("*", str(number)): (norm, 1.0) for number, norm in enumerate(norms)}
