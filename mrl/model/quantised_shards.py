"""Lists the shards that ranks send for FP8 engines, and finds layouts that cut a weight inside a block."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod

from mrl.errors import ConfigError
from mrl.model.hf_config import ModelSpec
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.megatron_shards import Piece, Shard, megatron_slice, source_shards
from mrl.model.quantised import (
    SCALES,
    blocks,
    cut_text,
    has_whole_blocks,
    in_blocks,
    is_quantised,
    quantised_tensors,
    slice_fault,
)
from mrl.model.registry import weight_map
from mrl.model.tensors import tensor_specs
from mrl.model.vllm_parameters import worker_slice
from mrl.model.weight_map import Slice, Weight


def sent_shards(model: ModelSpec, layout: TrainLayout, rank: int, block: int) -> tuple[Shard, ...]:
    """Returns the shards that one rank sends: its parameters, and the scales of those that it sends as FP8 values.

    `block` 0: nothing is quantised. Scales are not parameters: the rank keeps them from one sync to the next. They name
    no replicas, because they follow from weights that are compared themselves. Raises ConfigError if a cut goes through
    a block.
    """
    shards = source_shards(model, layout, rank)
    if not block:
        return shards
    quantised = quantised_tensors(model)
    return (*shards, *(_scales_of(model, shard, block) for shard in shards if _is_quantised(shard, quantised)))


def fp8_count(model: ModelSpec, layout: TrainLayout, rank: int) -> int:
    """Returns the number of elements on one rank that engines hold in FP8."""
    quantised = quantised_tensors(model)
    return sum(prod(s.local_shape) for s in source_shards(model, layout, rank) if _is_quantised(s, quantised))


def _is_quantised(shard: Shard, quantised: frozenset[str]) -> bool:
    return bool(shard.pieces) and shard.pieces[0].hf_name in quantised


def _scales_of(model: ModelSpec, shard: Shard, block: int) -> Shard:
    shapes = _shapes(model)
    pieces = []
    for piece in shard.pieces:
        where = (piece.hf_box, shapes[piece.hf_name], piece.local_box, shard.local_shape)
        if not has_whole_blocks(*where, block):
            raise ConfigError(f"rollout.quantization: {cut_text(piece.hf_name, piece.hf_box)}, within a block")
        boxes = (in_blocks(box, block) for box in (piece.hf_box, piece.local_box))
        pieces.append(Piece(piece.hf_name + SCALES, *boxes))
    return replace(
        shard,
        megatron_name=shard.megatron_name + SCALES,
        local_shape=blocks(shard.local_shape, block),
        pieces=tuple(pieces),
        replicas=(),
    )


@cache
def _shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in tensor_specs(model)}


def ranks_fault(model: ModelSpec, train: TrainLayout, block: int) -> str:
    """Names the first weight that the actor's ranks cut through a block; empty if there is none.

    `block` 0: nothing is quantised.
    """
    if not block:
        return ""
    return _first_fault(model, train.tensor, train.expert_tensor, block, _rank_slice, "a rank of actor.layout")


def workers_fault(model: ModelSpec, rollout: RolloutLayout, block: int) -> str:
    """Names the first weight that an engine's workers cut through a block; empty if there is none."""
    if not block:
        return ""
    return _first_fault(model, rollout.tensor, rollout.expert_tensor, block, worker_slice, "a worker of an engine")


@cache  # a search asks for many layouts with the same degrees
def _first_fault(
    model: ModelSpec, dense: int, experts: int, block: int, slice_of: Callable[[Weight, int, int], Slice], who: str
) -> str:
    """Names the first weight that is cut through a block; empty if there is none.

    `dense`, `experts`: number of ranks that share a layer's weights, and one expert's.
    """
    for weight in dict.fromkeys(weight for kind, _ in weight_map(model).layers for weight in kind.hf):
        count = experts if weight.is_expert else dense
        for index in range(count if is_quantised(weight) else 0):
            if fault := slice_fault(slice_of(weight, count, index), block):
                text = f"{fault} on {who}, {count} of which share it"
                return text.replace("{layer}", "0").replace("{expert}", "0")
    return ""


def _rank_slice(weight: Weight, count: int, index: int) -> Slice:
    return megatron_slice(weight, count, count, index)
