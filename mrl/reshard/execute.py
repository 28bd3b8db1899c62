"""Runs a plan: a rank packs and sends its messages round by round, a worker unpacks them into its parameters, module by module."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from mrl.reshard.digest import MODULUS, partial_digest
from mrl.reshard.pack import Shards, ShardViews, WireViews, by_module, copy_all, module_of, target_view
from mrl.reshard.plan import Copy, Message, ReshardPlan
from mrl.reshard.setup import SyncSetup
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
    bytes_moved: int  # to workers on other devices
    bytes_local: int  # to workers on the rank's own device
    staging_bytes: int
    seconds: dict[str, float]  # "wait", "pack" and "digest"

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
        self.plan, self.rank, self.end, self.dtype, self._local = plan, rank, end, dtype, set(local)
        self._messages = list(plan.sends(rank))
        self._sources, self._wire = ShardViews(shards), WireViews(dtype)

    def send(self, update: int, workers: Collection[int], with_digests: bool = True) -> SendReport:
        """Sends everything for `workers`, once. Raises TransferError; the peers are told that the rest does not come."""
        clock = Clock()
        messages = [m for m in self._messages if m.worker in workers]
        self._sources.refresh()
        try:
            with torch.no_grad():
                self._send(update, messages, clock)
        except BaseException:
            self.end.abandon()
            raise
        digests: dict[int, dict[str, int]] = {}
        if with_digests:
            with clock("digest"), torch.no_grad():
                digests = self._digests(messages)
        moved, stayed = _counted(messages, lambda m: m.worker in self._local)
        return SendReport(self.rank, digests, moved, stayed, self.end.staging_bytes, clock.seconds)

    def _send(self, update: int, messages: list[Message], clock: Clock) -> None:
        self.end.begin(update, messages)
        for message in messages:
            with clock("wait"):
                slot = self.end.slot(message)
            with clock("pack"):
                copy_all(self._wire.of(message, slot), self._sources.of(message))
                self.end.post(message)
        with clock("wait"):
            self.end.finish()

    def _digests(self, messages: list[Message]) -> dict[int, dict[str, int]]:
        """From the parameters themselves, not from what was packed. A box that goes to several workers is read once."""
        known: dict[tuple, int] = {}
        found: dict[int, dict[str, int]] = {}
        for message in messages:
            sums = found.setdefault(message.worker, {})
            for copy, view in zip(message.copies, self._sources.of(message), strict=True):
                key = copy.hf_name, copy.hf_box
                if key not in known:
                    known[key] = partial_digest(view.to(self.dtype), copy.hf_name, copy.hf_box.origin)
                sums[copy.parameter] = (sums.get(copy.parameter, 0) + known[key]) % MODULUS
        return found


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
        moved, stayed = _counted([m for messages in self._rounds for m in messages], lambda m: m.source in self._local)
        return ReceiveReport(self.worker, moved, stayed, self.end.staging_bytes, clock.seconds)

    def _receive(self, writer: Writer, update: int, clock: Clock) -> None:
        self.end.begin(update, self._rounds)
        left: dict[str, int] = {}  # modules that are begun -> copies they lack
        for messages in self._rounds:
            with clock("wait"):
                buffers = self.end.take(messages)
            blocks = [self._wire.of(message, buffer) for message, buffer in zip(messages, buffers, strict=True)]
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


def _counted(messages: list[Message], is_local: Callable[[Message], bool]) -> tuple[int, int]:
    """Bytes (between devices, inside one device)."""
    stayed = sum(m.nbytes for m in messages if is_local(m))
    return sum(m.nbytes for m in messages) - stayed, stayed


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
