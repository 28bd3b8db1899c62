"""What one worker receives, as a stream of grains in the order of its modules: first as templates, then as arrays.

Layers of one kind differ only in their numbers, and so do pipeline stages. Workers at the same position in their
engines hold the same. So grains are computed once for each layer kind and position, on a model with one layer of each
kind. Every layer is such a template with other numbers. The size of a plan then grows neither with the depth of the
model nor with the number of engines. The schedule uses arrays with one row for each grain of the whole model.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from mrl.model import ModelSpec
from mrl.model.boxes import Box
from mrl.model.hf_config import LayerKind
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.megatron_shards import Shard
from mrl.model.quantised import WORD
from mrl.model.quantised_shards import sent_shards
from mrl.model.vllm_parameters import Dialect, TargetParameter, target_parameters

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, WORD: 1}
SAME_DEVICE, SAME_NODE, REMOTE = TIERS = (0, 1, 2)  # lower is nearer
MAX_CANDIDATES = 16  # replicas that one worker may ask for the same grain
_SHARE_UNITS = 1 << 40  # shares of a module are compared as integers, so that every process gets the same order
# Qwen's predicting layer, `mtp.layers.0.` in checkpoints and `drafts.layers.0.` in engines, is not among the numbered
_LAYER_NUMBER = re.compile(r"((?<=\bmodel\.layers\.)|(?<=\bdecoder\.layers\.))\d+(?=\.)")


@dataclass(frozen=True)
class Holder:
    """A rank that holds a grain: its `offset` from the first rank of the stage, and its parameter's name."""

    offset: int
    source_name: str
    is_last_stage: bool  # for tied embeddings and modules after the layers


@dataclass(frozen=True)
class Grain:
    """A box of one tensor with one destination. `{}` in names stands for the number of the layer."""

    hf_name: str
    hf_box: Box
    source_box: Box
    parameter: str
    module: str
    target_box: Box
    axes: tuple[int, ...]
    nbytes: int
    holders: tuple[Holder, ...]  # each of them can send it
    dtype: str | None = None  # on the wire: that of the engine's parameter; None means the plan's


@dataclass(frozen=True)
class Segment:
    """One part of every stream: before the layers, one layer, or after the layers."""

    block: int  # number of the template in StreamTemplate.blocks
    layer: int | None  # global number, for tensor names and target parameters
    local_layer: int | None  # number in the model chunk, for source parameters
    stage: int  # pipeline stage that holds it
    first_rank: int  # from which offsets of holders are counted
    vp_chunk: int  # chunk that holds it


@dataclass(frozen=True)
class StreamTemplate:
    """Templates of what a worker at one position in its engine receives. `Segment.block` counts the blocks."""

    blocks: tuple[tuple[Grain, ...], ...]

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest grain."""
        return max((grain.nbytes for block in self.blocks for grain in block), default=0)


@dataclass(frozen=True)
class Miniature:
    """The model with one layer of each kind, and its training layout with at most two pipeline stages."""

    model: ModelSpec
    train: TrainLayout
    kinds: tuple[LayerKind, ...]  # for each layer
    fp8_block: int = 0  # block size of engines that hold words; 0: they hold none

    @classmethod
    def of(cls, model: ModelSpec, train: TrainLayout, fp8_block: int = 0) -> "Miniature":
        """Makes the miniature of a model and its layout."""
        kinds = tuple(dict.fromkeys(map(model.layer_kind, range(model.all_layers))))
        layers = sum(not kind.predicts for kind in kinds)
        moe_layers = tuple(layer for layer, kind in enumerate(kinds[:layers]) if kind.has_experts)
        linear_layers = tuple(layer for layer, kind in enumerate(kinds) if kind.is_linear)
        stages = ((layers,), (0,))[: train.pipeline]
        return cls(
            replace(model, num_layers=layers, moe_layers=moe_layers, linear_layers=linear_layers),
            replace(train, pipeline=len(stages), virtual_pipeline=1, chunk_layers=stages),
            kinds,
            fp8_block,
        )

    @property
    def stage_size(self) -> int:
        """Number of ranks in one pipeline stage."""
        return self.train.world_size // self.train.pipeline

    @cached_property
    def shards(self) -> tuple[tuple[Shard, ...], ...]:
        """What each rank sends from."""
        ranks = range(self.train.world_size)
        return tuple(sent_shards(self.model, self.train, rank, self.fp8_block) for rank in ranks)

    def rank_of(self, holder: Holder, pipeline: int) -> int:
        """Returns the rank of this small layout that stands for a holder of a layout with `pipeline` stages."""
        if holder.is_last_stage:
            return holder.offset - (pipeline - 2) * self.stage_size
        return holder.offset


def segments(model: ModelSpec, train: TrainLayout, kinds: tuple[LayerKind, ...]) -> tuple[Segment, ...]:
    """Returns all segments, stage after stage. Block numbers: before the layers, each layer kind, after the layers."""
    stage_size = train.world_size // train.pipeline
    layers = [
        Segment(1 + kinds.index(model.layer_kind(layer)), layer, local, stage, stage * stage_size, chunk)
        for stage in range(train.pipeline)
        for chunk in range(train.virtual_pipeline)
        for local, layer in enumerate(train.stage_layers(stage, chunk))
    ]
    before = Segment(0, None, None, 0, 0, 0)
    last = {"local_layer": None, "stage": train.pipeline - 1, "first_rank": 0, "vp_chunk": train.virtual_pipeline - 1}
    predicting = [
        Segment(1 + kinds.index(model.layer_kind(layer)), layer, **last)
        for layer in range(model.num_layers, model.all_layers)
    ]
    after = Segment(len(kinds) + 1, None, **last)
    return (before, *layers, *predicting, after)


class Holdings:
    """Which ranks hold which block of a tensor, by tensor name."""

    def __init__(self, miniature: Miniature, pipeline: int):
        """`pipeline` is the number of stages of the real layout. It shifts the offsets of the last stage."""
        holders_of: dict[tuple[str, Box, Box], list[Holder]] = defaultdict(list)
        size = miniature.stage_size
        for rank, shards in enumerate(miniature.shards):
            stage, rank_in_stage = divmod(rank, size)
            offset = rank_in_stage + stage * (pipeline - 1) * size
            for shard in shards:
                holder = Holder(offset, with_open_layer(shard.megatron_name), stage > 0)
                for piece in shard.pieces:
                    holders_of[piece.hf_name, piece.hf_box, piece.local_box].append(holder)
        self._cut: dict[tuple[TargetParameter, int], tuple[Grain, ...]] = {}  # workers have many parameters in common
        # and whole modules, by the identity of the grains
        self._queues: dict[tuple[int, ...], tuple[list[Grain], ...]] = {}
        self._turns: dict[tuple[tuple[int, ...], int], tuple[Grain, ...]] = {}
        self._blocks: dict[str, list[tuple[Box, Box, tuple[Holder, ...]]]] = defaultdict(list)
        for (hf_name, hf_box, local_box), holders in holders_of.items():
            self._blocks[hf_name].append((hf_box, local_box, tuple(holders)))

    def parts(self, hf_name: str, box: Box) -> Iterator[tuple[Box, Box, tuple[Holder, ...]]]:
        """Yields (common box, its box in the source parameter, holders) for every block that overlaps `box`."""
        for hf_box, local_box, holders in self._blocks[hf_name]:
            if common := hf_box.intersect(box):
                yield common, common.rebase(hf_box, local_box), holders

    def grains(self, parameter: TargetParameter, limit: int, dtype: str) -> tuple[Grain, ...]:
        """Returns what fills one parameter, in grains of at most `limit` bytes or one row. `dtype` is the plan's."""
        if (parameter, limit) not in self._cut:
            self._cut[parameter, limit] = tuple(self._grains(parameter, limit, dtype))
        return self._cut[parameter, limit]

    def interleaved(self, grains: Iterable[Grain], position: int, positions: int) -> Iterator[Grain]:
        """Yields the grains module by module. Within a module the holders alternate, so that any part needs all of
        them.

        `position` of `positions` lets workers in lockstep begin with different ranks. `grains` come from `grains()`.
        """
        modules: dict[str, list[Grain]] = defaultdict(list)
        for grain in grains:
            modules[grain.module].append(grain)
        for module in modules.values():
            same = tuple(map(id, module))
            if same not in self._queues:
                self._queues[same] = _queues(module)
            queues = self._queues[same]
            first = position * len(queues) // positions
            if (same, first) not in self._turns:
                self._turns[same, first] = _in_turns(queues, first)
            yield from self._turns[same, first]

    def _grains(self, parameter: TargetParameter, limit: int, dtype: str) -> Iterator[Grain]:
        item = ITEM_BYTES[parameter.dtype]
        own = None
        if parameter.dtype != dtype:
            own = parameter.dtype
        name = with_open_layer(parameter.name)
        module = with_open_layer(parameter.module)
        for piece in parameter.pieces:
            hf_name = with_open_layer(piece.hf_name)
            for common, source, holders in self.parts(piece.hf_name, piece.hf_box):
                for rows in _row_ranges(common, limit // item):
                    hf_box = Box((rows, *common.ranges[1:]))
                    target_box = _in_target(hf_box, piece.hf_box, piece.local_box, piece.axes)
                    source_box = _rows_of(hf_box, common, source)
                    nbytes = hf_box.volume * item
                    yield Grain(hf_name, hf_box, source_box, name, module, target_box, piece.axes, nbytes, holders, own)


def stream_template(
    miniature: Miniature,
    holdings: Holdings,
    rollout: RolloutLayout,
    position: int,
    dialect: Dialect,
    dtype: str,
    limit: int,
) -> StreamTemplate:
    """Makes the stream of the workers at `position` in their engines.

    A grain has at most `limit` bytes, but at least one row.
    """
    blocks: list[list[Grain]] = [[] for _ in range(len(miniature.kinds) + 2)]
    after_layers = False
    for parameter in target_parameters(miniature.model, rollout, position, dialect, dtype, miniature.fp8_block):
        layer = _layer_number(parameter.name)
        after_layers = after_layers or layer is not None
        block = (len(blocks) - 1 if after_layers else 0) if layer is None else layer + 1
        blocks[block] += holdings.grains(parameter, limit, dtype)
    positions = rollout.workers_per_engine
    return StreamTemplate(tuple(tuple(holdings.interleaved(block, position, positions)) for block in blocks))


def with_open_layer(name: str) -> str:
    """Replaces the layer number in a name by `{}`: `model.layers.7.mlp` gives `model.layers.{}.mlp`."""
    return _LAYER_NUMBER.sub("{}", name, count=1)


def _layer_number(name: str) -> int | None:
    match = _LAYER_NUMBER.search(name)
    if match:
        return int(match[0])
    return None


def _row_ranges(box: Box, max_elements: int) -> Iterator[tuple[int, int]]:
    """Yields equal runs of rows with at most `max_elements` elements, or one row."""
    start, stop = box.ranges[0]
    rows = max(1, max_elements // prod(box.shape[1:]))
    runs = -(-(stop - start) // rows)
    for run in range(runs):
        yield start + (stop - start) * run // runs, start + (stop - start) * (run + 1) // runs


def _rows_of(part: Box, whole: Box, elsewhere: Box) -> Box:
    """Returns the box of `part` when `whole`, which contains it, is moved to `elsewhere`."""
    return part.shift([there - here for there, here in zip(elsewhere.origin, whole.origin, strict=True)])


def _in_target(part: Box, hf_box: Box, local_box: Box, axes: tuple[int, ...]) -> Box:
    """Returns the box of `part` in the parameter, in which all of `hf_box` is at `local_box`, turned by `axes`."""
    ranges = list(local_box.ranges)
    for dim, axis in enumerate(axes):
        start = local_box.ranges[axis][0] - hf_box.ranges[dim][0]
        ranges[axis] = (part.ranges[dim][0] + start, part.ranges[dim][1] + start)
    return Box(tuple(ranges))


def _offsets(grains: Iterable[Grain]) -> dict[int, tuple[int, ...]]:
    """Returns the ranks' offsets for each set of holders, by its identity. Most grains share a set."""
    holders_of = {id(grain.holders): grain.holders for grain in grains}
    return {key: tuple(holder.offset for holder in holders) for key, holders in holders_of.items()}


def _queues(module: Sequence[Grain]) -> tuple[list[Grain], ...]:
    """Groups the grains of a module by their holders."""
    offsets = _offsets(module)
    queues: dict[tuple[int, ...], list[Grain]] = defaultdict(list)
    for grain in module:
        queues[offsets[id(grain.holders)]].append(grain)
    return tuple(queues.values())


def _in_turns(queues: Sequence[list[Grain]], first: int) -> tuple[Grain, ...]:
    """Merges the queues in proportion to their bytes. Queue `first` begins."""
    order = []
    for number, queue in enumerate(queues):
        total = sum(grain.nbytes for grain in queue)
        before = 0
        for index, grain in enumerate(queue):
            share = (2 * before + grain.nbytes) * _SHARE_UNITS // (2 * total)
            order.append((share, (number - first) % len(queues), index, grain))
            before += grain.nbytes
    return tuple(grain for *_, grain in sorted(order, key=lambda row: row[:3]))


@dataclass(frozen=True)
class Devices:
    """The device number and the node number of every rank and worker."""

    rank_device: np.ndarray
    rank_node: np.ndarray
    worker_device: np.ndarray
    worker_node: np.ndarray

    @classmethod
    def apart(cls, ranks: int, workers: int) -> "Devices":
        """Puts every process on a device and a node of its own."""
        rank = np.arange(ranks)
        worker = ranks + np.arange(workers)
        return cls(rank, rank, worker, worker)


@dataclass(frozen=True)
class Candidates:
    """The ranks that one worker may ask for the grains of each holder set. Arrays have one row for each set."""

    numbers: np.ndarray  # [set, candidate]: number among the holders; undefined beyond `count`
    ranks: np.ndarray  # [set, candidate]
    count: np.ndarray
    tier: np.ndarray  # how near they are, all equally


class _Block:
    """One template of a stream as arrays."""

    def __init__(self, grains: Sequence[Grain]):
        sets: dict[tuple[int, ...], int] = {}
        offsets = _offsets(grains)
        numbers = [sets.setdefault(offsets[id(grain.holders)], len(sets)) for grain in grains]
        self.nbytes = np.array([grain.nbytes for grain in grains], dtype=np.int64)
        self.holder_set = np.array(numbers, dtype=np.int64)
        self.sets = list(sets)
        begins = [n == 0 or grains[n - 1].module != grain.module for n, grain in enumerate(grains)]
        self.begins_module = np.array(begins, dtype=bool)


class WorkerStream:
    """The whole stream of one position inside an engine. Arrays have one row for each grain, in model order.

    A worker walks it as a circle.
    """

    def __init__(self, template: StreamTemplate, segments: Sequence[Segment]):
        blocks = [_Block(grains) for grains in template.blocks]
        chosen = [blocks[segment.block] for segment in segments]
        sets: dict[tuple[int, tuple[int, ...]], int] = {}
        entries = []
        for segment, block in zip(segments, chosen, strict=True):
            numbers = [sets.setdefault((segment.first_rank, offsets), len(sets)) for offsets in block.sets]
            entries.append(np.array(numbers, dtype=np.int64)[block.holder_set])
        sizes = [len(block.nbytes) for block in chosen]
        self.segment = np.repeat(np.arange(len(segments)), sizes)
        self.index = np.concatenate([np.arange(size) for size in sizes])
        self.nbytes = np.concatenate([block.nbytes for block in chosen])
        self.holder_set = np.concatenate(entries)
        # first grain of each module
        self.module_starts = np.flatnonzero(np.concatenate([block.begins_module for block in chosen]))
        self.before = np.cumsum(self.nbytes) - self.nbytes  # bytes before each grain
        self.total = int(self.nbytes.sum())
        width = max(len(offsets) for _, offsets in sets)
        self.stage = np.repeat(np.array([segment.stage for segment in segments]), sizes)
        self.num_stages = max(segment.stage for segment in segments) + 1
        self.stage_total = np.bincount(self.stage, self.nbytes, self.num_stages).astype(np.int64)
        self.stage_before = np.cumsum(self.stage_total) - self.stage_total
        self._kept_rounds: tuple[int, np.ndarray] = (0, np.zeros(0))
        self.holders = []
        rows = []
        for first, offsets in sets:
            holders = [first + offset for offset in offsets]
            self.holders.append(frozenset(holders))
            rows.append(holders + [-1] * (width - len(holders)))
        self.ranks = np.array(rows)  # [set, holder]

    def start_near(self, part: int, parts: int, lockstep: bool) -> int:
        """Returns the grain that begins a module nearest to `part` / `parts` of the circle; in lockstep, one that
        begins a stage.
        """
        if lockstep:
            behind = (self.stage - part * self.num_stages // parts) % self.num_stages
            return int(behind.argmin())
        distance = np.abs(self.before[self.module_starts] - self.total * part // parts)
        return int(self.module_starts[distance.argmin()])

    def travel(self, start: int, num_rounds: int, lockstep: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns the grains in the order of a walk from grain `start`, and the round of each."""
        order = rotated(np.arange(len(self.nbytes)), start)
        return order, rotated(self.rounds(start, num_rounds, lockstep), start)

    def rounds(self, start: int, num_rounds: int, lockstep: bool) -> np.ndarray:
        """Returns the round of each grain, in model order, for a walk from grain `start`.

        Each round moves equal bytes of the walk. In lockstep every stage gets the same number of rounds, which share
        its bytes equally.
        """
        if not lockstep:
            travelled = (self.before - self.before[start]) % self.total
            return travelled * num_rounds // self.total
        stage_rounds = num_rounds // self.num_stages
        turn = (self._stages - self.stage[start]) % self.num_stages * stage_rounds
        return turn[self.stage] + self._rounds_in_stage(stage_rounds)

    @cached_property
    def _stages(self) -> np.ndarray:
        return np.arange(self.num_stages)

    def _rounds_in_stage(self, stage_rounds: int) -> np.ndarray:
        """Returns each grain's round within its stage, which does not depend on the start of a walk."""
        if self._kept_rounds[0] != stage_rounds:
            in_stage = (self.before - self.stage_before[self.stage]) * stage_rounds // self.stage_total[self.stage]
            self._kept_rounds = stage_rounds, in_stage
        return self._kept_rounds[1]

    def nearness(self, devices: Devices, worker: int) -> np.ndarray:
        """Returns the tier of each holder, [set, holder]. Unused entries are beyond all tiers."""
        tier = np.full(self.ranks.shape, REMOTE)
        tier[devices.rank_node[self.ranks] == devices.worker_node[worker]] = SAME_NODE
        tier[devices.rank_device[self.ranks] == devices.worker_device[worker]] = SAME_DEVICE
        tier[self.ranks < 0] = REMOTE + 1
        return tier

    def candidates(self, devices: Devices, worker: int) -> Candidates:
        """Returns the nearest holders of each set, at most MAX_CANDIDATES. Different workers get different ones."""
        tier = self.nearness(devices, worker)
        nearest = tier.min(axis=1)
        near = tier == nearest[:, None]
        step = -(-near.sum(axis=1) // MAX_CANDIDATES)
        bases, number = np.unique(step, return_inverse=True)
        turn = np.array([_digit_sum(worker, int(base)) for base in bases])[number] % step
        near &= (near.cumsum(axis=1) - 1) % step[:, None] == turn[:, None]
        numbers = np.argsort(~near, axis=1, kind="stable")[:, :MAX_CANDIDATES]
        return Candidates(numbers, np.take_along_axis(self.ranks, numbers, axis=1), near.sum(axis=1), nearest)


def rotated(values: np.ndarray, start: int) -> np.ndarray:
    """Returns the values in the order of a circular walk from `start`."""
    return np.concatenate([values[start:], values[:start]])


def _digit_sum(number: int, base: int) -> int:
    """Returns the sum of a number's digits. Its remainders are spread evenly, also for every n-th number only."""
    digits = 0
    while number and base > 1:
        number, digit = divmod(number, base)
        digits += digit
    return digits
