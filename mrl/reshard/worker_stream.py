"""The streams as arrays, and where processes stand as numbers: what the schedule computes with."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mrl.reshard.streams import Grain, Segment, Stream

SAME_DEVICE, SAME_NODE, REMOTE = TIERS = (0, 1, 2)  # nearer is less
MAX_CANDIDATES = 16  # replicas that one worker may ask for the same thing


@dataclass(frozen=True)
class Devices:
    """Number of the device and of the node of every rank and worker."""

    rank_device: np.ndarray
    rank_node: np.ndarray
    worker_device: np.ndarray
    worker_node: np.ndarray

    @classmethod
    def apart(cls, ranks: int, workers: int) -> "Devices":
        """Every process on a device and a node of its own."""
        rank, worker = np.arange(ranks), ranks + np.arange(workers)
        return cls(rank, rank, worker, worker)


class _Block:
    """One template of a stream as arrays."""

    def __init__(self, grains: Sequence[Grain]):
        sets: dict[tuple[int, ...], int] = {}
        numbers = [sets.setdefault(tuple(holder.offset for holder in grain.holders), len(sets)) for grain in grains]
        self.nbytes = np.array([grain.nbytes for grain in grains], dtype=np.int64)
        self.holder_set = np.array(numbers, dtype=np.int64)
        self.sets = list(sets)
        begins = [n == 0 or grains[n - 1].module != grain.module for n, grain in enumerate(grains)]
        self.begins_module = np.array(begins, dtype=bool)


@dataclass(frozen=True)
class Candidates:
    """Whom one worker may ask for the grains of each holder set: arrays with a row a set."""

    numbers: np.ndarray  # [set, candidate]: number among the holders; those beyond `count` mean nothing
    ranks: np.ndarray  # [set, candidate]
    count: np.ndarray
    tier: np.ndarray  # how near they are, all alike


class Circle:
    """The stream of one place inside an engine: arrays with a row a grain, in model order."""

    def __init__(self, stream: Stream, segments: Sequence[Segment]):
        blocks = [_Block(grains) for grains in stream.blocks]
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
        self.starts = np.flatnonzero(np.concatenate([block.begins_module for block in chosen]))  # first grain of each module
        self.before = np.cumsum(self.nbytes) - self.nbytes  # bytes in front of each grain
        self.total = int(self.nbytes.sum())
        width = max(len(offsets) for _, offsets in sets)
        self.stage = np.repeat(np.array([segment.stage for segment in segments]), sizes)
        self.num_stages = max(segment.stage for segment in segments) + 1
        self.stage_total = np.bincount(self.stage, self.nbytes, self.num_stages).astype(np.int64)
        self.stage_before = np.cumsum(self.stage_total) - self.stage_total
        self.holders = [frozenset(first + o for o in offsets) for first, offsets in sets]
        self.ranks = np.array([[first + o for o in offsets] + [-1] * (width - len(offsets)) for first, offsets in sets])  # [set, holder]

    def start_near(self, part: int, parts: int, lockstep: bool) -> int:
        """The grain that begins a module, nearest to `part` / `parts` of the way round; in lockstep one that begins a stage."""
        if lockstep:
            behind = (self.stage - part * self.num_stages // parts) % self.num_stages
            return int(behind.argmin())
        return int(self.starts[np.abs(self.before[self.starts] - self.total * part // parts).argmin()])

    def travel(self, start: int, num_rounds: int, lockstep: bool) -> tuple[np.ndarray, np.ndarray]:
        """(grains in order, round of each) of a walk round from grain `start`.

        Rounds bring equal bytes of the whole walk. In lockstep every stage gets an equal number of rounds, which divide its bytes.
        """
        order = np.concatenate([np.arange(start, len(self.nbytes)), np.arange(start)])
        if not lockstep:
            travelled = (self.before[order] - self.before[start]) % self.total
            return order, travelled * num_rounds // self.total
        stage, each = self.stage[order], num_rounds // self.num_stages
        in_stage = (self.before - self.stage_before[self.stage])[order] * each // self.stage_total[stage]
        return order, (stage - self.stage[start]) % self.num_stages * each + in_stage

    def candidates(self, devices: Devices, worker: int) -> Candidates:
        """The nearest holders of everything, at most MAX_CANDIDATES of them, other ones for other workers."""
        tier = np.full(self.ranks.shape, REMOTE)
        tier[devices.rank_node[self.ranks] == devices.worker_node[worker]] = SAME_NODE
        tier[devices.rank_device[self.ranks] == devices.worker_device[worker]] = SAME_DEVICE
        tier[self.ranks < 0] = REMOTE + 1
        nearest = tier.min(axis=1)
        near = tier == nearest[:, None]
        step = -(-near.sum(axis=1) // MAX_CANDIDATES)
        turn = np.array([_digit_sum(worker, int(base)) for base in step]) % step
        near &= (near.cumsum(axis=1) - 1) % step[:, None] == turn[:, None]
        numbers = np.argsort(~near, axis=1, kind="stable")[:, :MAX_CANDIDATES]
        return Candidates(numbers, np.take_along_axis(self.ranks, numbers, axis=1), near.sum(axis=1), nearest)


def _digit_sum(number: int, base: int) -> int:
    """Spreads numbers over their remainders evenly, also where only every so manieth number is taken."""
    digits = 0
    while number and base > 1:
        number, digit = divmod(number, base)
        digits += digit
    return digits
