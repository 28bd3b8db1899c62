"""Opens both sides of a sync: a `Sender` and a `Receiver`, each over the transports that reach its peers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mrl.platforms.hosting import get_hosting
from mrl.platforms.transfer import Transfer, get_transfer
from mrl.reshard.copies import warm_up
from mrl.reshard.digest import Merge, Shards, partial_digests
from mrl.reshard.execute import Receiver, Sender
from mrl.reshard.messages import Message
from mrl.reshard.setup import SyncSetup, route
from mrl.reshard.transport import ReceivingEnd, SendingEnd
from mrl.reshard.transport_p2p import PointToPointReceiver, PointToPointSender, SendStaging
from mrl.reshard.transport_shm import DeviceReceiver, DeviceSender, SharedMemoryReceiver, SharedMemorySender

_ORDER = ("shm", "ipc", "p2p")  # of opening: point-to-point waits for all peers
_SENDERS = {"shm": SharedMemorySender, "ipc": DeviceSender}
_RECEIVERS = {"shm": SharedMemoryReceiver, "ipc": DeviceReceiver, "p2p": PointToPointReceiver}


def open_sender(setup: SyncSetup, rank: int, shards: Shards, merge: Merge | None = None) -> Sender:
    """Makes the rank's end, which has no connection yet. `merge` merges the rank's adapters, where it has any."""
    device = setup.devices.ranks[rank]
    local = [worker for worker, other in enumerate(setup.devices.workers) if other == device]
    transfer = get_transfer(setup.dialect)
    dtype = getattr(torch, setup.dtype)
    links = SenderLinks(setup, rank, transfer)
    sender = Sender(setup.plan(), rank, shards, links, dtype, local, transfer.free_bytes, merge)
    if transfer.loads_kernels_lazily:
        sender.warm_up()
    return sender


def connect_sender(
    setup: SyncSetup,
    rank: int,
    shards: Shards,
    merge: Merge | None = None,
    check_wanted: Callable[[], None] = lambda: None,
) -> Sender:
    """Makes the rank's end and connects it, as `Sender.connect` does."""
    sender = open_sender(setup, rank, shards, merge)
    try:
        sender.connect(setup, check_wanted)
    except BaseException:
        sender.close()
        raise
    return sender


def connect_receiver(setup: SyncSetup, worker: int) -> Receiver:
    """Opens the worker's end and connects to its ranks, which open theirs now. Raises TransferError."""
    device = setup.devices.workers[worker]
    ranks = setup.devices.ranks
    local = [rank for rank, other in enumerate(ranks) if other == device]
    remote = [rank for rank, other in enumerate(ranks) if other.node != device.node]
    transfer = get_transfer(setup.dialect)
    dtype = getattr(torch, setup.dtype)
    if transfer.loads_kernels_lazily:
        warm_up(dtype, transfer.device)
        partial_digests([torch.zeros(64, 64, dtype=dtype, device=transfer.device)], ["nothing"], (0, 0), dtype)
    return Receiver(setup.plan(), worker, _open_receiver(setup, worker), dtype, local, remote, transfer.free_bytes)


def _open_receiver(setup: SyncSetup, worker: int) -> ReceivingEnd:
    transfer = get_transfer(setup.dialect)
    reach = get_hosting(setup.dialect).memory_reach
    routes = {r: route(setup, r, worker, reach) for r in range(setup.train_layout.world_size)}
    ends = _opened(routes, lambda kind, peers: _RECEIVERS[kind](setup, worker, peers, transfer))
    if len(ends) == 1:
        return next(iter(ends.values()))
    return _ReceiverBundle({peer: ends[kind] for peer, kind in routes.items()}, list(ends.values()))


def _opened(routes: Mapping[int, str], open_end: Callable[[str, list[int]], Any]) -> dict[str, Any]:
    """Opens an end for each transport of `routes` (peer -> transport). Returns them by transport."""
    ends: dict[str, Any] = {}
    try:
        for kind in _ORDER:
            if peers := [peer for peer, route_kind in routes.items() if route_kind == kind]:
                ends[kind] = open_end(kind, peers)
    except BaseException:  # nobody else has those that are open
        for end in ends.values():
            end.close()
        raise
    return ends


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


class SenderLinks(_Bundle):
    """The SendingLinks of a rank. Each connection is opened and closed without the others."""

    _peer = "worker"

    def __init__(self, setup: SyncSetup, rank: int, transfer: Transfer):
        """`setup`: of any connection, as it is the plan and the places that count here."""
        super().__init__({}, [])
        reach = get_hosting(setup.dialect).memory_reach
        workers = range(setup.rollout_layout.world_size)
        self._routes = {worker: route(setup, rank, worker, reach) for worker in workers}
        self._rank = rank
        self._transfer = transfer
        remote = {worker for worker, kind in self._routes.items() if kind == "p2p"}
        self._staging = SendStaging(setup, rank, remote, transfer)
        self._in_use: list[SendingEnd] = []  # by the sync that was begun last

    def open(self, setup: SyncSetup, check_wanted: Callable[[], None]) -> None:
        self.drop(setup.workers)
        routes = {worker: self._routes[worker] for worker in setup.workers}

        def open_end(kind: str, peers: list[int]) -> SendingEnd:
            if kind == "p2p":
                return PointToPointSender(setup, self._rank, peers, self._transfer, check_wanted, self._staging)
            return _SENDERS[kind](setup, self._rank, peers, self._transfer, check_wanted)

        ends = _opened(routes, open_end)
        self._ends += ends.values()
        self._by_peer |= {worker: ends[kind] for worker, kind in routes.items()}

    def drop(self, workers: Collection[int]) -> None:
        gone = {id(end): end for worker, end in self._by_peer.items() if worker in workers}
        self._by_peer = {worker: end for worker, end in self._by_peer.items() if id(end) not in gone}
        for ends in (self._ends, self._in_use):
            ends[:] = [end for end in ends if id(end) not in gone]
        for end in gone.values():
            end.close()

    @property
    def workers(self) -> set[int]:
        return set(self._by_peer)

    @property
    def staging_bytes(self) -> int:
        return self._staging.nbytes + super().staging_bytes

    def begin(self, update: int, workers: Collection[int]) -> None:
        self._in_use = list({id(end): end for worker, end in self._by_peer.items() if worker in workers}.values())
        for end in self._in_use:
            end.begin(update)

    def slot(self, message: Message) -> Tensor:
        return self._end(message).slot(message)

    def post(self, message: Message) -> None:
        self._end(message).post(message)

    def wait(self, messages: Sequence[Message]) -> None:
        for end in self._in_use:
            end.wait(self._share(end, messages))

    def abandon(self) -> None:
        for end in self._in_use:
            end.abandon()

    def close(self) -> None:
        super().close()
        self._staging.close()


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
