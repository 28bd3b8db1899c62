"""torch.distributed point-to-point between hosts, over a process group that neither trainer nor engine uses.

Members are the workers of one engine and their ranks: those with a peer on another host, or all if this transport was
requested. Ranks come first. So an engine that starts again costs the others nothing: its group alone is made anew. A
header of four words precedes each message, and the receiver checks it. Sender and receiver hold two buffers of one
round each, the sender for all of its groups together.

With NCCL and HCCL each pair has a communicator of its own, which the first message makes. It takes a good part of a
second, and waits for the peer without a deadline. So each pair exchanges a greeting, a message without weights, while
they connect: in the order of a sync's actions, where the round is the rank's number, and watched by another thread.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.platforms.transfer import Transfer
from mrl.reshard.actions import receiving, sending
from mrl.reshard.messages import Message, by_round
from mrl.reshard.setup import SyncSetup, p2p_members
from mrl.reshard.transport import (
    TransferError,
    aligned,
    largest_round,
    plan_tag,
    received_rounds,
    run_steps,
    sequence_number,
    wait_until,
)

_HEADER = 64  # bytes, so that the message after it begins on a cache line
_HEADER_WORDS = 4 * 8  # bytes of it that are used: four int64
_TAGS = 1 << 30
_GREETINGS = 0  # as the number of an update


class _Group:
    """The process group, and what both ends do with it."""

    def __init__(self, setup: SyncSetup, me: tuple[str, int], transfer: Transfer):
        self._members = p2p_members(setup)
        self._me = f"{me[0]} {me[1]}"
        self._transfer = transfer
        self._timeout_s = setup.timeout_s
        host, _, port = setup.transport["address"].rpartition(":")
        number = self._members.index(me)
        size = len(self._members)
        try:
            store = dist.TCPStore(
                host, int(port), size, number == 0, timedelta(seconds=setup.timeout_s), wait_for_workers=False
            )
            store = dist.PrefixStore(setup.transport["name"], store)
            self.process_group = transfer.point_to_point_group(store, number, size, setup.timeout_s, host)
        except (RuntimeError, ValueError) as error:
            raise TransferError(
                f"{self._me} did not connect to the other {size - 1} at {host}:{port}: {error}"
            ) from error

    def number(self, side: str, index: int) -> int:
        return self._members.index((side, index))

    def meet(self, steps: Iterator[str], check_wanted: Callable[[], None] = lambda: None) -> None:
        """Exchanges greetings. Raises TransferError."""
        choose_device = self._transfer.device_for_thread()

        def on_own_device() -> Iterator[str]:
            choose_device()
            yield from steps

        try:
            run_steps(on_own_device(), self._timeout_s, check_wanted)
        except BaseException:
            self.abort()
            raise

    def wait(self, work: dist.Work, what: str) -> None:
        try:
            finished = self._transfer.wait(work, self._timeout_s)
        except RuntimeError as error:
            raise TransferError(f"{what}: {error}") from error
        if not finished:
            raise TransferError(f"{what}: not within {self._timeout_s:g} s")
        wait_until(self._transfer.mark(), self._timeout_s, what)

    def abort(self) -> None:
        self._transfer.abort(self.process_group)


def _header(update: int, message: Message, plan: int) -> list[int]:
    return [sequence_number(update, message), message.nbytes, plan, message.source]


def _tag(update: int, message: Message) -> int:
    return sequence_number(update, message) % _TAGS


def _greeting(rank: int, worker: int) -> Message:
    return Message(rank, rank, worker, (), 0)


class SendStaging:
    """Two buffers of a rank's largest round on the network, which all of its groups use."""

    def __init__(self, setup: SyncSetup, rank: int, workers: Collection[int], transfer: Transfer):
        """`workers` are all that it will ever reach over the network."""
        messages = [message for message in setup.plan().sends(rank) if message.worker in workers]
        greetings = [_greeting(rank, worker) for worker in sorted({message.worker for message in messages})]
        half = largest_round([*by_round(messages), greetings], _HEADER)
        self._buffers = [torch.empty(half, dtype=torch.uint8, device=transfer.device) for _ in range(2)]
        self.nbytes = 2 * half
        self.begin()

    def begin(self) -> None:
        """Starts a sync."""
        self._packing = -1  # round
        self._half = 0  # of the buffers, where it is packed
        self._used = 0  # bytes of that half

    def slot(self, message: Message) -> Tensor:
        """Returns memory for the message and its header."""
        if self._packing != message.round:
            self._packing = message.round
            self._half = 1 - self._half
            self._used = 0
        size = _HEADER + message.nbytes
        slot = self._buffers[self._half][self._used : self._used + size]
        self._used += aligned(size)
        return slot

    def close(self) -> None:
        """Releases the memory."""
        self._buffers = []


class PointToPointSender:
    """A SendingEnd in the rank's staging."""

    staging_bytes = 0  # counted once, for all groups

    def __init__(
        self,
        setup: SyncSetup,
        rank: int,
        workers: Sequence[int],
        transfer: Transfer,
        check_wanted: Callable[[], None],
        staging: SendStaging,
    ):
        check_wanted()  # once: the group waits for its members inside torch
        plan = setup.plan()
        self._rank = rank
        self._plan_tag = plan_tag(plan)
        self._update = 0
        self._staging = staging
        peers = sorted({message.worker for message in plan.sends(rank)} & set(workers))
        greetings = [_greeting(rank, worker) for worker in peers]
        self._group = _Group(setup, ("rank", rank), transfer)
        self._group.meet(self._greet(greetings), check_wanted)

    def _greet(self, greetings: Sequence[Message]) -> Iterator[str]:
        """Makes the communicators. Says before each step what would not have happened."""
        self.begin(_GREETINGS)
        for step, (message, *others) in sending(greetings, self.is_remote):
            yield f"rank {self._rank} did not connect to worker {message.worker}"
            if step == "slot":
                self.slot(message)
            elif step == "post":
                self.post(message)
            else:
                self.wait([message, *others])

    def begin(self, update: int) -> None:
        self._update = update
        # by round and worker, with the header, which lives until it has been sent
        self._under_way: dict[tuple[int, int], list[tuple[dist.Work, Tensor]]] = {}
        self._staging.begin()
        self._slots: dict[int, Tensor] = {}  # by worker, headers included

    def is_remote(self, message: Message) -> bool:
        return True

    def slot(self, message: Message) -> Tensor:
        self._slots[message.worker] = slot = self._staging.slot(message)
        return slot[_HEADER:]

    def lasting(self, message: Message) -> bool:
        return True

    def post(self, message: Message) -> None:
        slot = self._slots.pop(message.worker)
        words = torch.tensor(_header(self._update, message, self._plan_tag), dtype=torch.int64)
        slot[:_HEADER_WORDS].view(torch.int64).copy_(words, non_blocking=True)
        work = self._group.process_group.send(
            [slot], self._group.number("worker", message.worker), _tag(self._update, message)
        )
        self._under_way.setdefault((message.round, message.worker), []).append((work, words))

    def wait(self, messages: Sequence[Message]) -> None:
        for message in messages:
            who = f"rank {self._rank}: worker {message.worker} did not take round {message.round}"
            for work, _ in self._under_way.pop((message.round, message.worker), ()):
                self._group.wait(work, f"{who} of update {self._update}")

    def abandon(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.abort()


class PointToPointReceiver:
    """A ReceivingEnd with two buffers of the worker's largest round."""

    def __init__(self, setup: SyncSetup, worker: int, ranks: Sequence[int], transfer: Transfer):
        plan = setup.plan()
        self._worker = worker
        self._plan_tag = plan_tag(plan)
        self._update = 0
        half = largest_round(received_rounds(plan, worker, ranks), _HEADER)
        self._buffers = [torch.empty(half, dtype=torch.uint8, device=transfer.device) for _ in range(2)]
        self.staging_bytes = 2 * half
        self._group = _Group(setup, ("worker", worker), transfer)
        senders = {message.source for message in plan.receives(worker)} & set(ranks)
        self._group.meet(self._greet(sorted(senders)))

    def _greet(self, ranks: Iterable[int]) -> Iterator[str]:
        """Makes the communicators. Says before each step what would not have happened."""
        self.begin(_GREETINGS)
        for step, messages in receiving([[_greeting(rank, self._worker)] for rank in ranks], self.is_remote):
            yield f"worker {self._worker} did not connect to rank {messages[0].source}"
            if step == "ask":
                self.ask(messages)
            elif step == "take":
                self.take(messages)
            else:
                self.release(messages)

    def begin(self, update: int) -> None:
        self._update = update
        self._half = 0  # of the buffers, for the next round
        self._coming: dict[tuple[int, int], tuple[dist.Work, Tensor]] = {}

    def is_remote(self, message: Message) -> bool:
        return True

    def ask(self, messages: Sequence[Message]) -> None:
        offset = 0
        buffer = self._buffers[self._half]
        for message in messages:
            slot = buffer[offset : offset + _HEADER + message.nbytes]
            work = self._group.process_group.recv(
                [slot], self._group.number("rank", message.source), _tag(self._update, message)
            )
            self._coming[message.round, message.source] = work, slot
            offset += aligned(slot.numel())
        self._half = 1 - self._half

    def take(self, messages: Sequence[Message]) -> list[Tensor]:
        return [self._take(message) for message in messages]

    def _take(self, message: Message) -> Tensor:
        work, slot = self._coming.pop((message.round, message.source))
        who = f"rank {message.source}, round {message.round} of update {self._update} for worker {self._worker}"
        self._group.wait(work, f"{who}: nothing came")
        arrived = slot[:_HEADER_WORDS].view(torch.int64).tolist()
        wanted = _header(self._update, message, self._plan_tag)
        if arrived != wanted:
            raise TransferError(
                f"{who}: not the message that the plan expects (number, bytes, plan, rank {arrived}, not {wanted})"
            )
        return slot[_HEADER:]

    def lasting(self, message: Message) -> bool:
        return True

    def release(self, messages: Sequence[Message]) -> None:
        pass  # the buffer is written again only after the next `ask`

    def abandon(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._buffers = []
        self._group.abort()
