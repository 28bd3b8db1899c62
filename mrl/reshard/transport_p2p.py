"""torch.distributed point-to-point between hosts, over a process group of its own: neither Megatron's groups nor vLLM's are touched.

Members are the ranks and workers that have a peer on another host (or all of them, when this transport was asked for), ranks first. Each
message travels behind a header of four words that the receiver checks. Sender and receiver each hold two buffers of one round.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.platforms.transfer import Transfer
from mrl.reshard.messages import Message
from mrl.reshard.setup import SyncSetup
from mrl.reshard.transport import TransferError, route
from mrl.reshard.transport_shm import aligned, plan_word, received_rounds, sequence

_HEADER = 64  # bytes; four int64 words, and a message that begins on a cache line
_TAGS = 1 << 30


def members(setup: SyncSetup) -> list[tuple[str, int]]:
    """("rank", r) and ("worker", w) of everybody in the group, in the group's order."""
    ranks, workers = range(setup.train_layout.world_size), range(setup.rollout_layout.world_size)
    pairs = [(r, w) for r in ranks for w in workers if route(setup, r, w, False) == "p2p"]
    return [("rank", r) for r in sorted({r for r, _ in pairs})] + [("worker", w) for w in sorted({w for _, w in pairs})]


class _Group:
    """The process group, and what both ends do with it."""

    def __init__(self, setup: SyncSetup, me: tuple[str, int], transfer: Transfer):
        self._members = members(setup)
        self._me = f"{me[0]} {me[1]}"
        self._timeout = timedelta(seconds=setup.timeout_s)
        host, _, port = setup.transport["address"].rpartition(":")
        number = self._members.index(me)
        try:
            store = dist.TCPStore(host, int(port), len(self._members), number == 0, self._timeout, wait_for_workers=False)
            store = dist.PrefixStore(setup.transport["name"], store)
            self.group = transfer.point_to_point_group(store, number, len(self._members), setup.timeout_s, host)
        except (RuntimeError, ValueError) as error:
            raise TransferError(f"{self._me} did not meet the other {len(self._members) - 1} at {host}:{port}: {error}") from error

    def number(self, side: str, index: int) -> int:
        return self._members.index((side, index))

    def wait(self, work: dist.Work, what: str) -> None:
        try:
            finished = work.wait(self._timeout)
        except RuntimeError as error:
            raise TransferError(f"{what}: {error}") from error
        if not finished:
            raise TransferError(f"{what}: not within {self._timeout.total_seconds():g} s")

    def abort(self) -> None:
        self.group.abort()


def _header(update: int, message: Message, plan: int) -> list[int]:
    return [sequence(update, message), message.nbytes, plan, message.source]


def _tag(update: int, message: Message) -> int:
    return sequence(update, message) % _TAGS


class PointToPointSender:
    """Two buffers of the rank's largest round. See mrl.reshard.transport.SendingEnd."""

    def __init__(self, setup: SyncSetup, rank: int, workers: Sequence[int], transfer: Transfer):
        plan = setup.plan()
        self._rank, self._plan_word, self._update = rank, plan_word(plan), 0
        half = _largest_round([m for m in plan.sends(rank) if m.worker in set(workers)])
        self._buffers = [torch.empty(half, dtype=torch.uint8, device=transfer.device) for _ in range(2)]
        self.staging_bytes = 2 * half
        self._joined = _Group(setup, ("rank", rank), transfer)

    def begin(self, update: int, messages: Sequence[Message]) -> None:
        self._update = update
        self._under_way: list[list[tuple[dist.Work, Message]]] = [[], []]
        self._order = {number: position for position, number in enumerate(dict.fromkeys(m.round for m in messages))}
        self._at = -1, 0  # round that is being packed, and bytes of its buffer in use
        self._place: dict[int, Tensor] = {}

    def slot(self, message: Message) -> Tensor:
        half = self._order[message.round] % 2
        if self._at[0] != message.round:
            self._drain(half)
            self._at = message.round, 0
        size = _HEADER + message.nbytes
        whole = self._buffers[half][self._at[1] : self._at[1] + size]
        self._at = message.round, self._at[1] + aligned(size)
        self._place[message.worker] = whole
        return whole[_HEADER:]

    def lasting(self, message: Message) -> bool:
        return True

    def post(self, message: Message) -> None:
        whole = self._place.pop(message.worker)
        words = torch.tensor(_header(self._update, message, self._plan_word), dtype=torch.int64)
        whole[:32].view(torch.int64).copy_(words)
        work = self._joined.group.send([whole], self._joined.number("worker", message.worker), _tag(self._update, message))
        self._under_way[self._order[message.round] % 2].append((work, message))

    def _drain(self, half: int) -> None:
        for work, message in self._under_way[half]:
            self._joined.wait(
                work, f"rank {self._rank}: worker {message.worker} did not take round {message.round} of update {self._update}"
            )
        self._under_way[half] = []

    def finish(self) -> None:
        self._drain(0)
        self._drain(1)

    def abandon(self) -> None:
        self._joined.abort()

    def close(self) -> None:
        self._buffers = []
        self._joined.abort()


class PointToPointReceiver:
    """Two buffers of the worker's largest round, each asked for before it is needed. See mrl.reshard.transport.ReceivingEnd."""

    def __init__(self, setup: SyncSetup, worker: int, ranks: Sequence[int], transfer: Transfer):
        plan = setup.plan()
        self._worker, self._plan_word, self._update = worker, plan_word(plan), 0
        half = max((_padded(messages) for messages in received_rounds(plan, worker, ranks)), default=0)
        self._buffers = [torch.empty(half, dtype=torch.uint8, device=transfer.device) for _ in range(2)]
        self.staging_bytes = 2 * half
        self._joined = _Group(setup, ("worker", worker), transfer)

    def begin(self, update: int, rounds: Sequence[Sequence[Message]]) -> None:
        self._update, self._rounds, self._asked = update, list(rounds), 0
        self._coming: dict[tuple[int, int], tuple[dist.Work, Tensor]] = {}
        self._ask()
        self._ask()

    def _ask(self) -> None:
        if self._asked == len(self._rounds):
            return
        at, buffer = 0, self._buffers[self._asked % 2]
        for message in self._rounds[self._asked]:
            whole = buffer[at : at + _HEADER + message.nbytes]
            work = self._joined.group.recv([whole], self._joined.number("rank", message.source), _tag(self._update, message))
            self._coming[message.round, message.source] = work, whole
            at += aligned(whole.numel())
        self._asked += 1

    def take(self, messages: Sequence[Message]) -> list[Tensor]:
        return [self._take(message) for message in messages]

    def _take(self, message: Message) -> Tensor:
        work, whole = self._coming.pop((message.round, message.source))
        who = f"rank {message.source}, round {message.round} of update {self._update} for worker {self._worker}"
        self._joined.wait(work, f"{who}: nothing came")
        found, wanted = whole[:32].view(torch.int64).tolist(), _header(self._update, message, self._plan_word)
        if found != wanted:
            raise TransferError(f"{who}: not the message that the plan has there (number, bytes, plan, rank {found}, not {wanted})")
        return whole[_HEADER:]

    def lasting(self, message: Message) -> bool:
        return True

    def release(self, messages: Sequence[Message]) -> None:
        self._ask()

    def abandon(self) -> None:
        self._joined.abort()

    def close(self) -> None:
        self._buffers = []
        self._joined.abort()


def _largest_round(messages: Sequence[Message]) -> int:
    rounds: dict[int, list[Message]] = {}
    for message in messages:
        rounds.setdefault(message.round, []).append(message)
    return max((_padded(of_round) for of_round in rounds.values()), default=0)


def _padded(messages: Sequence[Message]) -> int:
    return sum(aligned(_HEADER + message.nbytes) for message in messages)
