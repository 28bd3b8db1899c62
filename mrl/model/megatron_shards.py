"""Megatron's view of the weight map: what each rank holds, as boxes in Hugging Face coordinates.

Layer and expert numbers in names are local to the model chunk and the rank, as in the chunk's `named_parameters()`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from mrl.model.boxes import Box
from mrl.model.hf_config import ModelSpec
from mrl.model.layout import TrainLayout, padded_vocab_size
from mrl.model.registry import weight_map
from mrl.model.weight_map import Block, Part, Slice, Weight, WeightMap, even_slice, per_expert, sections_of, share


@dataclass(frozen=True)
class Piece:
    """A block of a Hugging Face tensor and its position in the local parameter. Both boxes have the same shape, unless
    the local one is turned: its rows are columns there.
    """

    hf_name: str
    hf_box: Box
    local_box: Box
    is_turned: bool = False  # in the files of a family that stores matrices so; never on a rank


@dataclass(frozen=True)
class Shard:
    """One local parameter of one rank. Local elements outside of all pieces are vocabulary padding."""

    megatron_name: str
    vp_chunk: int  # number of the model chunk (virtual pipeline rank) with the parameter
    local_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    is_expert: bool
    replicas: tuple[int, ...]  # all ranks, ascending and including this one, whose parameter holds exactly these pieces
    is_constant: bool = False

    @property
    def primary(self) -> int:
        """The replica that counts if each element is counted once."""
        return self.replicas[0]


def local_shapes(shards: Iterable[Shard]) -> dict[tuple[str, int], tuple[int, ...]]:
    """Returns (Megatron name, model chunk) -> shape, to compare with the real model."""
    return {(shard.megatron_name, shard.vp_chunk): shard.local_shape for shard in shards}


def source_shards(model: ModelSpec, layout: TrainLayout, rank: int) -> tuple[Shard, ...]:
    """Returns the parameters of one rank, chunk by chunk.

    The layout must be legal for the model, as `TrainLayout.build` ensures.
    """
    return tuple(_Rank(model, layout, rank).shards())


def last_stage_weights(model: ModelSpec, pipeline: int) -> tuple[Weight, ...]:
    """Returns the weights of the last model chunk after its layers.

    With tied embeddings and several stages, Megatron gives the last stage a copy of the embedding and keeps both equal.
    """
    weights = weight_map(model)
    shares_embedding = model.tie_word_embeddings and pipeline == 1
    if shares_embedding:
        return (weights.final_norm,)
    return (weights.final_norm, weights.output)


@cache
def megatron_slice(weight: Weight, tensor: int, expert_tensor: int, index: int = 0) -> Slice:
    """Returns the slice of tensor rank `index`, or of a rank in the expert grid for an expert's weight."""
    ranks = expert_tensor if weight.is_expert else tensor
    match weight.split:
        case "heads":
            segments = _head_groups(weight)
            return _window(segments, *share(sum(rows for _, _, rows in segments), ranks, index))
        case "vocabulary":
            (part,) = weight.parts
            return _window([(part, 0, part.shape[0])], *share(padded_vocab_size(part.shape[0], ranks), ranks, index))
    return even_slice(weight, ranks, index)


def _head_groups(weight: Weight) -> list[tuple[Part, int, int]]:
    """Returns (part, first row, number of rows) for each key/value head: its queries, optionally their gates, key,
    value.

    The fused rows are split evenly. With more tensor ranks than key/value heads, a slice may begin inside a group.
    """
    of_kind = [(part, first, rows // weight.groups) for part, first, rows in sections_of(weight)]
    if not weight.is_gated:
        groups = range(weight.groups)
        return [(part, first + group * each, each) for group in groups for part, first, each in of_kind]
    segments = []
    (query, _, of_queries), *others = of_kind
    size = others[0][2]  # rows of a head
    for group in range(weight.groups):
        heads = range(group * of_queries, (group + 1) * of_queries, 2 * size)
        segments += [(query, first, size) for first in heads]
        segments += [(query, first + size, size) for first in heads]
        segments += [(part, group * each, each) for part, _, each in others]
    return segments


def _window(segments: list[tuple[Part, int, int]], start: int, stop: int) -> Slice:
    """Returns rows [start, stop) of the stacked segments (part, first row, number of rows). Rows beyond are padding."""
    tail = segments[0][0].shape[1:]
    columns = Box.whole(tail).ranges
    blocks = []
    at = 0
    for part, first, rows in segments:
        low = max(start, at)
        high = min(stop, at + rows)
        if low < high:
            hf_box = Box(((first + low - at, first + high - at), *columns))
            blocks.append(Block(part, hf_box, Box(((low - start, high - start), *columns))))
        at += rows
    return Slice((stop - start, *tail), tuple(blocks))


class _Numbers(NamedTuple):
    """The numbers that a name's placeholders for layer and expert get."""

    layer: int | None = None
    expert: int | None = None

    def filled(self, name: str) -> str:
        return name.format(layer=self.layer, expert=self.expert)


_OUTSIDE = _Numbers()  # outside the layers


@dataclass(frozen=True)
class _Rank:
    model: ModelSpec
    layout: TrainLayout
    rank: int

    def shards(self) -> Iterator[Shard]:
        weights = weight_map(self.model)
        layout = self.layout
        pp = self.layout.dense_coords(self.rank).pp
        for vp in range(layout.virtual_pipeline):
            if layout.is_first_chunk(pp, vp):
                yield self._shard(weights.embedding, vp)
            for local, layer in enumerate(layout.stage_layers(pp, vp)):
                yield from self._layer(weights, vp, local, layer)
            if layout.is_last_chunk(pp, vp):
                for layer in range(self.model.num_layers, self.model.all_layers):
                    yield from self._layer(weights, vp, 0, layer)
                yield from (self._shard(weight, vp) for weight in last_stage_weights(self.model, layout.pipeline))
            if layout.is_first_chunk(pp, vp):
                yield from (self._shard(weight, vp) for weight in weights.tower)

    def _layer(self, weights: WeightMap, vp: int, local: int, layer: int) -> Iterator[Shard]:
        each = self.model.num_experts // self.layout.expert
        first = self.layout.expert_coords(self.rank).ep * each
        for weight, expert in per_expert(weights.layer(layer).megatron, range(each)):
            hf_expert = None
            if expert is not None:
                hf_expert = first + expert
            yield self._shard(weight, vp, _Numbers(local, expert), _Numbers(layer, hf_expert))

    def _shard(self, weight: Weight, vp: int, local: _Numbers = _OUTSIDE, hf: _Numbers = _OUTSIDE) -> Shard:
        """Makes a shard. `local` and `hf`: numbers in Megatron's name and in the checkpoint's."""
        index = self._expert_index if weight.is_expert else self._tensor_index
        local_slice = megatron_slice(weight, self.layout.tensor, self.layout.expert_tensor, index)
        pieces = tuple(Piece(hf.filled(b.part.name), b.hf_box, b.local_box) for b in local_slice.blocks)
        name = local.filled(weight.megatron)
        return Shard(name, vp, local_slice.shape, pieces, weight.is_expert, self._replicas(weight), weight.is_constant)

    def _replicas(self, weight: Weight) -> tuple[int, ...]:
        """Returns the ranks that hold the same slice."""
        if weight.is_expert:
            return self._expert_replicas
        if weight.split == "copied":
            return self._copies
        if weight.split == "vocabulary" and self.model.tie_word_embeddings:
            return self._tied_replicas
        return self._tensor_replicas

    @cached_property
    def _tensor_index(self) -> int:
        return self.layout.dense_coords(self.rank).tp

    @cached_property
    def _expert_index(self) -> int:
        return self.layout.expert_coords(self.rank).etp

    @cached_property
    def _tensor_replicas(self) -> tuple[int, ...]:
        return self.layout.dense_group(self.rank, "cp", "dp")

    @cached_property
    def _copies(self) -> tuple[int, ...]:
        return self.layout.dense_group(self.rank, "tp", "cp", "dp")

    @cached_property
    def _expert_replicas(self) -> tuple[int, ...]:
        return self.layout.expert_group(self.rank, "edp")

    @cached_property
    def _tied_replicas(self) -> tuple[int, ...]:
        """Returns the ranks with the word embeddings and with the last stage's copy."""
        layout = self.layout
        ends = {0, self.layout.pipeline - 1}
        on_all_stages = layout.dense_group(self.rank, "cp", "dp", "pp")
        return tuple(rank for rank in on_all_stages if layout.dense_coords(rank).pp in ends)
