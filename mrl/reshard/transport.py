"""How messages travel: the protocol of both ends, and what all transports share.

A sync is numbered (`update`), so that a message of an earlier sync is never mistaken for a new one. Staging is double:
while the receiver unpacks round r, the senders pack round r + 1. Every wait has a deadline and names the peer that did
not answer. setup.py says which transport serves which pair. connect.py opens the ends.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from mrl.reshard.messages import Message, by_round
from mrl.reshard.plan import ReshardPlan
from mrl.reshard.setup import SyncSetup
from mrl.units import round_up

_SPINS = 50
_NAP_S = 1e-4
_CHECK_S = 0.25
_ALIGN = 64  # bytes: a cache line


class TransferError(RuntimeError):
    """A peer did not answer, gave up or sent something unexpected. The sync must be repeated from its first round."""


class SendingEnd(Protocol):
    """The sending side of one rank."""

    staging_bytes: int  # held by this process

    def begin(self, update: int) -> None:
        """Starts a sync. The order of what follows is that of mrl.reshard.actions.sending."""

    def is_remote(self, message: Message) -> bool:
        """Tells whether the message goes through a communicator, not through shared memory."""

    def slot(self, message: Message) -> Tensor:
        """Returns memory for the message, uint8 [nbytes], after the receiver has taken its former content.

        Raises TransferError.
        """

    def lasting(self, message: Message) -> bool:
        """Tells whether the slot is in staging that is kept between syncs, not in memory made for this message."""

    def post(self, message: Message) -> None:
        """Hands over what was written into the slot."""

    def wait(self, messages: Sequence[Message]) -> None:
        """Waits until these messages, which were posted, have been taken. Raises TransferError."""

    def abandon(self) -> None:
        """Tells the receivers that the rest will not come."""

    def close(self) -> None:
        """Releases memory and connections. Safe to call twice."""


class SendingLinks(Protocol):
    """The sending side of one rank over all of its connections, one for each engine. See SendingEnd for the rest."""

    staging_bytes: int
    workers: set[int]  # that have a connection

    def open(self, setup: SyncSetup, check_wanted: Callable[[], None]) -> None:
        """Connects to the workers of this connection, which open their ends now, in place of former ends.

        `check_wanted` is called while it waits, and raises once nobody wants this connection any more. Raises
        TransferError.
        """

    def drop(self, workers: Collection[int]) -> None:
        """Closes the ends of these workers."""

    def begin(self, update: int, workers: Collection[int]) -> None:
        """Starts a sync of these workers. The others' connections have no part in it, also where it fails."""

    def is_remote(self, message: Message) -> bool: ...

    def slot(self, message: Message) -> Tensor: ...

    def lasting(self, message: Message) -> bool: ...

    def post(self, message: Message) -> None: ...

    def wait(self, messages: Sequence[Message]) -> None: ...

    def abandon(self) -> None: ...

    def close(self) -> None: ...


class ReceivingEnd(Protocol):
    """The receiving side of one worker."""

    staging_bytes: int

    def begin(self, update: int) -> None:
        """Starts a sync. The order of what follows is that of mrl.reshard.actions.receiving."""

    def is_remote(self, message: Message) -> bool:
        """Tells whether the message goes through a communicator, not through shared memory."""

    def ask(self, messages: Sequence[Message]) -> None:
        """Lets the senders of one round's messages go on: grants them room, or posts receives."""

    def take(self, messages: Sequence[Message]) -> list[Tensor]:
        """Returns the bytes of one round's messages, uint8 [nbytes] each, valid until `release`.

        Raises TransferError.
        """

    def lasting(self, message: Message) -> bool:
        """Tells whether the bytes are in staging that is kept between syncs, not in memory made for this message."""

    def release(self, messages: Sequence[Message]) -> None:
        """Gives the round's memory back to the senders."""

    def abandon(self) -> None:
        """Tells the senders that no more will be taken."""

    def close(self) -> None:
        """Releases memory and connections. Safe to call twice."""


def wait_until(
    arrived: Callable[[], bool], timeout_s: float, what: str, check_peer: Callable[[], None] = lambda: None
) -> None:
    """Polls until `arrived`. Sleeps between polls, because a waiting core is taken from a packing one.

    Calls `check_peer` a few times a second. It raises when nothing will arrive any more. Raises TransferError with
    `what`.
    """
    for _ in range(_SPINS):
        if arrived():
            return
    began = time.monotonic()
    checked = began
    while not arrived():
        now = time.monotonic()
        if now > began + timeout_s:
            raise TransferError(f"{what} within {timeout_s:g} s")
        if now > checked + _CHECK_S:
            checked = now
            check_peer()
        time.sleep(_NAP_S)


def run_steps(steps: Iterator[str], timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
    """Runs steps that may block inside torch, where no deadline reaches them, in a thread of their own.

    Before each, `steps` yields what has not happened if it never ends. `check` is called a few times a second, and
    raises when nobody wants the result any more. Raises TransferError for a step of more than `timeout_s`. Its thread
    is then left behind.
    """
    state: dict[str, Any] = {"what": "", "began": time.monotonic()}
    ended = threading.Event()

    def run() -> None:
        try:
            for what in steps:
                state.update(what=what, began=time.monotonic())
        except Exception as error:
            state["error"] = error
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    while not ended.wait(_CHECK_S):
        check()
        if time.monotonic() > state["began"] + timeout_s:
            raise TransferError(f"{state['what']} within {timeout_s:g} s")
    if "error" in state:
        raise state["error"]


def sequence_number(update: int, message: Message) -> int:
    """Returns a number that no other round of any sync has."""
    return update << 24 | (message.round + 1)


def plan_tag(plan: ReshardPlan) -> int:
    """Returns the first 60 bits of the plan's hash, which travel with every message."""
    return int(plan.hash[:15], 16)


def aligned(nbytes: int) -> int:
    """Rounds up, so that every message begins on a cache line."""
    return round_up(nbytes, _ALIGN)


def received_rounds(plan: ReshardPlan, worker: int, ranks: Collection[int]) -> list[list[Message]]:
    """Returns what a worker receives from `ranks`, round by round, without empty rounds."""
    return by_round(message for message in plan.receives(worker) if message.source in ranks)


def largest_round(rounds: Sequence[Sequence[Message]], header_bytes: int = 0) -> int:
    """Returns the staging bytes of the largest round. `header_bytes` precede each message."""
    return max((sum(aligned(header_bytes + message.nbytes) for message in messages) for messages in rounds), default=0)
