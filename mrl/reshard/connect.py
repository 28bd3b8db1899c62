"""Opens both sides of a sync: a `Sender` and a `Receiver`, each over the transports that serve its peers."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mrl.platforms.hosting import get_hosting
from mrl.platforms.transfer import get_transfer
from mrl.reshard.digest import Merge, Shards
from mrl.reshard.execute import Receiver, Sender
from mrl.reshard.messages import Message
from mrl.reshard.setup import SyncSetup, route
from mrl.reshard.transport import ReceivingEnd, SendingEnd
from mrl.reshard.transport_p2p import PointToPointReceiver, PointToPointSender
from mrl.reshard.transport_shm import DeviceReceiver, DeviceSender, SharedMemoryReceiver, SharedMemorySender

# in the order in which they are opened: the meeting of point-to-point waits for everybody
_SENDERS = {"shm": SharedMemorySender, "ipc": DeviceSender, "p2p": PointToPointSender}
_RECEIVERS = {"shm": SharedMemoryReceiver, "ipc": DeviceReceiver, "p2p": PointToPointReceiver}


def connect_sender(setup: SyncSetup, rank: int, shards: Shards, merge: Merge | None = None) -> Sender:
    """Opens the rank's end and meets its workers, which do the same now. Raises TransferError.

    `merge`: of the rank's adapters, where it has some.
    """
    place = setup.places.ranks[rank]
    workers = setup.places.workers
    local = [worker for worker, other in enumerate(workers) if other == place]
    free_bytes = get_transfer(setup.dialect).free_bytes
    end = _open_sender(setup, rank)
    return Sender(setup.plan(), rank, shards, end, getattr(torch, setup.dtype), local, free_bytes, merge)


def connect_receiver(setup: SyncSetup, worker: int) -> Receiver:
    """Opens the worker's end and meets its ranks, which do the same now. Raises TransferError."""
    place = setup.places.workers[worker]
    ranks = setup.places.ranks
    local = [rank for rank, other in enumerate(ranks) if other == place]
    remote = [rank for rank, other in enumerate(ranks) if other.node != place.node]
    free_bytes = get_transfer(setup.dialect).free_bytes
    return Receiver(
        setup.plan(), worker, _open_receiver(setup, worker), getattr(torch, setup.dtype), local, remote, free_bytes
    )


def _open_sender(setup: SyncSetup, rank: int) -> SendingEnd:
    transfer = get_transfer(setup.dialect)
    reach = get_hosting(setup.dialect).memory_reach
    routes = {w: route(setup, rank, w, reach) for w in setup.workers}
    ends = {
        kind: _SENDERS[kind](setup, rank, _peers(routes, kind), transfer)
        for kind in _SENDERS
        if kind in routes.values()
    }
    return _one_end(ends, routes, _SenderBundle)


def _open_receiver(setup: SyncSetup, worker: int) -> ReceivingEnd:
    transfer = get_transfer(setup.dialect)
    reach = get_hosting(setup.dialect).memory_reach
    routes = {r: route(setup, r, worker, reach) for r in range(setup.train_layout.world_size)}
    ends = {
        kind: _RECEIVERS[kind](setup, worker, _peers(routes, kind), transfer)
        for kind in _RECEIVERS
        if kind in routes.values()
    }
    return _one_end(ends, routes, _ReceiverBundle)


def _peers(routes: dict[int, str], kind: str) -> list[int]:
    return [peer for peer, route_kind in routes.items() if route_kind == kind]


def _one_end(ends: dict[str, Any], routes: dict[int, str], bundle: type) -> Any:
    """The only end, or a bundle of several."""
    if len(ends) == 1:
        return next(iter(ends.values()))
    return bundle({peer: ends[kind] for peer, kind in routes.items()}, list(ends.values()))


class _Bundle:
    """Some peers by one transport, the others by another."""

    _peer: ClassVar[str]  # field of a message that names whom this side deals with

    def __init__(self, by_peer: dict[int, Any], ends: list[Any]):
        """`by_peer`: the one of `ends` that serves each rank or worker."""
        self._by_peer = by_peer
        self._ends = ends

    def _end(self, message: Message) -> Any:
        return self._by_peer[getattr(message, self._peer)]

    def _share(self, end: Any, messages: Sequence[Message]) -> list[Message]:
        """The messages that this end serves."""
        return [message for message in messages if self._end(message) is end]

    @property
    def staging_bytes(self) -> int:
        return sum(end.staging_bytes for end in self._ends)

    def lasting(self, message: Message) -> bool:
        return self._end(message).lasting(message)

    def abandon(self) -> None:
        for end in self._ends:
            end.abandon()

    def close(self) -> None:
        for end in self._ends:
            end.close()


class _SenderBundle(_Bundle):
    """A SendingEnd of several."""

    _peer = "worker"

    def begin(self, update: int, messages: Sequence[Message]) -> None:
        for end in self._ends:
            end.begin(update, self._share(end, messages))

    def slot(self, message: Message) -> Tensor:
        return self._end(message).slot(message)

    def post(self, message: Message) -> None:
        self._end(message).post(message)

    def finish(self) -> None:
        for end in self._ends:
            end.finish()


class _ReceiverBundle(_Bundle):
    """A ReceivingEnd of several."""

    _peer = "source"

    def begin(self, update: int, rounds: Sequence[Sequence[Message]]) -> None:
        for end in self._ends:
            shares = (self._share(end, messages) for messages in rounds)
            end.begin(update, [share for share in shares if share])

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
