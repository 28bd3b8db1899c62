"""Low-rank adapters (LoRA): which weights have them, what a rank holds of them, and the weights that they make.

A weight W [out, in] of the checkpoint gets two factors, A [rank, in] and B [out, rank]. The effective
weight is W + (alpha / rank) B A. Each pair belongs to one tensor of the checkpoint, even if Megatron fuses several.
Factors are cut like the weight:

    weight                      A                           B
    rows cut (q, k, v, in,      whole on every              rows cut, as
    gate, up)                   tensor rank                 the weight's
    columns cut (o, out,        columns cut, as             whole on every
    down)                       the weight's                tensor rank
    whole on every tensor       whole on every              whole on every
    rank (down projections      tensor rank                 tensor rank
    of latent attention)

The factors of a rank's experts are stacked in one parameter. Names are PEFT's without the model's prefix:
model.layers.0.self_attn.q_proj.lora_A.weight.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from mrl.model.boxes import Box
from mrl.model.hf_config import ModelSpec
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import Piece, Shard, source_shards
from mrl.model.tensors import TensorSpec, tensor_specs
from mrl.units import MIB

ALL_LINEAR = "all-linear"
# the last part of a module's name in the checkpoint, in the order in which a layer computes the modules
TARGETS = (
    "q_proj", "k_proj", "v_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "in_proj_qkvz",
    "in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_b", "in_proj_a", "out_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
# inputs of gated delta attention: Megatron's two layers, with the targets in each
DELTA_INPUTS = (("in_proj_qkvz", "in_proj_qkv", "in_proj_z"), ("in_proj_ba", "in_proj_b", "in_proj_a"))
_CUT_BY_COLUMNS = ("o_proj", "out_proj", "down_proj")
_WHOLE = ("q_a_proj", "kv_a_proj_with_mqa")
FIRST = "lora_A"
SECOND = "lora_B"
FACTORS = (FIRST, SECOND)
ADAPTER = "adapter"  # the child of one of Megatron's linear layers that holds its factors
MERGED_BYTES = 64 * MIB  # the most that merging takes beside its result: scratch, or blocks that are digested together
_WEIGHT = re.compile(r"(.+)\.weight\d*")


@dataclass(frozen=True)
class Lora:
    """The rank, scaling and targets of a model's adapters."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # of TARGETS, in its order

    @property
    def scale(self) -> float:
        """Returns the factor that multiplies the product B A."""
        return self.alpha / self.rank

    @classmethod
    def of(cls, rank: int, alpha: float, targets: Iterable[str]) -> "Lora":
        """Makes a Lora from target names in any order, which may include ALL_LINEAR."""
        wanted = set(targets)
        if ALL_LINEAR in wanted:
            wanted |= set(TARGETS)
        return cls(rank, alpha, tuple(name for name in TARGETS if name in wanted))


def target_of(weight_name: str) -> str:
    """Returns the target that a checkpoint tensor belongs to; empty if the tensor never has adapters."""
    parts = weight_name.split(".")
    if parts[-1] == "weight" and len(parts) > 1 and parts[-2] in TARGETS:
        return parts[-2]
    return ""


def factor_name(weight_name: str, factor: str) -> str:
    """Returns the name of a weight's factor, which is one of FACTORS."""
    return f"{weight_name.removesuffix('.weight')}.{factor}.weight"


def is_adapter(megatron_name: str) -> bool:
    """Tells whether a Megatron parameter is a factor."""
    return f".{ADAPTER}." in megatron_name


@cache
def adapted_tensors(model: ModelSpec, lora: Lora) -> tuple[TensorSpec, ...]:
    """Returns the checkpoint tensors that have adapters. Layers that predict further tokens have none."""
    return tuple(spec for spec in tensor_specs(model.holding(False)) if target_of(spec.name) in lora.targets)


@cache
def adapter_shapes(model: ModelSpec, lora: Lora) -> dict[str, tuple[int, int]]:
    """Returns factor name -> shape."""
    shapes = {}
    for spec in adapted_tensors(model, lora):
        out, into = spec.shape
        shapes[factor_name(spec.name, FIRST)] = (lora.rank, into)
        shapes[factor_name(spec.name, SECOND)] = (out, lora.rank)
    return shapes


@cache
def adapted_modules(model: ModelSpec, lora: Lora) -> tuple[str, ...]:
    """Returns the targets that a model has, in their order."""
    found = {target_of(spec.name) for spec in adapted_tensors(model, lora)}
    return tuple(target for target in lora.targets if target in found)


def adapter_count(model: ModelSpec, lora: Lora) -> int:
    """Returns the number of elements of all factors."""
    return sum(rows * columns for rows, columns in adapter_shapes(model, lora).values())


@cache
def smallest_side(model: ModelSpec, lora: Lora) -> tuple[int, str]:
    """Returns the smallest dimension among the weights with adapters, and that weight's name."""
    return min((min(spec.shape), spec.name) for spec in adapted_tensors(model, lora))


# ---------------------------------------------------------------- what a rank holds


@dataclass(frozen=True)
class Adapted:
    """The factors of one target in one of Megatron's linear layers, as a rank holds them."""

    target: str
    weights: tuple[str, ...]  # in the checkpoint: one weight, or one for each local expert
    # this rank's rows of a weight [out, in]: one range, or one of each section (queries, keys and values of gated delta
    # attention by kind)
    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int]
    width: int  # columns of a complete weight
    # (first row in the layer's local weight, first of `rows` when they are joined, how many), in local order
    segments: tuple[tuple[int, int, int], ...]

    @property
    def is_cut_by_columns(self) -> bool:
        """Tells whether tensor parallelism cuts the weight's columns instead of its rows."""
        return self.target in _CUT_BY_COLUMNS

    @property
    def is_whole(self) -> bool:
        """Tells whether every tensor rank has the whole weight, for tokens of its own."""
        return self.target in _WHOLE

    @property
    def height(self) -> int:
        """Returns how many rows of a weight this rank has."""
        return sum(stop - start for start, stop in self.rows)

    def local_row(self, row: int) -> int:
        """Returns the index of one of a weight's rows among this rank's rows."""
        before = 0
        for start, stop in self.rows:
            if start <= row < stop:
                return before + row - start
            before += stop - start
        raise ValueError(f"{self.weights[0]}: row {row} is not among {self.rows}")

    def shape(self, factor: str, rank: int) -> tuple[int, int]:
        """Returns the shape of the parameter that holds this factor of all `weights`."""
        if factor == FIRST:
            return (len(self.weights) * rank, self.columns[1] - self.columns[0])
        return (len(self.weights) * self.height, rank)

    def pieces(self, factor: str, rank: int) -> tuple[Piece, ...]:
        """Returns the pieces of that parameter in checkpoint coordinates."""
        boxes = [Box((rows, (0, rank))) for rows in self.rows]
        if factor == FIRST:
            boxes = [Box(((0, rank), self.columns))]
        pieces = []
        at = 0
        for name in self.weights:
            for box in boxes:
                height, width = box.shape
                pieces.append(Piece(factor_name(name, factor), box, Box(((at, at + height), (0, width)))))
                at += height
        return tuple(pieces)


@dataclass(frozen=True)
class AdaptedLayer:
    """One of Megatron's linear layers, with adapters."""

    module: str  # its name in the model chunk
    vp_chunk: int
    is_expert: bool
    rows: int  # rows of its local weight, for one expert
    targets: tuple[Adapted, ...]
    replicas: tuple[int, ...]  # ranks that hold the same part of the weights

    def parameter(self, target: str, factor: str) -> str:
        """Returns the name of a factor's parameter."""
        return f"{self.module}.{ADAPTER}.{target}_{factor}"


def adapted_layers(model: ModelSpec, layout: TrainLayout, rank: int, lora: Lora) -> tuple[AdaptedLayer, ...]:
    """Returns the linear layers of a rank that have adapters.

    Raises ValueError if tensor parallelism cuts a key or value head. `validate` refuses such layouts.
    """
    widths = {spec.name: spec.shape[1] for spec in adapted_tensors(model, lora)}
    together: dict[tuple[str, int], list[Shard]] = {}
    for shard in source_shards(model.holding(False), layout, rank):
        name = _WEIGHT.fullmatch(shard.megatron_name)
        if name and any(target_of(piece.hf_name) in lora.targets for piece in shard.pieces):
            together.setdefault((name[1], shard.vp_chunk), []).append(shard)
    return tuple(_layer(module, chunk, shards, widths) for (module, chunk), shards in together.items())


def _layer(module: str, chunk: int, shards: Sequence[Shard], widths: Mapping[str, int]) -> AdaptedLayer:
    """Makes the layer from its shards.

    `shards`: the layer's weight, or the weights of all local experts. `widths`: columns of each weight with adapters.
    """
    first = shards[0]
    found = {target_of(piece.hf_name): None for piece in first.pieces if piece.hf_name in widths}
    targets = tuple(_adapted(target, shards, widths) for target in found)
    return AdaptedLayer(module, chunk, first.is_expert, first.local_shape[0], targets, first.replicas)


def _adapted(target: str, shards: Sequence[Shard], widths: Mapping[str, int]) -> Adapted:
    pieces = [piece for piece in shards[0].pieces if target_of(piece.hf_name) == target]
    rows = _joined(piece.hf_box.ranges[0] for piece in pieces)
    names = tuple(
        next(piece.hf_name for piece in shard.pieces if target_of(piece.hf_name) == target) for shard in shards
    )
    adapted = Adapted(target, names, rows, pieces[0].hf_box.ranges[1], widths[names[0]], ())
    segments = tuple((p.local_box.origin[0], adapted.local_row(p.hf_box.origin[0]), p.hf_box.shape[0]) for p in pieces)
    return replace(adapted, segments=segments)


def _joined(rows: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns ranges in order, neighbours as one. Raises ValueError for a row that two of them have."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(rows):
        if joined and start < joined[-1][1]:
            raise ValueError(f"a rank has rows {start} to {joined[-1][1]} twice")
        if joined and start == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def adapter_shards(model: ModelSpec, layout: TrainLayout, rank: int, lora: Lora) -> tuple[Shard, ...]:
    """Returns the factors of one rank in the form in which `source_shards` returns its weights."""
    shards = []
    for layer in adapted_layers(model, layout, rank, lora):
        for adapted in layer.targets:
            for factor in FACTORS:
                shape = adapted.shape(factor, lora.rank)
                replicas = layer.replicas
                is_whole = adapted.is_whole or (factor == FIRST) != adapted.is_cut_by_columns
                if is_whole:  # on every tensor-parallel rank
                    replicas = layout.dense_group(rank, "tp", "cp", "dp")
                    if layer.is_expert:
                        replicas = layout.expert_group(rank, "etp", "edp")
                name = layer.parameter(adapted.target, factor)
                pieces = adapted.pieces(factor, lora.rank)
                shards.append(Shard(name, layer.vp_chunk, shape, pieces, layer.is_expert, replicas))
    return tuple(shards)


def all_shards(model: ModelSpec, layout: TrainLayout, rank: int, lora: Lora | None) -> tuple[Shard, ...]:
    """Returns all parameters of a rank: those of the checkpoint, and adapters if `lora` is given."""
    weights = source_shards(model, layout, rank)
    if lora is None:
        return weights
    return (*weights, *adapter_shards(model, layout, rank, lora))


# ---------------------------------------------------------------- the weights that they make


def add_factors(weight: Any, first: Any, second: Any, multiply: Callable[..., Any], total: Any, product: Any) -> None:
    """Writes a block [rows, columns] of W + scale * B A into `total`. Takes arrays of numpy or torch.

    `first` [rank, columns] is the block's part of A, `second` [rows, rank] that of scale * B. Both are in float32 like
    `total`. `product` is memory of its size, `multiply` numpy's or torch's. Every operation is elementwise and rounded
    separately. So the bits do not depend on how weights are cut. They are equal on every device, in numpy and in torch.
    """
    multiply(second[:, 0, None], first[0], out=total)
    for number in range(1, len(first)):
        total += multiply(second[:, number, None], first[number], out=product)
    total += weight


def tiles(rows: int, columns: int, elements: int) -> Iterator[tuple[int, int]]:
    """Yields rows [start, stop) of a block, so that each tile has about `elements` elements."""
    step = max(1, elements // columns)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
