"""What one kind of worker receives, as a stream of grains: boxes that some ranks hold, in the order of the worker's modules.

Layers of one kind differ in their numbers only, and so do pipeline stages; workers at one place inside their engines hold the same. So
grains are worked out once for each layer kind and place inside an engine, on a model with one layer of each kind, and every layer is
that template with other numbers. The size of a plan then does not grow with depth or with the number of engines.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from mrl.model import ModelSpec
from mrl.model.boxes import Box
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.megatron_shards import Shard, source_shards
from mrl.model.vllm_parameters import Dialect, TargetParameter, target_parameters

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FINE = 1 << 40  # fractions of a module are compared as integers, so that every process orders alike


@dataclass(frozen=True)
class Holder:
    """A rank that has a grain: `offset` from the first rank of the layer's pipeline stage, and the parameter there."""

    offset: int
    megatron_name: str
    is_last_stage: bool  # of tied embeddings and of what follows the layers


@dataclass(frozen=True)
class Grain:
    """A box of one tensor that goes to one place; `{}` in names stands for the number of the layer."""

    hf_name: str
    hf_box: Box
    source_box: Box
    parameter: str
    module: str
    target_box: Box
    axes: tuple[int, ...]
    nbytes: int
    holders: tuple[Holder, ...]  # any of them can send it


@dataclass(frozen=True)
class Segment:
    """One part of every stream: what precedes the layers, one layer, or what follows them."""

    block: int  # number of the template in a stream's `blocks`
    layer: int | None  # global number, for names of Hugging Face and vLLM
    local_layer: int | None  # number in the model chunk, for Megatron's names
    stage: int  # pipeline stage that has it
    first_rank: int  # that holders are counted from
    vp_chunk: int  # chunk that has it


@dataclass(frozen=True)
class Miniature:
    """The model with one layer of each kind, and the training layout with at most two pipeline stages around it."""

    model: ModelSpec
    train: TrainLayout
    kinds: tuple[bool, ...]  # has experts, for each layer

    @classmethod
    def of(cls, model: ModelSpec, train: TrainLayout) -> "Miniature":
        kinds = tuple(dict.fromkeys(layer in model.moe_layers for layer in range(model.num_layers)))
        small = replace(model, num_layers=len(kinds), moe_layers=tuple(n for n, has_experts in enumerate(kinds) if has_experts))
        stages = ((len(kinds),), (0,))[: train.pipeline]
        return cls(small, replace(train, pipeline=len(stages), virtual_pipeline=1, chunk_layers=stages), kinds)

    @property
    def stage_size(self) -> int:
        return self.train.world_size // self.train.pipeline

    @cached_property
    def shards(self) -> tuple[tuple[Shard, ...], ...]:
        """Of each rank."""
        return tuple(source_shards(self.model, self.train, rank) for rank in range(self.train.world_size))

    def rank_of(self, holder: "Holder", pipeline: int) -> int:
        """The rank of this small layout that stands for a holder of a layout with `pipeline` stages."""
        return holder.offset - (pipeline - 2) * self.stage_size if holder.is_last_stage else holder.offset


def segments(model: ModelSpec, train: TrainLayout, kinds: tuple[bool, ...]) -> tuple[Segment, ...]:
    """All parts, stage after stage. Blocks are numbered: before the layers, each layer kind, after the layers."""
    stage_size = train.world_size // train.pipeline
    last = train.pipeline - 1
    found = [Segment(0, None, None, 0, 0, 0)]
    for pp in range(train.pipeline):
        for vp in range(train.virtual_pipeline):
            for local, layer in enumerate(train.stage_layers(pp, vp)):
                block = 1 + kinds.index(layer in model.moe_layers)
                found.append(Segment(block, layer, local, pp, pp * stage_size, vp))
    return (*found, Segment(len(kinds) + 1, None, None, last, 0, train.virtual_pipeline - 1))


class Holdings:
    """Who has which block of which tensor, looked up by tensor."""

    def __init__(self, miniature: Miniature, pipeline: int):
        """`pipeline`: stages of the real layout; ranks of the last one stand that much further away."""
        found: dict[tuple[str, Box, Box], list[Holder]] = defaultdict(list)
        size = miniature.stage_size
        for rank, shards in enumerate(miniature.shards):
            stage, slot = divmod(rank, size)
            offset = slot + stage * (pipeline - 1) * size
            for shard in shards:
                holder = Holder(offset, _open(shard.megatron_name, "decoder.layers."), stage > 0)
                for piece in shard.pieces:
                    found[piece.hf_name, piece.hf_box, piece.local_box].append(holder)
        self._cut: dict[tuple[TargetParameter, int], tuple[Grain, ...]] = {}  # workers have many parameters in common
        self._blocks: dict[str, list[tuple[Box, Box, tuple[Holder, ...]]]] = defaultdict(list)
        for (hf_name, hf_box, local_box), holders in found.items():
            self._blocks[hf_name].append((hf_box, local_box, tuple(holders)))

    def parts(self, hf_name: str, box: Box) -> Iterator[tuple[Box, Box, tuple[Holder, ...]]]:
        """(common box, the same in the local frame, who has it) of every block that meets `box`."""
        for hf_box, local_box, holders in self._blocks[hf_name]:
            if common := hf_box.intersect(box):
                yield common, common.rebase(hf_box, local_box), holders

    def grains(self, parameter: TargetParameter, limit: int) -> tuple[Grain, ...]:
        """What fills one parameter, in grains of at most `limit` bytes or one row."""
        if (parameter, limit) not in self._cut:
            self._cut[parameter, limit] = tuple(self._grains(parameter, limit))
        return self._cut[parameter, limit]

    def _grains(self, parameter: TargetParameter, limit: int) -> Iterator[Grain]:
        item = ITEM_BYTES[parameter.dtype]
        name, module = (_open(text, "model.layers.") for text in (parameter.name, parameter.module))
        for piece in parameter.pieces:
            hf_name = _open(piece.hf_name, "model.layers.")
            for common, source, holders in self.parts(piece.hf_name, piece.hf_box):
                for rows in _row_ranges(common, limit // item):
                    hf_box = Box((rows, *common.ranges[1:]))
                    target_box = _in_target(hf_box, piece.hf_box, piece.local_box, piece.axes)
                    source_box = _rows_of(hf_box, common, source)
                    yield Grain(hf_name, hf_box, source_box, name, module, target_box, piece.axes, hf_box.volume * item, holders)


@dataclass(frozen=True)
class Stream:
    """Templates of what a worker at one place inside its engine receives; block numbers are those of `Segment`."""

    blocks: tuple[tuple[Grain, ...], ...]

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest grain."""
        return max((grain.nbytes for block in self.blocks for grain in block), default=0)


def stream(
    miniature: Miniature, holdings: Holdings, rollout: RolloutLayout, place: int, dialect: Dialect, dtype: str, limit: int
) -> Stream:
    """Of the workers at `place` of their engines. Grains have at most `limit` bytes, but never less than one row."""
    blocks: list[list[Grain]] = [[] for _ in range(len(miniature.kinds) + 2)]
    after_layers = False
    for parameter in target_parameters(miniature.model, rollout, place, dialect, dtype):
        layer = _layer_number(parameter.name)
        after_layers = after_layers or layer is not None
        block = (len(blocks) - 1 if after_layers else 0) if layer is None else layer + 1
        blocks[block] += holdings.grains(parameter, limit)
    return Stream(tuple(tuple(_strided(block, (place, rollout.workers_per_engine))) for block in blocks))


def _row_ranges(box: Box, max_elements: int) -> Iterator[tuple[int, int]]:
    """Equal runs of rows of at most so many elements, or of one row."""
    start, stop = box.ranges[0]
    rows = max(1, max_elements // prod(box.shape[1:]))
    runs = -(-(stop - start) // rows)
    for run in range(runs):
        yield start + (stop - start) * run // runs, start + (stop - start) * (run + 1) // runs


def _rows_of(part: Box, whole: Box, elsewhere: Box) -> Box:
    """Where `part` of `whole` lies, when `whole` lies at `elsewhere`."""
    return part.shift([there - here for there, here in zip(elsewhere.origin, whole.origin, strict=True)])


def _in_target(part: Box, hf_box: Box, local_box: Box, axes: tuple[int, ...]) -> Box:
    """Where `part` of `hf_box` lies in the parameter where the whole of it lies at `local_box`, its dimensions along `axes`."""
    ranges = list(local_box.ranges)
    for dim, axis in enumerate(axes):
        start = local_box.ranges[axis][0] - hf_box.ranges[dim][0]
        ranges[axis] = (part.ranges[dim][0] + start, part.ranges[dim][1] + start)
    return Box(tuple(ranges))


def _strided(grains: Iterable[Grain], place: tuple[int, int]) -> Iterator[Grain]:
    """Module after module; inside a module the ranks that hold it take turns, so that any part of the stream draws on all of them.

    `place` (number, of how many) lets workers that walk in step begin with different ranks.
    """
    modules: dict[str, list[Grain]] = defaultdict(list)
    for grain in grains:
        modules[grain.module].append(grain)
    for module in modules.values():
        queues: dict[tuple[int, ...], list[Grain]] = defaultdict(list)
        for grain in module:
            queues[tuple(holder.offset for holder in grain.holders)].append(grain)
        order = []
        first = place[0] * len(queues) // place[1]
        for number, queue in enumerate(queues.values()):
            total, before = sum(g.nbytes for g in queue), 0
            for index, grain in enumerate(queue):
                share = (2 * before + grain.nbytes) * _FINE // (2 * total)
                order.append((share, (number - first) % len(queues), index, grain))
                before += grain.nbytes
        yield from (grain for *_, grain in sorted(order, key=lambda row: row[:3]))


def _layer_number(name: str) -> int | None:
    return int(name.split(".")[2]) if name.startswith("model.layers.") else None


def _open(name: str, prefix: str) -> str:
    """The name with its layer number left open."""
    if not name.startswith(prefix):
        return name
    return f"{prefix}{{}}.{name[len(prefix) :].partition('.')[2]}"
