"""Decides when each grain travels and who sends it: starting points of workers, rounds, choice among replicas.

Every worker walks its stream as a circle and starts at a module of its own. Starting points are spread evenly over the
circle, so that all pipeline stages send at any time. There are two ways to walk. A free walk moves the same bytes in
every round. A lockstep walk spends equal numbers of rounds on all stages, so that always the same workers share a
stage. The load of the busiest rank decides the way and the starting points.

What several ranks could send is shared so that the least loaded rank of a round sends most. All numbers are integers,
so that every process computes the same schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np

from mrl.model.layout import RolloutLayout
from mrl.reshard.streams import TIERS, Candidates, Devices, WorkerStream, rotated

_STRIDES = 24  # most strides that are tried
_BINS = 64  # rounds for comparing walks
_KEPT_GRAINS = 1 << 20  # larger plans do not keep their flows
_ATTEMPTS = 6  # numbers of rounds that are tried


@dataclass(frozen=True)
class Loads:
    """Bytes of every round: [tier, round, rank] sent and [tier, round, worker] received."""

    sent: np.ndarray
    received: np.ndarray

    @cached_property
    def largest(self) -> int:
        """Bytes of the busiest process in its busiest round."""
        return int(max(self.sent.sum(axis=0).max(), self.received.sum(axis=0).max()))


@dataclass(frozen=True)
class Flow:
    """What one worker receives, in the order of its walk. Arrays have one row for each grain."""

    segment: np.ndarray
    index: np.ndarray  # in the segment's block
    nbytes: np.ndarray
    choice: np.ndarray  # number of the sender among the grain's holders
    source: np.ndarray  # rank
    round: np.ndarray


@dataclass(frozen=True)
class RoundSchedule:
    """The order of all grains, and their senders."""

    streams: tuple[WorkerStream, ...]  # one for each position inside an engine
    starts: tuple[int, ...]  # for each worker: the grain with which it begins
    lockstep: bool
    num_rounds: int
    choices: tuple[np.ndarray, ...]  # for each worker: number of the sender among the holders, in the order of its walk

    def flow(self, worker: int) -> Flow:
        """Returns what one worker receives."""
        if worker in self._kept:
            return self._kept[worker]
        flow = self._flow(worker)
        if sum(map(len, self.choices)) <= _KEPT_GRAINS:
            self._kept[worker] = flow
        return flow

    @cached_property
    def _kept(self) -> dict[int, Flow]:
        """Flows of small plans, which are asked for once for each rank."""
        return {}

    def _flow(self, worker: int) -> Flow:
        stream = self.streams[worker % len(self.streams)]
        order, rounds = stream.travel(self.starts[worker], self.num_rounds, self.lockstep)
        choice = self.choices[worker]
        source = stream.ranks[stream.holder_set[order], choice]
        return Flow(stream.segment[order], stream.index[order], stream.nbytes[order], choice, source, rounds)


def make_schedule(
    rollout: RolloutLayout, streams: Sequence[WorkerStream], devices: Devices, num_ranks: int, budget: int
) -> tuple[RoundSchedule, Loads] | None:
    """Returns the schedule with few rounds in which no process sends or receives more than `budget` bytes; None if
    there is none.
    """
    largest_grain = max(int(stream.nbytes.max()) for stream in streams)
    usable = max(budget - largest_grain, 1)  # a round may end in the middle of a grain
    lockstep, stride = best_walk(rollout.world_size, streams, num_ranks)
    step = 1
    if lockstep:
        step = streams[0].num_stages
    fullest = max(int(stream.stage_total.max()) if lockstep else stream.total for stream in streams)
    rounds = max(1, -(-fullest // usable)) * step
    workers = range(rollout.world_size)
    starts = [streams[w % len(streams)].start_near(w * stride % len(workers), len(workers), lockstep) for w in workers]
    pools = _Pools.of([streams[w % len(streams)].candidates(devices, w) for w in workers])
    for _ in range(_ATTEMPTS):
        sharing = _Sharing(streams, starts, lockstep, pools, num_ranks, rounds)
        if sharing.largest <= max(usable, budget // 2):
            choices, loads = sharing.assign()
            if loads.largest <= budget:
                return RoundSchedule(tuple(streams), tuple(starts), lockstep, rounds, choices), loads
        rounds = -(-max(rounds + 1, rounds * (sharing.largest + largest_grain) // budget + 1) // step) * step
    return None


@dataclass(frozen=True)
class _Walk:
    """What one worker asks for, in the order of its walk. Arrays have one row for each grain."""

    holder_set: np.ndarray
    nbytes: np.ndarray
    round: np.ndarray


@dataclass(frozen=True)
class _Pools:
    """The ranks that workers may ask. A pool is what a set of equally near ranks has to send together."""

    ranks: tuple[tuple[int, ...], ...]  # for each pool
    of_sets: tuple[np.ndarray, ...]  # for each worker: the pool of each holder set
    candidates: tuple[Candidates, ...]  # for each worker

    @classmethod
    def of(cls, candidates: Sequence[Candidates]) -> "_Pools":
        """Makes the pools of all workers together."""
        numbers: dict[tuple[int, ...], int] = {}
        of_sets = []
        for of_worker in candidates:
            pools = [numbers.setdefault(ranks, len(numbers)) for ranks in _rank_sets(of_worker)]
            of_sets.append(np.array(pools))
        return cls(tuple(numbers), tuple(of_sets), tuple(candidates))


class _Sharing:
    """Shares among replicas what each of them could send."""

    def __init__(
        self,
        streams: Sequence[WorkerStream],
        starts: Sequence[int],
        lockstep: bool,
        pools: _Pools,
        num_ranks: int,
        num_rounds: int,
    ):
        self.streams = [streams[worker % len(streams)] for worker in range(len(starts))]
        self.starts = starts
        self.pools = pools
        self.lockstep = lockstep
        self.num_rounds = num_rounds
        self.sent = np.zeros((num_rounds, num_ranks), dtype=np.int64)
        self.quotas = self._share(self._demand())

    def _rounds(self, worker: int) -> np.ndarray:
        """Returns the round of each grain that a worker receives. Computing it again is faster than keeping all
        workers'.
        """
        return self.streams[worker].rounds(self.starts[worker], self.num_rounds, self.lockstep)

    def _demand(self) -> np.ndarray:
        """Returns the bytes that are asked of each pool, [pool, round]."""
        demand = np.zeros(len(self.pools.ranks) * self.num_rounds, dtype=np.int64)
        for worker, (stream, pool_of) in enumerate(zip(self.streams, self.pools.of_sets, strict=True)):
            cells = (pool_of * self.num_rounds)[stream.holder_set] + self._rounds(worker)
            np.add.at(demand, cells, stream.nbytes)
        return demand.reshape(-1, self.num_rounds)

    @property
    def largest(self) -> int:
        """Bytes of the busiest rank in its busiest round, exact up to one grain."""
        return int(self.sent.max())

    def _walk(self, worker: int) -> "_Walk":
        stream = self.streams[worker]
        start = self.starts[worker]
        arrays = (stream.holder_set, stream.nbytes, self._rounds(worker))
        return _Walk(*(rotated(array, start) for array in arrays))

    def _share(self, demand: np.ndarray) -> dict[int, np.ndarray]:
        """Returns, for each pool, the bytes [round, candidate] that each candidate sends.

        Pools with the fewest candidates come first.
        """
        pools = self.pools.ranks
        quotas = {}
        for pool in sorted(range(len(pools)), key=lambda p: len(pools[p])):
            ranks = list(pools[pool])
            quotas[pool] = level(self.sent[:, ranks], demand[pool])
            self.sent[:, ranks] += quotas[pool]
        return quotas

    def _bounds(self) -> np.ndarray:
        """Returns the byte of a pool's demand at which each candidate's part ends: [candidate, pool * rounds + round].

        The last candidate's part has no end, and no row.
        """
        pools = self.pools.ranks
        width = max(len(ranks) for ranks in pools)
        bounds = np.full((width - 1, len(pools), self.num_rounds), np.iinfo(np.int64).max)
        for pool, quota in self.quotas.items():
            bounds[: len(pools[pool]) - 1, pool] = quota.cumsum(axis=1)[:, :-1].T
        return bounds.reshape(width - 1, len(pools) * self.num_rounds)

    def assign(self) -> tuple[tuple[np.ndarray, ...], Loads]:
        """Assigns a sender to every grain. Returns the choices and the resulting loads."""
        filled = np.zeros(len(self.pools.ranks) * self.num_rounds, dtype=np.int64)
        bounds = self._bounds()
        num_ranks = self.sent.shape[1]
        cells = len(TIERS) * self.num_rounds
        sent = np.zeros(cells * num_ranks, dtype=np.int64)
        received = np.zeros((len(self.starts), cells), dtype=np.int64)
        choices = []
        for worker, candidates in enumerate(self.pools.candidates):
            walk = self._walk(worker)
            candidate = self._pick(worker, walk, bounds, filled)
            choices.append(candidates.numbers[walk.holder_set, candidate].astype(np.int16))
            cell = candidates.tier[walk.holder_set] * self.num_rounds + walk.round
            rank = candidates.ranks[walk.holder_set, candidate]
            np.add.at(sent, cell * num_ranks + rank, walk.nbytes)
            np.add.at(received[worker], cell, walk.nbytes)
        shape = (len(TIERS), self.num_rounds, -1)
        return tuple(choices), Loads(sent.reshape(shape), received.T.reshape(shape))

    def _pick(self, worker: int, walk: "_Walk", bounds: np.ndarray, filled: np.ndarray) -> np.ndarray:
        """Returns a candidate's number for each grain: the one whose part of the pool holds the grain's middle byte."""
        sets = walk.holder_set
        candidate = np.zeros_like(sets)
        shared = np.flatnonzero(self.pools.candidates[worker].count[sets] > 1)
        pool = self.pools.of_sets[worker][sets[shared]]
        cell = pool * self.num_rounds + walk.round[shared]
        middle = _middles(cell, walk.nbytes[shared], filled)
        number = np.zeros_like(cell)
        for ends in bounds:  # not all candidates of a grain at once: that is much slower
            number += middle >= ends[cell]
        candidate[shared] = number
        return candidate


def _rank_sets(candidates: Candidates) -> list[tuple[int, ...]]:
    return [
        tuple(ranks[:count]) for ranks, count in zip(candidates.ranks.tolist(), candidates.count.tolist(), strict=True)
    ]


def _middles(keys: np.ndarray, nbytes: np.ndarray, filled: np.ndarray) -> np.ndarray:
    """Returns each grain's middle byte in the sequence of all grains of its key. Adds to `filled`, the sequence
    lengths.
    """
    order = np.argsort(keys, kind="stable")
    key = keys[order]
    size = nbytes[order]
    end = size.cumsum()
    first = np.flatnonzero(np.diff(key, prepend=-1))
    lengths = np.diff(np.append(first, len(key)))
    origin = np.repeat(end[first] - size[first] - filled[key[first]], lengths)
    filled[key[first]] += np.add.reduceat(size, first)
    middles = np.empty_like(size)
    middles[order] = end - size + size // 2 - origin
    return middles


def level(loads: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Returns how much of `more[row]` each column of `loads[row, :]` gets, so that the largest stays smallest.
    Approximate.
    """
    width = loads.shape[1]
    ascending = np.sort(loads, axis=1)
    total = ascending.cumsum(axis=1)
    counts = np.arange(1, width + 1)
    needed = ascending[:, 1:] * counts[:-1] - total[:, :-1]  # what raises the first columns to the next one
    active = (needed < more[:, None]).sum(axis=1)  # columns that get more, minus one
    rows = np.arange(len(loads))
    height = (more + total[rows, active]) // counts[active]
    return np.maximum(height[:, None] - loads, 0)


def best_walk(workers: int, streams: Sequence[WorkerStream], num_ranks: int) -> tuple[bool, int]:
    """Returns (in lockstep, stride) for which the load of the busiest process, added over the rounds, is smallest.

    Worker w starts w * stride workers' shares into the stream.
    """
    strides = _strides(workers)
    costs = [_walk_costs(workers, streams, num_ranks, strides, lockstep) for lockstep in (False, True)]
    best = int(np.argmin(costs))
    return best >= len(strides), strides[best % len(strides)]


def _walk_costs(
    workers: int, streams: Sequence[WorkerStream], num_ranks: int, strides: Sequence[int], lockstep: bool
) -> list[int]:
    """Returns, for each stride, the bytes of the busiest process added over a coarse division into rounds."""
    stages = streams[0].num_stages
    bins = -(-_BINS // stages) * stages
    sent = np.zeros((len(strides), bins, num_ranks), dtype=np.int64)
    received = np.zeros(bins, dtype=np.int64)
    for position, stream in enumerate(streams):
        profile = np.tile(_profile(stream, bins, num_ranks, lockstep), (2, 1))
        for worker in range(position, workers, len(streams)):
            for n, stride in enumerate(strides):
                start = worker * stride % workers * bins // workers
                start -= start % (bins // stages) if lockstep else 0
                sent[n] += profile[start : start + bins]
        received = np.maximum(received, profile[:bins].sum(axis=1).max() if lockstep else -(-stream.total // bins))
    return np.maximum(sent.max(axis=2), received).sum(axis=1).tolist()


def _strides(workers: int) -> list[int]:
    """Returns strides that visit every starting point: 1, near golden ratios, past blocks, small primes."""
    blocks = [size for size in range(2, workers) if workers % size == 0]
    ratios = [workers * ratio // 1000 for ratio in (618, 382, 236, 414, 293)]
    candidates = [1, *(size - 1 for size in blocks), *(size + 1 for size in blocks), *ratios, 3, 5, 7, 11, 13]
    strides = dict.fromkeys(
        stride for stride in candidates if 0 < stride < max(workers, 2) and gcd(stride, workers) == 1
    )
    return list(strides)[:_STRIDES]


def _profile(stream: WorkerStream, bins: int, num_ranks: int, lockstep: bool) -> np.ndarray:
    """Returns bytes [bin, rank] that a worker asks of each rank, if it starts at 0 and replicas share equally."""
    sets = len(stream.holders)
    cells = stream.travel(0, bins, lockstep)[1] * sets + stream.holder_set
    set_bytes = np.zeros(bins * sets, dtype=np.int64)
    np.add.at(set_bytes, cells, stream.nbytes)
    holds = np.zeros((sets, num_ranks), dtype=np.int64)
    for number, ranks in enumerate(stream.holders):
        holds[number, list(ranks)] = 1
    return set_bytes.reshape(bins, sets) // holds.sum(axis=1) @ holds
