"""How messages travel: one protocol, and which transport serves which pair of rank and worker.

A sync is numbered (`update`), so that nothing of an earlier or an abandoned one can be taken for this one's. Staging is double: while the
receiver unpacks round r, the senders pack round r + 1. Every wait has a deadline and names the peer that did not move.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from mrl.errors import EnvironmentFault
from mrl.platforms.transfer import get_transfer
from mrl.reshard.messages import Message
from mrl.reshard.setup import SyncSetup

KINDS = ("auto", "shm", "p2p", "ipc")
_SPINS = 50
_NAP_S = 1e-4


class TransferError(RuntimeError):
    """A peer did not answer, gave up or sent what was not expected; the sync has to be done again from its first round."""


class SendingEnd(Protocol):
    """One rank's side."""

    staging_bytes: int  # held by this process

    def begin(self, update: int, messages: Sequence[Message]) -> None:
        """Starts a sync in which exactly `messages` are sent, in this order."""
        ...

    def slot(self, message: Message) -> Tensor:
        """Memory for the message, uint8 [nbytes], once the receiver has taken what was in it before. Raises TransferError."""
        ...

    def lasting(self, message: Message) -> bool:
        """Whether the message's slot lies in staging that is kept from sync to sync, not in memory made for this message."""
        ...

    def post(self, message: Message) -> None:
        """Hands over what was written into the slot."""
        ...

    def finish(self) -> None:
        """Waits until every message has been taken. Raises TransferError."""
        ...

    def abandon(self) -> None:
        """Tells the receivers that the rest will not come."""
        ...

    def close(self) -> None:
        """Gives memory and connections back. Safe to call twice."""
        ...


class ReceivingEnd(Protocol):
    """One worker's side."""

    staging_bytes: int

    def begin(self, update: int, rounds: Sequence[Sequence[Message]]) -> None:
        """Starts a sync that brings these messages, round by round (those without a message left out)."""
        ...

    def take(self, messages: Sequence[Message]) -> list[Tensor]:
        """The bytes of one round's messages, uint8 [nbytes] each, valid until `release`. Raises TransferError."""
        ...

    def lasting(self, message: Message) -> bool:
        """Whether the message's bytes lie in staging that is kept from sync to sync, not in memory made for this message."""
        ...

    def release(self, messages: Sequence[Message]) -> None:
        """Gives the round's memory back to the senders."""
        ...

    def abandon(self) -> None:
        """Tells the senders that no more is taken."""
        ...

    def close(self) -> None:
        """Gives memory and connections back. Safe to call twice."""
        ...


def wait_until(arrived: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Polls; sleeps between looks, because a core that waits is taken from a core that packs. Raises TransferError with `what`."""
    for _ in range(_SPINS):
        if arrived():
            return
    deadline = time.monotonic() + timeout_s
    while not arrived():
        if time.monotonic() > deadline:
            raise TransferError(f"{what} within {timeout_s:g} s")
        time.sleep(_NAP_S)


def route(setup: SyncSetup, rank: int, worker: int, shares_devices: bool) -> str:
    """Which transport serves the pair: "ipc" on one device, "shm" on one host, else "p2p"; a kind that is asked for must be possible.

    Raises EnvironmentFault for shm or ipc between hosts. `shares_devices`: processes can hand each other device memory; where they cannot,
    ipc goes through shared memory.
    """
    kind, one, other = setup.transport["kind"], setup.places.ranks[rank], setup.places.workers[worker]
    if kind == "p2p":
        return "p2p"
    if one.node != other.node:
        if kind != "auto":
            raise EnvironmentFault(f"reshard.transport: {kind} reaches no other host; rank {rank} and worker {worker} are on two; use auto")
        return "p2p"
    same_device = one == other or kind == "ipc"
    return "ipc" if same_device and shares_devices else "shm"


def open_sender(setup: SyncSetup, rank: int) -> SendingEnd:
    """The sending end of one rank. Meets its peers, so all ranks and workers open at the same time. Raises TransferError."""
    transfer = get_transfer(setup.dialect)
    routes = {w: route(setup, rank, w, transfer.shares_memory) for w in range(setup.rollout_layout.world_size)}
    return _joined(routes, lambda kind, peers: _ends(kind)[0](setup, rank, peers, transfer), SenderBundle)


def open_receiver(setup: SyncSetup, worker: int) -> ReceivingEnd:
    """The receiving end of one worker. Meets its peers, so all ranks and workers open at the same time. Raises TransferError."""
    transfer = get_transfer(setup.dialect)
    routes = {r: route(setup, r, worker, transfer.shares_memory) for r in range(setup.train_layout.world_size)}
    return _joined(routes, lambda kind, peers: _ends(kind)[1](setup, worker, peers, transfer), ReceiverBundle)


def _ends(kind: str) -> tuple[Callable, Callable]:
    if kind == "p2p":
        from mrl.reshard import transport_p2p

        return transport_p2p.PointToPointSender, transport_p2p.PointToPointReceiver
    if kind == "ipc":
        from mrl.reshard import transport_ipc

        return transport_ipc.DeviceSender, transport_ipc.DeviceReceiver
    from mrl.reshard import transport_shm

    return transport_shm.SharedMemorySender, transport_shm.SharedMemoryReceiver


def _joined(routes: dict[int, str], make: Callable, bundle: type):
    """One end per kind of route. Point-to-point comes last: its meeting waits for everybody."""
    ends = {}
    for kind in sorted(set(routes.values()), key=("shm", "ipc", "p2p").index):
        ends[kind] = make(kind, [peer for peer, of in routes.items() if of == kind])
    return next(iter(ends.values())) if len(ends) == 1 else bundle({peer: ends[kind] for peer, kind in routes.items()}, list(ends.values()))


class _Bundle:
    """Some peers by one transport, the others by another."""

    _peer: ClassVar[str]  # field of a message that names whom this side deals with

    def __init__(self, by_peer: dict[int, Any], ends: list[Any]):
        """`by_peer`: the one of `ends` that serves each rank or worker."""
        self._by_peer, self._ends = by_peer, ends

    def _end(self, message: Message) -> Any:
        return self._by_peer[getattr(message, self._peer)]

    def _shares(self, messages: Sequence[Message]) -> list[tuple[Any, list[Message]]]:
        """The messages of each end that has some."""
        shares = [(end, [m for m in messages if self._end(m) is end]) for end in self._ends]
        return [(end, share) for end, share in shares if share]

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


class SenderBundle(_Bundle):
    """A SendingEnd of several."""

    _peer = "worker"

    def begin(self, update: int, messages: Sequence[Message]) -> None:
        for end in self._ends:
            end.begin(update, [m for m in messages if self._end(m) is end])

    def slot(self, message: Message) -> Tensor:
        return self._end(message).slot(message)

    def post(self, message: Message) -> None:
        self._end(message).post(message)

    def finish(self) -> None:
        for end in self._ends:
            end.finish()


class ReceiverBundle(_Bundle):
    """A ReceivingEnd of several."""

    _peer = "source"

    def begin(self, update: int, rounds: Sequence[Sequence[Message]]) -> None:
        for end in self._ends:
            shares = ([m for m in messages if self._end(m) is end] for messages in rounds)
            end.begin(update, [share for share in shares if share])

    def take(self, messages: Sequence[Message]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for end, share in self._shares(messages):
            found |= zip([m.source for m in share], end.take(share), strict=True)
        return [found[m.source] for m in messages]

    def release(self, messages: Sequence[Message]) -> None:
        for end, share in self._shares(messages):
            end.release(share)
