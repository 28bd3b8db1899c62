"""What ranks send of weights that engines hold in FP8, and which layouts cut such a weight through a block."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from mrl.errors import ConfigError
from mrl.model.hf_config import ModelSpec
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.megatron_shards import Piece, Shard, megatron_slice, source_shards
from mrl.model.quantised import (
    SCALES,
    blocks,
    cut_in_words,
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
    """What one rank sends from: its parameters, and the scales of those that it sends as words.

    `block` 0: nothing is quantised. Scales are no parameters of the rank, which keeps them from one sync to the next.
    They name no replicas, for they follow from weights that are compared themselves. Raises ConfigError for a cut
    through a block.
    """
    shards = source_shards(model, layout, rank)
    if not block:
        return shards
    words = quantised_tensors(model)
    return (*shards, *(_scales_of(model, shard, block) for shard in shards if _has_words(shard, words)))


def _has_words(shard: Shard, words: frozenset[str]) -> bool:
    return bool(shard.pieces) and shard.pieces[0].hf_name in words


def _scales_of(model: ModelSpec, shard: Shard, block: int) -> Shard:
    shapes = _shapes(model)
    pieces = []
    for piece in shard.pieces:
        where = (piece.hf_box, shapes[piece.hf_name], piece.local_box, shard.local_shape)
        if not has_whole_blocks(*where, block):
            raise ConfigError(f"rollout.quantization: {cut_in_words(piece.hf_name, piece.hf_box)}, within a block")
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


def cut_fault(model: ModelSpec, train: TrainLayout, rollout: RolloutLayout, block: int) -> str:
    """The first weight that one of the layouts cuts through a block, in words; empty where none does."""
    for weight in dict.fromkeys(weight for kind, _ in weight_map(model).layers for weight in kind.hf):
        if is_quantised(weight):
            for side, local in _slices(weight, train, rollout):
                if fault := slice_fault(local, block):
                    return f"{fault} on {side}".replace("{layer}", "0").replace("{expert}", "0")
    return ""


def _slices(weight: Weight, train: TrainLayout, rollout: RolloutLayout) -> Iterator[tuple[str, Slice]]:
    """Whose slice it is, and the slice, of every rank and worker that cuts differ for."""
    ranks, workers = (train.tensor, rollout.tensor)
    if weight.is_expert:
        ranks, workers = (train.expert_tensor, rollout.expert_tensor)
    for index in range(ranks):
        local = megatron_slice(weight, train.tensor, train.expert_tensor, index)
        yield f"a rank of actor.layout, {ranks} of which share it", local
    for index in range(workers):
        yield f"a worker of an engine, {workers} of which share it", worker_slice(weight, workers, index)
