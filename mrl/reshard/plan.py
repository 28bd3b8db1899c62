"""The reshard plan moves every weight straight from the source shards that hold it to the parameters that need it.

Worked example: a weight of 4 rows and 6 columns, 2 bytes an element. Two ranks hold three columns each (TP2), three
workers need two columns each (TP3). The overlaps of held and needed columns are four boxes, a to d:

             rank 0    rank 1        worker 0  worker 1  worker 2
    row 0    a a b     c d d         a a       b c       d d
    row 1    a a b     c d d         a a       b c       d d
    row 2    a a b     c d d         a a       b c       d d
    row 3    a a b     c d d         a a       b c       d d

Each box is a `Copy`. It has an offset, as [rows, columns], in the whole tensor, the source shard and the target:

    a  [0:4, 0:2]  from rank 0 [0:4, 0:2]  to worker 0 [0:4, 0:2]
    b  [0:4, 2:3]  from rank 0 [0:4, 2:3]  to worker 1 [0:4, 0:1]
    c  [0:4, 3:4]  from rank 1 [0:4, 0:1]  to worker 1 [0:4, 1:2]
    d  [0:4, 4:6]  from rank 1 [0:4, 1:3]  to worker 2 [0:4, 0:2]

The budget here is 16 bytes for one process in one round. So boxes are cut into rows (grains), which travel in two
rounds. In each round there is one `Message` from each rank to each worker that needs something from it:

    round 0  rank 0 -> worker 0  8 bytes  a[0:1] a[1:2]
    round 0  rank 0 -> worker 1  4 bytes  b[0:1] b[1:2]
    round 0  rank 1 -> worker 1  4 bytes  c[0:1] c[1:2]
    round 0  rank 1 -> worker 2  8 bytes  d[0:1] d[1:2]
    round 1  rank 0 -> worker 0  8 bytes  a[2:3] a[3:4]
    round 1  rank 0 -> worker 1  4 bytes  b[2:3] b[3:4]
    round 1  rank 1 -> worker 1  4 bytes  c[2:3] c[3:4]
    round 1  rank 1 -> worker 2  8 bytes  d[2:3] d[3:4]

Where several ranks hold a box (replicas), the schedule chooses the nearest and shares the work among equals. A plan is
a pure function of the model, both layouts, dialect, number format, topology and budget. It is small (templates and two
numbers of a schedule) and expands lazily into what one process sends or receives. Its hash covers all of its inputs, so
two sides with equal hashes exchange the same messages.
"""

import gc
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mrl.errors import ConfigError
from mrl.model import ModelSpec
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.quantised import WORD
from mrl.model.vllm_parameters import Dialect
from mrl.reshard.faults import PlanFault, template_faults
from mrl.reshard.messages import Copy, Message, Topology
from mrl.reshard.schedule import Flow, Loads, RoundSchedule, make_schedule
from mrl.reshard.streams import (
    ITEM_BYTES,
    REMOTE,
    SAME_DEVICE,
    Devices,
    Grain,
    Holder,
    Holdings,
    Miniature,
    Segment,
    StreamTemplate,
    WorkerStream,
    segments,
    stream_template,
)
from mrl.units import MIB

FORMAT = 1
_GRAIN_BYTES = 4 * MIB  # large enough to be copied at full speed
_GRAINS_PER_ROUND = 16  # at least, for each process
KEPT_COPIES = 1 << 18  # for a position inside an engine; limits the memory that a proof of a large plan uses


@dataclass(frozen=True)
class ReshardPlan:
    """Who sends what to which worker in which round."""

    model: ModelSpec
    train: TrainLayout
    rollout: RolloutLayout
    dialect: Dialect
    dtype: str  # of the engine
    fp8_block: int  # rows and columns that one scale is of, where engines hold words; 0: they hold none
    topology: Topology | None
    budget_bytes: int
    segments: tuple[Segment, ...]
    templates: tuple[StreamTemplate, ...]  # one for each position inside an engine
    devices: Devices = field(repr=False, compare=False)
    schedule: RoundSchedule = field(repr=False, compare=False)
    loads: Loads = field(repr=False, compare=False)

    @property
    def num_rounds(self) -> int:
        """Number of rounds in one sync. In each, a process moves at most `budget_bytes`."""
        return self.schedule.num_rounds

    @cached_property
    def bytes_required(self) -> int:
        """Bytes that workers hold after a sync and that no rank on their own device has."""
        return sum(stream.total for stream in self.schedule.streams) * self.rollout.num_engines - self.bytes_local

    @cached_property
    def bytes_moved(self) -> int:
        """Bytes of all messages between different devices."""
        return int(self.loads.received[SAME_DEVICE + 1 :].sum())

    @cached_property
    def bytes_local(self) -> int:
        """Bytes of messages that stay on one device."""
        return int(self.loads.received[SAME_DEVICE].sum())

    @cached_property
    def bytes_remote(self) -> int:
        """Bytes of messages that leave a node. Part of `bytes_moved`."""
        return int(self.loads.received[REMOTE].sum())

    @cached_property
    def peak_staging_bytes(self) -> int:
        """Largest staging of a process while it works on one round and fills or empties the next."""
        return max(self.peak_staging_of(self.loads.sent), self.peak_staging_of(self.loads.received))

    def peak_staging_of(self, loads: np.ndarray) -> int:
        """Returns the most staging bytes of one process on one side. `loads`: [tier, round, process]."""
        per_round = loads.sum(axis=0)
        following = np.vstack([per_round[1:], np.zeros_like(per_round[:1])])
        return int((per_round + following).max(initial=0))

    def sends(self, rank: int) -> Iterator[Message]:
        """Yields what one rank sends, by round, then worker."""
        flows = [self.schedule.flow(worker) for worker in range(self.rollout.world_size)]
        rows_of = [np.flatnonzero(flow.source == rank) for flow in flows]
        rounds = np.arange(self.num_rounds + 1)
        bounds_of = [np.searchsorted(flow.round[rows], rounds) for flow, rows in zip(flows, rows_of, strict=True)]
        for number in range(self.num_rounds):
            for worker, (flow, rows, bounds) in enumerate(zip(flows, rows_of, bounds_of, strict=True)):
                if bounds[number] < bounds[number + 1]:
                    yield self._message(number, rank, worker, flow, rows[bounds[number] : bounds[number + 1]])

    def receives(self, worker: int) -> Iterator[Message]:
        """Yields what one worker receives, by round, then source."""
        flow = self.schedule.flow(worker)
        order = np.lexsort((np.arange(len(flow.source)), flow.source, flow.round))
        keys = flow.round[order] * self.train.world_size + flow.source[order]
        for rows in np.split(order, np.flatnonzero(np.diff(keys)) + 1):
            yield self._message(int(flow.round[rows[0]]), int(flow.source[rows[0]]), worker, flow, rows)

    def _message(self, number: int, source: int, worker: int, flow: Flow, rows: np.ndarray) -> Message:
        position = worker % len(self.templates)
        blocks = self.templates[position].blocks
        kept = self._kept_copies[position]
        copies = []
        for key in zip(flow.segment[rows].tolist(), flow.index[rows].tolist(), flow.choice[rows].tolist(), strict=True):
            copy = kept.get(key)
            if copy is None:
                segment = self.segments[key[0]]
                copy = self.copy(blocks[segment.block][key[1]], segment, key[2])
                if len(kept) < KEPT_COPIES:
                    kept[key] = copy
            copies.append(copy)
        return Message(number, source, worker, tuple(copies), int(flow.nbytes[rows].sum()))

    @cached_property
    def _kept_copies(self) -> list[dict[tuple[int, int, int], Copy]]:
        """Copies of each position inside an engine, by segment, grain and holder.

        They are the same in every engine and on both sides.
        """
        return [{} for _ in self.templates]

    def copy(self, grain: Grain, segment: Segment, choice: int) -> Copy:
        """Returns the grain as a copy: with the numbers of its layer, sent by the chosen holder."""
        holder = grain.holders[choice]
        chunk = self.train.virtual_pipeline - 1 if holder.is_last_stage else segment.vp_chunk
        return Copy(
            grain.hf_name.format(segment.layer),
            grain.hf_box,
            holder.source_name.format(segment.local_layer),
            chunk,
            grain.source_box,
            grain.parameter.format(segment.layer),
            grain.target_box,
            grain.axes,
            grain.dtype,
        )

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the plan's canonical JSON."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain data with everything that determines its messages. Equal plans give equal JSON."""
        holder_sets: dict[tuple[Holder, ...], int] = {}
        # some templates share grains
        grains = {id(grain): grain for template in self.templates for block in template.blocks for grain in block}
        number = {key: n for n, key in enumerate(grains)}
        return {
            "format": FORMAT,
            "model": self.model.described(),
            "train": asdict(self.train),
            "rollout": asdict(self.rollout),
            "dialect": self.dialect,
            "dtype": self.dtype,
            **({"fp8_block": self.fp8_block} if self.fp8_block else {}),
            "topology": None if self.topology is None else asdict(self.topology),
            "budget_bytes": self.budget_bytes,
            "num_rounds": self.num_rounds,
            "bytes_required": self.bytes_required,
            "bytes_moved": self.bytes_moved,
            "lockstep": self.schedule.lockstep,
            "starts": self.schedule.starts,
            "choices": [
                hashlib.sha256(choices.astype("<i2").tobytes()).hexdigest() for choices in self.schedule.choices
            ],
            "segments": [[s.block, s.layer, s.local_layer, s.stage, s.first_rank, s.vp_chunk] for s in self.segments],
            "grains": [_grain_json(grain, holder_sets) for grain in grains.values()],
            "holders": [_holders_json(holders) for holders in holder_sets],
            "streams": [_stream_json(template, number) for template in self.templates],
        }


@contextmanager
def no_collection() -> Iterator[None]:
    """Suspends garbage collection. Plain data forms no cycles, and searching hundreds of thousands of it is slow."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@no_collection()
def plan_reshard(
    model: ModelSpec,
    train: TrainLayout,
    rollout: RolloutLayout,
    *,
    dialect: Dialect,
    dtype: str,
    topology: Topology | None = None,
    budget_bytes: int = 256 * MIB,
    fp8_block: int = 0,
) -> ReshardPlan:
    """Makes a proved plan: each element is written once, each source holds its box, each round is within the budget.

    `fp8_block`: block size of engines that hold words and scales; 0: they hold weights in `dtype`. Raises ConfigError
    for layouts that the engine cannot have or that cut a block. The same holds for another topology or a small budget.
    """
    _check_inputs(train, rollout, dtype, topology)
    miniature = Miniature.of(model, train, fp8_block)
    holdings = Holdings(miniature, train.pipeline)
    parts = segments(model, train, miniature.kinds)
    devices = _devices(train, rollout, topology)
    positions = range(rollout.workers_per_engine)
    limit = min(_GRAIN_BYTES, max(1, budget_bytes // _GRAINS_PER_ROUND))
    while True:
        templates = tuple(
            stream_template(miniature, holdings, rollout, position, dialect, dtype, limit) for position in positions
        )
        streams = [WorkerStream(template, parts) for template in templates]
        largest = max(template.largest for template in templates)
        scheduled = None
        if largest <= budget_bytes:
            scheduled = make_schedule(rollout, streams, devices, train.world_size, budget_bytes)
        if scheduled is not None:
            break
        if largest > limit:  # these are single rows already
            raise _too_small(budget_bytes, largest)
        limit //= 2
    plan = ReshardPlan(
        model, train, rollout, dialect, dtype, fp8_block, topology, budget_bytes, parts, templates, devices, *scheduled
    )
    faults = (*template_faults(miniature, train.pipeline, rollout, templates, dialect, dtype), *_schedule_faults(plan))
    if faults:
        raise PlanFault(faults[0])
    return plan


def _schedule_faults(plan: ReshardPlan) -> Iterator[str]:
    """Yields faults of the order: bytes that no round moves, or a round over the budget."""
    if plan.bytes_moved != plan.bytes_required:
        yield f"rounds bring {plan.bytes_moved} of {plan.bytes_required} bytes"
    if plan.loads.largest > plan.budget_bytes:
        yield f"a process has {plan.loads.largest} bytes in one round, over the budget of {plan.budget_bytes}"


def _check_inputs(train: TrainLayout, rollout: RolloutLayout, dtype: str, topology: Topology | None) -> None:
    formats = [name for name in ITEM_BYTES if name != WORD]
    if dtype not in formats:
        raise ConfigError(f"rollout.dtype = {dtype}: weights are moved as {', '.join(formats)}")
    if topology is not None and (len(topology.ranks), len(topology.workers)) != (train.world_size, rollout.world_size):
        raise ConfigError(
            f"the topology places {len(topology.ranks)} ranks and {len(topology.workers)} workers, "
            f"the layouts have {train.world_size} and {rollout.world_size}"
        )


def _too_small(budget: int, largest: int) -> ConfigError:
    return ConfigError(
        f"reshard.budget_mb: a round of {budget} bytes is too small for this model, whose largest row has {largest} "
        "bytes; raise it until a process can send a row to each of its peers in one round"
    )


def _devices(train: TrainLayout, rollout: RolloutLayout, topology: Topology | None) -> Devices:
    if topology is None:
        return Devices.apart(train.world_size, rollout.world_size)
    devices = [*topology.ranks, *topology.workers]
    number_of = {each: number for number, each in enumerate(dict.fromkeys(devices))}
    device = np.array([number_of[each] for each in devices])
    node = np.array([each.node for each in devices])
    ranks = slice(train.world_size)
    workers = slice(train.world_size, None)
    return Devices(device[ranks], node[ranks], device[workers], node[workers])


def _holders_json(holders: tuple[Holder, ...]) -> list[list[Any]]:
    return [[holder.offset, holder.source_name, holder.is_last_stage] for holder in holders]


def _stream_json(template: StreamTemplate, number: Mapping[int, int]) -> list[list[int]]:
    """Returns a template's grains block by block, each as its number. `number` maps the identity of a grain to it."""
    return [[number[id(grain)] for grain in block] for block in template.blocks]


def _grain_json(grain: Grain, holder_sets: dict[tuple[Holder, ...], int]) -> list[Any]:
    """Returns a grain as plain data. Its holders go into a table of their own."""
    boxes = (grain.hf_box, grain.source_box, grain.target_box)
    number = holder_sets.setdefault(grain.holders, len(holder_sets))
    return [grain.hf_name, grain.parameter, *(box.ranges for box in boxes), grain.axes, grain.nbytes, number]
