"""Opens both sides of a sync: a `Sender` and a `Receiver`, each over the transports that reach its peers."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mrl.platforms.hosting import get_hosting
from mrl.platforms.transfer import get_transfer
from mrl.reshard.copies import warm_up
from mrl.reshard.digest import Merge, Shards
from mrl.reshard.execute import Receiver, Sender
from mrl.reshard.messages import Message
from mrl.reshard.setup import SyncSetup, route
from mrl.reshard.transport import ReceivingEnd, SendingEnd
from mrl.reshard.transport_p2p import PointToPointReceiver, PointToPointSender
from mrl.reshard.transport_shm import DeviceReceiver, DeviceSender, SharedMemoryReceiver, SharedMemorySender

_ORDER = ("shm", "ipc", "p2p")  # of opening: point-to-point waits for all peers
_SENDERS = {"shm": SharedMemorySender, "ipc": DeviceSender, "p2p": PointToPointSender}
_RECEIVERS = {"shm": SharedMemoryReceiver, "ipc": DeviceReceiver, "p2p": PointToPointReceiver}


def connect_sender(
    setup: SyncSetup,
    rank: int,
    shards: Shards,
    merge: Merge | None = None,
    check_wanted: Callable[[], None] = lambda: None,
) -> Sender:
    """Opens the rank's end and connects to its workers, which open theirs now. Raises TransferError.

    `merge` merges the rank's adapters, where it has any. `check_wanted` is called while it waits, and raises once
    nobody wants this connection any more.
    """
    place = setup.places.ranks[rank]
    workers = setup.places.workers
    local = [worker for worker, other in enumerate(workers) if other == place]
    transfer = get_transfer(setup.dialect)
    warm_up(getattr(torch, setup.dtype), transfer.device)
    free_bytes = transfer.free_bytes
    end = _open_sender(setup, rank, check_wanted)
    return Sender(setup.plan(), rank, shards, end, getattr(torch, setup.dtype), local, free_bytes, merge)


def connect_receiver(setup: SyncSetup, worker: int) -> Receiver:
    """Opens the worker's end and connects to its ranks, which open theirs now. Raises TransferError."""
    place = setup.places.workers[worker]
    ranks = setup.places.ranks
    local = [rank for rank, other in enumerate(ranks) if other == place]
    remote = [rank for rank, other in enumerate(ranks) if other.node != place.node]
    transfer = get_transfer(setup.dialect)
    warm_up(getattr(torch, setup.dtype), transfer.device)
    free_bytes = transfer.free_bytes
    return Receiver(
        setup.plan(), worker, _open_receiver(setup, worker), getattr(torch, setup.dtype), local, remote, free_bytes
    )


def _open_sender(setup: SyncSetup, rank: int, check_wanted: Callable[[], None]) -> SendingEnd:
    transfer = get_transfer(setup.dialect)
    reach = get_hosting(setup.dialect).memory_reach
    routes = {w: route(setup, rank, w, reach) for w in setup.workers}
    return _opened(
        routes, _SenderBundle, lambda kind, peers: _SENDERS[kind](setup, rank, peers, transfer, check_wanted)
    )


def _open_receiver(setup: SyncSetup, worker: int) -> ReceivingEnd:
    transfer = get_transfer(setup.dialect)
    reach = get_hosting(setup.dialect).memory_reach
    routes = {r: route(setup, r, worker, reach) for r in range(setup.train_layout.world_size)}
    return _opened(routes, _ReceiverBundle, lambda kind, peers: _RECEIVERS[kind](setup, worker, peers, transfer))


def _opened(routes: dict[int, str], bundle: type, open_end: Callable[[str, list[int]], Any]) -> Any:
    """Opens an end for each transport. Returns the only one, or a bundle of several."""
    ends: dict[str, Any] = {}
    try:
        for kind in _ORDER:
            if peers := [peer for peer, route_kind in routes.items() if route_kind == kind]:
                ends[kind] = open_end(kind, peers)
    except BaseException:  # nobody else has those that are open
        for end in ends.values():
            end.close()
        raise
    if len(ends) == 1:
        return next(iter(ends.values()))
    return bundle({peer: ends[kind] for peer, kind in routes.items()}, list(ends.values()))


class _Bundle:
    """Several ends as one: some peers use one transport, the others another."""

    _peer: ClassVar[str]  # field of a message that names the peer of this side

    def __init__(self, by_peer: dict[int, Any], ends: list[Any]):
        """`by_peer` gives, for each rank or worker, the one of `ends` that serves it."""
        self._by_peer = by_peer
        self._ends = ends

    def _end(self, message: Message) -> Any:
        return self._by_peer[getattr(message, self._peer)]

    def _share(self, end: Any, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages that this end serves."""
        return [message for message in messages if self._end(message) is end]

    @property
    def staging_bytes(self) -> int:
        return sum(end.staging_bytes for end in self._ends)

    def begin(self, update: int) -> None:
        for end in self._ends:
            end.begin(update)

    def is_remote(self, message: Message) -> bool:
        return self._end(message).is_remote(message)

    def lasting(self, message: Message) -> bool:
        return self._end(message).lasting(message)

    def abandon(self) -> None:
        for end in self._ends:
            end.abandon()

    def close(self) -> None:
        for end in self._ends:
            end.close()


class _SenderBundle(_Bundle):
    """A SendingEnd made of several."""

    _peer = "worker"

    def slot(self, message: Message) -> Tensor:
        return self._end(message).slot(message)

    def post(self, message: Message) -> None:
        self._end(message).post(message)

    def wait(self, messages: Sequence[Message]) -> None:
        for end in self._ends:
            end.wait(self._share(end, messages))


class _ReceiverBundle(_Bundle):
    """A ReceivingEnd made of several."""

    _peer = "source"

    def ask(self, messages: Sequence[Message]) -> None:
        for end in self._ends:
            if share := self._share(end, messages):
                end.ask(share)

    def take(self, messages: Sequence[Message]) -> list[Tensor]:
        buffer_of: dict[int, Tensor] = {}  # by source
        for end in self._ends:
            if share := self._share(end, messages):
                buffer_of |= zip([message.source for message in share], end.take(share), strict=True)
        return [buffer_of[message.source] for message in messages]

    def release(self, messages: Sequence[Message]) -> None:
        for end in self._ends:
            if share := self._share(end, messages):
                end.release(share)
