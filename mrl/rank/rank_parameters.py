"""The parameters of this rank in Hugging Face coordinates, each with its part of the distributed optimizer."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from mrl.checkpoint.manifest import EXP_AVG, EXP_AVG_SQ
from mrl.config.schema_actor import OPTIMIZER, PARAMETERS
from mrl.errors import ConfigError
from mrl.model.adapters import is_adapter
from mrl.model.boxes import boxes_of_range
from mrl.model.megatron_shards import Piece, Shard, local_shapes
from mrl.rank.adam_state import AdamState
from mrl.rank.local_parameters import LocalParameters, numbered, plain_name

MOMENTS = {EXP_AVG: "exp_avg", EXP_AVG_SQ: "exp_avg_sq"}  # role -> name in torch's Adam


@dataclass(frozen=True)
class RankParameter:
    """A parameter of this rank, its Hugging Face coordinates, and the optimizer that has a part of it."""

    shard: Shard
    parameter: torch.nn.Parameter
    optimizer: DistributedOptimizer | None  # None: this data-parallel rank updates no part of it
    flat: tuple[int, int] | None  # that part of the flattened parameter
    adam: AdamState | None = None  # of that optimizer
    # this and other ranks with the same part, whose gradients are summed; None: no others, or unknown
    replicas: dist.ProcessGroup | None = None

    def own_pieces(self) -> list[Piece]:
        """Returns the Hugging Face coordinates of the distributed optimizer's part, in the local frame."""
        boxes = boxes_of_range(self.shard.local_shape, *self.flat)
        met = [(piece, piece.local_box.intersect(box)) for piece in self.shard.pieces for box in boxes]
        return [
            Piece(piece.hf_name, common.rebase(piece.local_box, piece.hf_box), common)
            for piece, common in met
            if common is not None
        ]

    @property
    def key(self) -> str:
        """The parameter's name in the file."""
        return f"{self.shard.vp_chunk}.{self.shard.megatron_name}"

    @property
    def is_own_master(self) -> bool:
        """Tells whether the weights are float32 and thus their own master weights.

        The optimizer then has a view of them, or a copy with equal values.
        """
        return self.parameter.dtype is torch.float32

    def main(self) -> Tensor:
        """Returns the optimizer's tensor for this rank's part: master weights, or a shard of the weights if Adam has
        those.
        """
        group, order = self.optimizer.model_param_group_index_map[self.parameter]
        return self.optimizer.optimizer.param_groups[group]["params"][order]


def rank_parameters(actor) -> Iterator[RankParameter]:
    """Yields every parameter of this rank that a checkpoint has, in a fixed order; only adapters if those are trained.

    Parameters and optimizer states must stay on the device while they are read or written. Raises RuntimeError when the
    model has other parameters than its description.
    """
    actor.residence.require(PARAMETERS, OPTIMIZER)
    adams = {id(optimizer): AdamState(optimizer.optimizer) for optimizer in distributed_optimizers(actor)}
    shards = {(shard.vp_chunk, shard.megatron_name): shard for shard in actor.shards}
    LocalParameters(actor.chunks, actor.trained_beside).check(local_shapes(shards.values()))
    for number, chunk in numbered(actor.chunks, actor.trained_beside):
        for name, parameter in chunk.named_parameters():
            if actor.lora is not None and not is_adapter(name):
                continue
            optimizer = next(
                (o for o in distributed_optimizers(actor) if parameter in o.model_param_group_index_map), None
            )
            part = None
            if optimizer:
                part = optimizer._get_model_param_range_map(parameter)["param"]
            flat = None
            if part:
                flat = (part.start, part.end)
            shard = shards[number, plain_name(name)]
            replicas = _replicas(actor, parameter)
            yield RankParameter(shard, parameter, optimizer, flat, adams.get(id(optimizer)), replicas)


def _replicas(actor, parameter: torch.nn.Parameter) -> dist.ProcessGroup | None:
    """Returns the ranks over which the parameter's optimizer is distributed; None for a frozen parameter."""
    for optimizer in distributed_optimizers(actor):
        if any(parameter in buffer.param_index_map for buffer in optimizer.buffers):
            if optimizer.data_parallel_group.size() > 1:
                return optimizer.data_parallel_group
            return None
    return None


def distributed_optimizers(actor) -> list[DistributedOptimizer]:
    """Returns the optimizers that have parameters here. Raises ConfigError for any other kind."""
    parts = (part for each in actor.optimizers for part in each.chained_optimizers)
    optimizers = [part for part in parts if not getattr(part, "is_stub_optimizer", False)]
    if not all(isinstance(o, DistributedOptimizer) for o in optimizers):
        raise ConfigError(
            "actor.override_ddp_config.use_distributed_optimizer: checkpoints need the "
            "distributed optimizer; leave it on"
        )
    return optimizers
