"""Low-rank adapters (LoRA): which weights have them, what a rank holds of them, and the weights that they make.

A weight W [out, in] of the checkpoint gets two factors, A [rank, in] and B [out, rank], and stands for
W + alpha / rank * B A. They belong to one tensor of the checkpoint each, also where Megatron fuses several, and are
cut as the weight is:

    weight                      A                           B
    rows cut (q, k, v,          whole on every              rows cut, as
    gate, up)                   tensor rank                 the weight's
    columns cut (o, down)       columns cut, as             whole on every
                                the weight's                tensor rank

Experts of a rank have theirs in one parameter, one under the other. Names are PEFT's with the model's prefix taken
off: model.layers.0.self_attn.q_proj.lora_A.weight.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mrl.model.boxes import Box
from mrl.model.hf_config import ModelSpec
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import Piece, Shard, source_shards
from mrl.model.tensors import TensorSpec, tensor_specs
from mrl.units import MIB

ALL_LINEAR = "all-linear"
# last part of a module's name in the checkpoint, in the order in which a layer computes them
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_CUT_BY_COLUMNS = ("o_proj", "down_proj")
FIRST = "lora_A"
SECOND = "lora_B"
FACTORS = (FIRST, SECOND)
ADAPTER = "adapter"  # the child of a linear layer of Megatron's that has its factors
MERGED_BYTES = 64 * MIB  # of blocks that are merged for their digests at once
_WEIGHT = re.compile(r"(.+)\.weight\d*")


@dataclass(frozen=True)
class Lora:
    """What adapters a model has."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # of TARGETS, in its order

    @property
    def scale(self) -> float:
        """What the product of both factors is multiplied with."""
        return self.alpha / self.rank

    @classmethod
    def of(cls, rank: int, alpha: float, targets: Iterable[str]) -> "Lora":
        """Takes names of targets in any order, ALL_LINEAR among them."""
        wanted = set(targets)
        if ALL_LINEAR in wanted:
            wanted |= set(TARGETS)
        return cls(rank, alpha, tuple(name for name in TARGETS if name in wanted))


def target_of(weight_name: str) -> str:
    """The target that a tensor of the checkpoint is of; empty for one that never has adapters."""
    words = weight_name.split(".")
    if words[-1] == "weight" and len(words) > 1 and words[-2] in TARGETS:
        return words[-2]
    return ""


def factor_name(weight_name: str, factor: str) -> str:
    """The name of one of FACTORS of a weight."""
    return f"{weight_name.removesuffix('.weight')}.{factor}.weight"


def is_adapter(megatron_name: str) -> bool:
    """Whether a parameter of Megatron's is a factor."""
    return f".{ADAPTER}." in megatron_name


@cache
def adapted_tensors(model: ModelSpec, lora: Lora) -> tuple[TensorSpec, ...]:
    """The tensors of the checkpoint that have adapters."""
    return tuple(spec for spec in tensor_specs(model) if target_of(spec.name) in lora.targets)


@cache
def adapter_shapes(model: ModelSpec, lora: Lora) -> dict[str, tuple[int, int]]:
    """Name of each factor -> its shape."""
    shapes = {}
    for spec in adapted_tensors(model, lora):
        out, into = spec.shape
        shapes[factor_name(spec.name, FIRST)] = (lora.rank, into)
        shapes[factor_name(spec.name, SECOND)] = (out, lora.rank)
    return shapes


def adapter_count(model: ModelSpec, lora: Lora) -> int:
    """Elements of all factors."""
    return sum(rows * columns for rows, columns in adapter_shapes(model, lora).values())


def smallest_side(model: ModelSpec, lora: Lora) -> tuple[int, str]:
    """The smallest dimension of a weight that has adapters, and that weight's name."""
    return min((min(spec.shape), spec.name) for spec in adapted_tensors(model, lora))


# ---------------------------------------------------------------- what a rank holds


@dataclass(frozen=True)
class Adapted:
    """The factors of one target in one linear layer of Megatron's, as a rank has them."""

    target: str
    weights: tuple[str, ...]  # of the checkpoint: one, or one of each local expert
    rows: tuple[int, int]  # of a weight [out, in], that this rank has
    columns: tuple[int, int]
    width: int  # columns of a whole weight
    # (first row in the layer's local weight, first of `rows` from its beginning, how many), in local order
    places: tuple[tuple[int, int, int], ...]

    @property
    def is_cut_by_columns(self) -> bool:
        """Whether tensor parallelism cuts the weight's columns, and not its rows."""
        return self.target in _CUT_BY_COLUMNS

    def shape(self, factor: str, rank: int) -> tuple[int, int]:
        """The shape of the parameter that holds this factor of all `weights`."""
        if factor == FIRST:
            return (len(self.weights) * rank, self.columns[1] - self.columns[0])
        return (len(self.weights) * (self.rows[1] - self.rows[0]), rank)

    def pieces(self, factor: str, rank: int) -> tuple[Piece, ...]:
        """That parameter in coordinates of the checkpoint."""
        hf_box = Box((self.rows, (0, rank)))
        if factor == FIRST:
            hf_box = Box(((0, rank), self.columns))
        height, width = hf_box.shape
        return tuple(
            Piece(factor_name(name, factor), hf_box, Box(((n * height, n * height + height), (0, width))))
            for n, name in enumerate(self.weights)
        )


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer of Megatron's that has adapters."""

    module: str  # its name in the model chunk
    vp_chunk: int
    is_expert: bool
    rows: int  # of its local weight, of one expert
    targets: tuple[Adapted, ...]
    replicas: tuple[int, ...]  # ranks that hold the same part of the weights

    def parameter(self, target: str, factor: str) -> str:
        """The name of a factor's parameter."""
        return f"{self.module}.{ADAPTER}.{target}_{factor}"


def adapted_layers(model: ModelSpec, layout: TrainLayout, rank: int, lora: Lora) -> tuple[AdaptedLayer, ...]:
    """The linear layers of a rank that have adapters.

    Raises ValueError where tensor parallelism cuts a key or value head, which validate refuses.
    """
    widths = {spec.name: spec.shape[1] for spec in adapted_tensors(model, lora)}
    together: dict[tuple[str, int], list[Shard]] = {}
    for shard in source_shards(model, layout, rank):
        name = _WEIGHT.fullmatch(shard.megatron_name)
        if name and any(target_of(piece.hf_name) in lora.targets for piece in shard.pieces):
            together.setdefault((name[1], shard.vp_chunk), []).append(shard)
    return tuple(_layer(module, chunk, shards, widths) for (module, chunk), shards in together.items())


def _layer(module: str, chunk: int, shards: Sequence[Shard], widths: Mapping[str, int]) -> AdaptedLayer:
    """`shards`: the layer's weight, or those of all local experts. `widths`: of the weights that have adapters."""
    first = shards[0]
    found = {target_of(piece.hf_name): None for piece in first.pieces if piece.hf_name in widths}
    targets = tuple(_adapted(target, shards, widths) for target in found)
    return AdaptedLayer(module, chunk, first.is_expert, first.local_shape[0], targets, first.replicas)


def _adapted(target: str, shards: Sequence[Shard], widths: Mapping[str, int]) -> Adapted:
    pieces = [piece for piece in shards[0].pieces if target_of(piece.hf_name) == target]
    rows = [piece.hf_box.ranges[0] for piece in pieces]
    start = min(first for first, _ in rows)
    stop = max(last for _, last in rows)
    if sum(last - first for first, last in rows) != stop - start:
        raise ValueError(f"{pieces[0].hf_name}: a rank has rows {rows}, which do not follow each other")
    names = tuple(
        next(piece.hf_name for piece in shard.pieces if target_of(piece.hf_name) == target) for shard in shards
    )
    places = tuple((p.local_box.origin[0], p.hf_box.origin[0] - start, p.hf_box.shape[0]) for p in pieces)
    return Adapted(target, names, (start, stop), pieces[0].hf_box.ranges[1], widths[names[0]], places)


def adapter_shards(model: ModelSpec, layout: TrainLayout, rank: int, lora: Lora) -> tuple[Shard, ...]:
    """The factors of one rank, as `source_shards` has its weights."""
    shards = []
    for layer in adapted_layers(model, layout, rank, lora):
        for adapted in layer.targets:
            for factor in FACTORS:
                shape = adapted.shape(factor, lora.rank)
                replicas = layer.replicas
                if (factor == FIRST) != adapted.is_cut_by_columns:
                    replicas = _whole_on(layout, rank, layer.is_expert)
                name = layer.parameter(adapted.target, factor)
                pieces = adapted.pieces(factor, lora.rank)
                shards.append(Shard(name, layer.vp_chunk, shape, pieces, layer.is_expert, replicas))
    return tuple(shards)


def all_shards(model: ModelSpec, layout: TrainLayout, rank: int, lora: Lora | None) -> tuple[Shard, ...]:
    """All parameters of a rank: the checkpoint's, and adapters where there are some."""
    weights = source_shards(model, layout, rank)
    if lora is None:
        return weights
    return (*weights, *adapter_shards(model, layout, rank, lora))


def _whole_on(layout: TrainLayout, rank: int, is_expert: bool) -> tuple[int, ...]:
    """The ranks that hold the same as `rank` of what tensor parallelism does not cut."""
    if is_expert:
        return layout.expert_group(rank, "etp", "edp")
    return layout.dense_group(rank, "tp", "cp", "dp")


# ---------------------------------------------------------------- the weights that they make


def added(weight: Any, first: Any, second: Any, scale: float) -> Any:
    """A block [rows, columns] of W + scale * B A, of float32 arrays of numpy or of torch, which are left as they are.

    `first` [rank, columns] and `second` [rows, rank] are what the block needs of A and B. Every operation is of one
    element with one, and rounded by itself: the bits do not depend on how weights are cut, and are the same on every
    device, in numpy and in torch.
    """
    total = second[:, 0, None] * first[0]
    for number in range(1, len(first)):
        total += second[:, number, None] * first[number]
    total *= scale
    total += weight
    return total


def tiles(rows: int, columns: int, elements: int) -> Iterator[tuple[int, int]]:
    """Rows [start, stop) of a block, so many that a tile has about so many elements."""
    step = max(1, elements // columns)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
