"""Collectives between ranks on CPU, by gloo's exchange and a sum of one's own.

gloo's reduce-scatter is an all-reduce of the whole, three to five times as long as an exchange of what each rank needs
(0.4 MB: 1.4 and 0.3 ms), and its all-reduce of a few numbers takes several rounds, twice as long as one exchange.
Parts are added in the order of ranks: of two ranks to the same bits as gloo's.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, distributed_c10d

from mrl.units import KIB

SMALL_BYTES = 64 * KIB  # of what everybody sends everybody, by at most so many ranks
MOST_RANKS = 8
_COMBINES: tuple[tuple[ReduceOp.RedOpType, Callable[..., torch.Tensor]], ...] = (
    (ReduceOp.SUM, torch.add), (ReduceOp.MAX, torch.maximum), (ReduceOp.MIN, torch.minimum),
)  # fmt: skip


class _Sum:
    """Of the parts of all ranks, which are on their way."""

    def __init__(self, work: dist.Work, parts: torch.Tensor, output: torch.Tensor, kept: torch.Tensor):
        self._work, self._parts, self._output = work, parts, output
        self._kept: torch.Tensor | None = kept  # it is sent until the wait is over

    def wait(self) -> None:
        """Once; the sum is there."""
        if self._kept is not None:
            self._work.wait()
            self._output.copy_(reduce(torch.add, self._parts.unbind()))
            self._kept = None


def reduce_scatter_by_exchange(original: Any) -> Any:
    """torch.distributed.reduce_scatter_tensor: everybody's part of `input` is sent to whom it belongs to."""

    def reduce_scatter(
        output: torch.Tensor, input: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if op != ReduceOp.SUM or not _is_gloo(group) or (async_op and _coalesces(group)):
            return original(output, input, op=op, group=group, async_op=async_op)
        sent = input.contiguous()
        parts = output.new_empty(dist.get_world_size(group), *output.shape)
        work = dist.all_to_all_single(parts.view(-1), sent.view(-1), group=group, async_op=True)
        result = _Sum(work, parts, output, sent)
        return result if async_op else result.wait()

    return reduce_scatter


def small_all_reduce_by_exchange(original: Any) -> Any:
    """torch.distributed.all_reduce: few numbers of few ranks are sent to all, and each adds them up."""

    def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        combine = next((function for kind, function in _COMBINES if op == kind), None)
        few = tensor.nbytes <= SMALL_BYTES and 1 < dist.get_world_size(group) <= MOST_RANKS
        if async_op or combine is None or not few or not _is_gloo(group) or _coalesces(group):
            return original(tensor, op=op, group=group, async_op=async_op)
        ranks = dist.get_world_size(group)
        sent = tensor.detach().reshape(1, -1).repeat(ranks, 1)
        parts = torch.empty_like(sent)
        dist.all_to_all_single(parts.view(-1), sent.view(-1), group=group)
        with torch.no_grad():
            tensor.copy_(reduce(combine, parts.unbind()).view(tensor.shape))
        return None

    return all_reduce


def _is_gloo(group: Any) -> bool:
    return dist.get_world_size(group) > 1 and dist.get_backend(group) == dist.Backend.GLOO


def _coalesces(group: Any) -> bool:
    """Whether calls are collected, and made at the end of the block."""
    return (group or dist.group.WORLD) in distributed_c10d._world.pg_coalesce_state
