"""The order in which both sides of a sync act. The transports execute it, and a simulation of every preset walks it.

A rank of TP1 PP2 that sends two rounds to worker 0 by device memory and to worker 1 by the network:

    slot   round 0 -> worker 0    waits until worker 0 grants room
    post   round 0 -> worker 0
    slot   round 0 -> worker 1
    post   round 0 -> worker 1    the first one of a pair waits until worker 1 asks for it
    ...                           round 1 in the same way
    wait   round 0 -> worker 1    before a third round on the network needs the buffer of the first

Worker 0, which receives from rank 0 by device memory in both rounds, and from rank 1 by the network in round 1 only:

    ask    round 0 <- rank 0      grants room
    ask    round 1 <- rank 0
    ask    round 1 <- rank 1      posts a receive: the first one of a pair waits until rank 1 sends
    take, release  round 0
    take, release  round 1

**Why this cannot deadlock**, though with NCCL and HCCL the first use of a pair waits for the peer, and a wait for one
message may wait for all that the device has begun. Order the messages by (round, worker, rank), and take the smallest
one that has not arrived, m. Its worker can only wait for m or for a later message. As it asks in this order, and for a
round as soon as it has taken all but one before it, it has asked for m, or it is asking for m now. The rank of m, too,
can only wait for m or for a later message. As it posts in this order, it has posted m, or it is posting m now. So m
arrives. This needs that a worker asks for at most one round ahead of the one that it takes, **counted over all
transports**, and for room in memory before it posts receives. Had it posted a receive for a later round, it could wait
there for a rank that waits for room, which this worker would grant only afterwards.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

AHEAD = 2  # rounds that are under way in one process: staging is double

Step = Literal["ask", "take", "release", "slot", "post", "wait"]


class Numbered(Protocol):
    """What the order depends on, of a message."""

    round: int
    source: int
    worker: int


M = TypeVar("M", bound=Numbered)


class SyncAction(NamedTuple):
    """One step, with the messages for which it is done."""

    step: Step
    messages: Sequence[Numbered]


def receiving(rounds: Sequence[Sequence[M]], is_remote: Callable[[M], bool]) -> Iterator[SyncAction]:
    """Yields the actions of a worker that receives these `rounds`, none of which is empty.

    `is_remote` tells whether a message goes through a communicator, not through shared memory.
    """
    for messages in rounds[:AHEAD]:
        yield from _asking(messages, is_remote)
    for number, messages in enumerate(rounds, AHEAD):
        yield SyncAction("take", messages)
        yield SyncAction("release", messages)
        if number < len(rounds):
            yield from _asking(rounds[number], is_remote)


def _asking(messages: Sequence[M], is_remote: Callable[[M], bool]) -> Iterator[SyncAction]:
    in_memory = [message for message in messages if not is_remote(message)]
    remote = [message for message in messages if is_remote(message)]
    for share in (in_memory, remote):  # granting room never waits
        if share:
            yield SyncAction("ask", share)


def sending(messages: Sequence[M], is_remote: Callable[[M], bool]) -> Iterator[SyncAction]:
    """Yields the actions of a rank that sends these `messages`, which are in the order of rounds, then workers."""
    in_memory: list[M] = []
    remote: list[list[M]] = []  # rounds on the network that are under way
    for message in messages:
        if not is_remote(message):
            in_memory.append(message)
        elif remote and remote[-1][0].round == message.round:
            remote[-1].append(message)
        else:
            if len(remote) == AHEAD:
                yield SyncAction("wait", remote.pop(0))
            remote.append([message])
        yield SyncAction("slot", [message])
        yield SyncAction("post", [message])
    for left in (in_memory, *remote):
        if left:
            yield SyncAction("wait", left)
