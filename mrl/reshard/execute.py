"""Runs a plan: a rank packs and sends its messages round by round, a worker unpacks them into its parameters, module by module."""

import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from mrl.model.megatron_shards import source_shards
from mrl.reshard.messages import Copy, Message
from mrl.reshard.pack import Shards, ShardViews, WireViews, by_module, copy_all, module_of, target_view
from mrl.reshard.plan import ReshardPlan
from mrl.reshard.setup import SyncSetup
from mrl.reshard.shard_digests import ShardDigests
from mrl.reshard.transport import ReceivingEnd, SendingEnd, open_receiver, open_sender


class Writer(Protocol):
    """An engine's parameters, in load layout."""

    def tensor(self, parameter: str) -> Tensor:
        """The parameter; on first use its module is made."""
        ...

    def complete(self, module: str) -> None:
        """All of the module has been written."""
        ...


@dataclass
class Clock:
    """Seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began


@dataclass(frozen=True)
class SendReport:
    """What one rank sent."""

    rank: int
    digests: dict[int, dict[str, int]]  # worker -> parameter -> digest of this rank's share
    shared: dict[str, int]  # parameter -> digest, of those that other ranks hold as well; empty when it was not asked for
    moved: dict[int, int]  # worker on another device -> bytes
    local: dict[int, int]  # worker on the rank's own device -> bytes
    staging_bytes: int
    seconds: dict[str, float]  # "wait", "pack" and "digest"

    @property
    def bytes_moved(self) -> int:
        return sum(self.moved.values())

    @property
    def bytes_local(self) -> int:
        return sum(self.local.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return vars(self)


@dataclass(frozen=True)
class ReceiveReport:
    """What one worker received."""

    worker: int
    bytes_moved: int
    bytes_local: int
    staging_bytes: int
    seconds: dict[str, float]  # "wait", "unpack" and "complete": vLLM's processing and the digests


class Sender:
    """One rank's sending side, kept over the run so that its views are made once."""

    def __init__(self, plan: ReshardPlan, rank: int, shards: Shards, end: SendingEnd, dtype: torch.dtype, local: Collection[int] = ()):
        """`local`: workers on this rank's own device; what goes to them does not count as moved."""
        self.plan, self.rank, self.end, self._local = plan, rank, end, set(local)
        self._messages = list(plan.sends(rank))
        self._sources, self._wire = ShardViews(shards), WireViews(dtype)
        self._digests = ShardDigests(source_shards(plan.model, plan.train, rank), shards, dtype)

    def send(self, update: int, workers: Collection[int], check_replicas: bool = True) -> SendReport:
        """Sends everything for `workers`, once. Raises TransferError; the peers are told that the rest does not come."""
        messages, clock = self.transfer(update, workers)
        with clock("digest"), torch.no_grad():
            digests = self._digests.sent(messages)
            shared = self._digests.shared() if check_replicas else {}
        counted = Counter()
        for message in messages:
            counted[message.worker] += message.nbytes
        moved, local = ({w: n for w, n in counted.items() if (w in self._local) is here} for here in (False, True))
        return SendReport(self.rank, digests, shared, moved, local, self.end.staging_bytes, clock.seconds)

    def transfer(self, update: int, workers: Collection[int]) -> tuple[list[Message], Clock]:
        """The sending alone: what was sent, and the time it took. Raises as `send` does."""
        clock, messages = Clock(), [m for m in self._messages if m.worker in workers]
        self._sources.refresh()
        try:
            with torch.no_grad():
                self._transfer(update, messages, clock)
        except BaseException:
            self.end.abandon()
            raise
        return messages, clock

    def _transfer(self, update: int, messages: list[Message], clock: Clock) -> None:
        self.end.begin(update, messages)
        for message in messages:
            with clock("wait"):
                slot = self.end.slot(message)
            with clock("pack"):
                copy_all(self._wire.of(message, slot, self.end.lasting(message)), self._sources.of(message))
                self.end.post(message)
        with clock("wait"):
            self.end.finish()


class Receiver:
    """One worker's receiving side, kept over the run."""

    def __init__(self, plan: ReshardPlan, worker: int, end: ReceivingEnd, dtype: torch.dtype, local: Collection[int] = ()):
        """`local`: ranks on this worker's own device."""
        self.plan, self.worker, self.end, self._local = plan, worker, end, set(local)
        self._rounds = [list(messages) for _, messages in groupby(plan.receives(worker), key=attrgetter("round"))]
        self._copies = Counter(module_of(c.parameter) for messages in self._rounds for m in messages for c in m.copies)
        self._wire = WireViews(dtype)

    def receive(self, writer: Writer, update: int) -> ReceiveReport:
        """Takes everything for this worker. Raises TransferError; the peers are told that no more is taken."""
        clock = Clock()
        try:
            with torch.no_grad():
                self._receive(writer, update, clock)
        except BaseException:
            self.end.abandon()
            raise
        messages = [message for of_round in self._rounds for message in of_round]
        moved, local = (sum(m.nbytes for m in messages if (m.source in self._local) is here) for here in (False, True))
        return ReceiveReport(self.worker, moved, local, self.end.staging_bytes, clock.seconds)

    def _receive(self, writer: Writer, update: int, clock: Clock) -> None:
        self.end.begin(update, self._rounds)
        left: dict[str, int] = {}  # modules that are begun -> copies they lack
        for messages in self._rounds:
            with clock("wait"):
                buffers = self.end.take(messages)
            held = zip(messages, buffers, strict=True)
            blocks = [self._wire.of(message, buffer, self.end.lasting(message)) for message, buffer in held]
            for module, copies in by_module(messages, blocks, list(left)):
                with clock("unpack"):
                    _write(writer, copies)
                left[module] = left.get(module, self._copies[module]) - len(copies)
                if not left[module]:
                    del left[module]
                    with clock("complete"):
                        writer.complete(module)
            self.end.release(messages)


def _write(writer: Writer, copies: list[tuple[Copy, Tensor]]) -> None:
    tensors = {name: writer.tensor(name) for name in dict.fromkeys(copy.parameter for copy, _ in copies)}
    copy_all([target_view(tensors[copy.parameter], copy) for copy, _ in copies], [block for _, block in copies])


def connect_sender(setup: SyncSetup, rank: int, shards: Shards) -> Sender:
    """Opens the rank's end and meets its workers, which do the same now. Raises TransferError."""
    place, workers = setup.places.ranks[rank], setup.places.workers
    local = [worker for worker, other in enumerate(workers) if other == place]
    return Sender(setup.plan(), rank, shards, open_sender(setup, rank), getattr(torch, setup.dtype), local)


def connect_receiver(setup: SyncSetup, worker: int) -> Receiver:
    """Opens the worker's end and meets its ranks, which do the same now. Raises TransferError."""
    place, ranks = setup.places.workers[worker], setup.places.ranks
    local = [rank for rank, other in enumerate(ranks) if other == place]
    return Receiver(setup.plan(), worker, open_receiver(setup, worker), getattr(torch, setup.dtype), local)
