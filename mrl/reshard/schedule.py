"""When each grain travels and from whom: rotation of workers over the model, choice among replicas, division into rounds.

Every worker walks its stream as a circle, from a module of its own: workers stand evenly over the circle, so that at any time all
pipeline stages send. Which worker stands where is chosen among a few strides by the load they put on the busiest rank. Only integers,
so that every process comes to the same schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np

from mrl.errors import ConfigError
from mrl.layout import RolloutLayout
from mrl.reshard.streams import Segment, Stream

SAME_DEVICE, SAME_NODE, REMOTE = TIERS = (0, 1, 2)  # nearer is less
_CANDIDATES = 24  # strides that are tried


class CircleTables:
    """The stream of one place as arrays, a row a grain, in model order."""

    def __init__(self, stream: Stream, segments: Sequence[Segment]):
        sets: dict[tuple, int] = {}
        rows, entry_of, known = [], [], {}
        modules = []
        for number, segment in enumerate(segments):
            for index, grain in enumerate(stream.blocks[segment.block]):
                key = (segment.first_rank, tuple(h.offset for h in grain.holders))
                rows.append((number, index, grain.nbytes))
                entry_of.append(sets.setdefault(key, len(sets)))
                modules.append(known.setdefault((number, grain.module), len(known)))
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        self.segment, self.index, self.nbytes = table.T
        self.entry = np.array(entry_of, dtype=np.int64)
        self.before = np.cumsum(self.nbytes) - self.nbytes  # bytes in front of each grain
        self.total = int(self.nbytes.sum())
        module = np.array(modules, dtype=np.int64)
        self.starts = np.flatnonzero(np.diff(module, prepend=-1))  # first grain of each module
        width = max((len(offsets) for _, offsets in sets), default=1)
        self.count = np.array([len(offsets) for _, offsets in sets], dtype=np.int64)
        self.ranks = np.array([[first + o for o in offsets] + [-1] * (width - len(offsets)) for first, offsets in sets], dtype=np.int64)
        self.turn = _occurrences(self.entry)

    def start_near(self, share: tuple[int, int]) -> int:
        """The grain that begins a module, nearest to a part (numerator, denominator) of the way round."""
        at = self.total * share[0] // share[1]
        return int(self.starts[np.abs(self.before[self.starts] - at).argmin()])


def _occurrences(values: np.ndarray) -> np.ndarray:
    """How often each value stood before in the array."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-1))
    run = np.arange(len(values)) - np.repeat(first, np.diff(np.append(first, len(values))))
    result = np.empty_like(run)
    result[order] = run
    return result


@dataclass(frozen=True)
class Devices:
    """Number of the device and of the node of every rank and worker; without a topology all stand apart."""

    rank_device: np.ndarray
    rank_node: np.ndarray
    worker_device: np.ndarray
    worker_node: np.ndarray

    @classmethod
    def apart(cls, ranks: int, workers: int) -> "Devices":
        """Every process on a device and a node of its own."""
        rank, worker = np.arange(ranks), ranks + np.arange(workers)
        return cls(rank, rank, worker, worker)


@dataclass(frozen=True)
class Loads:
    """Bytes of every round: [tier, round, rank] sent and [tier, round, worker] received."""

    sent: np.ndarray
    received: np.ndarray

    @cached_property
    def largest(self) -> int:
        """Bytes of the busiest process in its busiest round."""
        return int(max(self.sent.sum(0).max(initial=0), self.received.sum(0).max(initial=0)))


@dataclass(frozen=True)
class Flow:
    """What one worker receives, in order: arrays with a row a grain."""

    segment: np.ndarray
    index: np.ndarray  # in the segment's block
    nbytes: np.ndarray
    choice: np.ndarray  # number of the chosen holder in the grain's `holders`
    source: np.ndarray  # rank
    round: np.ndarray
    tier: np.ndarray


@dataclass(frozen=True)
class Schedule:
    """Strides and the number of rounds; all else follows from them and the streams."""

    rollout: RolloutLayout
    tables: tuple[CircleTables, ...]  # of each place inside an engine
    devices: Devices
    stride: int
    num_rounds: int

    def start(self, worker: int) -> int:
        """The grain at which a worker begins."""
        workers = self.rollout.world_size
        return self.tables[worker % len(self.tables)].start_near((worker * self.stride % workers, workers))

    def flow(self, worker: int) -> Flow:
        """What one worker receives, in order of rounds."""
        table = self.tables[worker % len(self.tables)]
        start = self.start(worker)
        order = np.concatenate([np.arange(start, len(table.nbytes)), np.arange(start)])
        begun = table.before[start] if len(order) else 0
        travelled = (table.before[order] - begun) % max(table.total, 1)
        entry = table.entry[order]
        candidates, near, tier = self._candidates(table, worker)
        turn = table.turn[order] + self._shift(worker) + table.segment[order]
        choice = candidates[entry, turn % near[entry]]
        source = table.ranks[entry, choice]
        rounds = travelled * self.num_rounds // max(table.total, 1)
        return Flow(table.segment[order], table.index[order], table.nbytes[order], choice, source, rounds, tier[entry])

    def _shift(self, worker: int) -> int:
        """Makes workers that want the same grains ask different replicas."""
        return worker + worker // self.rollout.tensor + worker // self.rollout.workers_per_engine

    def _candidates(self, table: CircleTables, worker: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each set of holders: their numbers, nearest first; how many are equally near; how near."""
        d = self.devices
        tier = np.full(table.ranks.shape, REMOTE)
        tier[d.rank_node[table.ranks] == d.worker_node[worker]] = SAME_NODE
        tier[d.rank_device[table.ranks] == d.worker_device[worker]] = SAME_DEVICE
        tier[table.ranks < 0] = REMOTE + 1
        nearest = tier.min(axis=1)
        return np.argsort(tier, axis=1, kind="stable"), (tier == nearest[:, None]).sum(axis=1), nearest

    def loads(self, num_ranks: int) -> Loads:
        """Bytes per round of everybody."""
        workers, rounds = self.rollout.world_size, self.num_rounds
        sent = np.zeros((len(TIERS), rounds, num_ranks), dtype=np.int64)
        received = np.zeros((len(TIERS), rounds, workers), dtype=np.int64)
        for worker in range(workers):
            flow = self.flow(worker)
            cell = (flow.tier * rounds + flow.round) * num_ranks + flow.source
            bytes_of = np.bincount(cell, flow.nbytes, sent.size).astype(np.int64).reshape(sent.shape)
            sent += bytes_of
            received[:, :, worker] = bytes_of.sum(axis=2)
        return Loads(sent, received)


def make_schedule(
    rollout: RolloutLayout, tables: Sequence[CircleTables], devices: Devices, num_ranks: int, budget: int
) -> tuple[Schedule, Loads] | None:
    """The schedule with few rounds in which nobody sends or receives more than `budget` bytes; None when no number of rounds does it."""
    largest_grain = max((int(t.nbytes.max(initial=0)) for t in tables), default=0)
    fullest = max((t.total for t in tables), default=0)
    rounds = max(1, -(-fullest // max(budget - largest_grain, 1)))
    stride = best_stride(rollout, tables, num_ranks, rounds)
    for _ in range(12):
        schedule = Schedule(rollout, tuple(tables), devices, stride, rounds)
        loads = schedule.loads(num_ranks)
        if loads.largest <= budget:
            return schedule, loads
        rounds = max(rounds + 1, rounds * loads.largest // budget + 1)
    return None


def best_stride(rollout: RolloutLayout, tables: Sequence[CircleTables], num_ranks: int, rounds: int) -> int:
    """The stride under which the busiest rank of each round has least to do, added over the rounds."""
    workers = rollout.world_size
    strides = [s for s in _strides(workers) if gcd(s, workers) == 1][:_CANDIDATES]
    if len(strides) == 1:
        return strides[0]
    bins = max(rounds, 2 * len(_stages(tables)))
    loads = np.zeros((len(strides), bins, num_ranks), dtype=np.int64)
    for place, table in enumerate(tables):
        profile = _profile(table, bins, num_ranks)
        for n, stride in enumerate(strides):
            for worker in range(place, workers, len(tables)):
                loads[n] += np.roll(profile, -(worker * stride % workers * bins // workers), axis=0)
    return strides[int(loads.max(axis=2).sum(axis=1).argmin())]


def _stages(tables: Sequence[CircleTables]) -> set[int]:
    return {int(rank) for table in tables for rank in table.ranks[:, 0]}


def _strides(workers: int) -> list[int]:
    """One after the other, those near golden ratios, and those that step over blocks."""
    blocks = [d for d in range(2, workers) if workers % d == 0]
    found = [
        1,
        *(workers * f // 1000 for f in (618, 382, 236, 414, 293)),
        *(d + 1 for d in blocks),
        *(d - 1 for d in blocks),
        3,
        5,
        7,
        11,
        13,
    ]
    return list(dict.fromkeys(s for s in found if 0 < s <= max(workers - 1, 1)))


def _profile(table: CircleTables, bins: int, num_ranks: int) -> np.ndarray:
    """Bytes [bin, rank] that a worker starting at the beginning asks of each rank, replicas sharing equally."""
    cell = table.before * bins // max(table.total, 1) * num_ranks
    profile = np.zeros(bins * num_ranks, dtype=np.int64)
    for replica in range(table.ranks.shape[1]):
        has = table.count[table.entry] > replica
        entry = table.entry[has]
        share = table.nbytes[has] // table.count[entry]
        profile += np.bincount(cell[has] + table.ranks[entry, replica], share, len(profile)).astype(np.int64)
    return profile.reshape(bins, num_ranks)


def refuse_budget(budget: int, largest: int) -> ConfigError:
    """The error for a budget that no schedule can keep."""
    return ConfigError(
        f"reshard.budget_mb: a round of {budget} bytes is too small for this model, whose smallest unit has {largest} bytes; "
        "raise it until every process can send one unit to each of its peers"
    )
