"""Between data in shared memory and the word that speaks of it stands a fence, on both sides: an ARM host may reorder.

Accesses are written down as they are made: words of the arena, its data, fences.
"""

import numpy as np
import pytest
import torch
from reshard_world import setup_for

from mrl.platforms.transfer import CpuTransfer
from mrl.reshard import transport_shm
from mrl.reshard.transport import received_rounds
from mrl.reshard.transport_shm import SharedMemoryReceiver, SharedMemorySender

WORDS = {
    transport_shm._GRANTED: "granted", transport_shm._OFFSET: "offset", transport_shm._NBYTES: "nbytes",
    transport_shm._READY: "ready", transport_shm._PLAN: "plan",
}  # fmt: skip


class Seen(np.ndarray):
    """Words that say how they are accessed; the last index is the word's."""

    events: list

    def __array_finalize__(self, other):
        self.events = getattr(other, "events", None)

    def _note(self, how, index):
        places = index if isinstance(index, tuple) else (index,)
        is_of_a_word = len(places) == self.ndim and self.shape[-1] == transport_shm._WORDS
        if is_of_a_word and isinstance(places[-1], int):
            self.events.append(f"{how} {WORDS[places[-1]]}")

    def __getitem__(self, index):
        self._note("read", index)
        return super().__getitem__(index)

    def __setitem__(self, index, value):
        self._note("write", index)
        super().__setitem__(index, value)


class SeenData:
    """The receiver's data that says when it is read."""

    device = torch.device("cpu")

    def __init__(self, data, events):
        self._data, self._events = data, events

    def __getitem__(self, index):
        self._events.append("read data")
        return self._data[index]


class Sides:
    """One rank and one worker with an arena, connected."""

    def __init__(self, monkeypatch):
        self.events = []
        setup = setup_for({"world_size": 1}, {})
        self.receiver = SharedMemoryReceiver(setup, 0, [0], CpuTransfer())
        self.sender = SharedMemorySender(setup, 0, [0], CpuTransfer())
        self.rounds = received_rounds(setup.plan(), 0, [0])
        monkeypatch.setattr(transport_shm, "memory_fence", lambda: self.events.append("fence"))
        for arena in (self.receiver._arena, self.sender._arenas[0]):
            arena.words = arena.words.view(Seen)
            arena.words.events = self.events
        self.receiver._arena.data = SeenData(self.receiver._arena.data, self.events)

    def of(self, call):
        """What is accessed by a call, in order."""
        self.events.clear()
        call()
        return list(self.events)


@pytest.fixture
def sides(monkeypatch):
    sides = Sides(monkeypatch)
    yield sides
    sides.sender.close()
    sides.receiver.close()


def in_order(events, *wanted):
    """Whether the last `wanted[0]` comes before some `wanted[1]`, that before the first `wanted[2]`."""
    before, fence, after = wanted
    last = len(events) - 1 - events[::-1].index(before)
    return fence in events[last : events.index(after, last)]


def test_a_message_is_fenced_at_every_word_of_its_way(sides):
    (first, *_), *_ = sides.rounds
    sides.sender.begin(1)
    sides.receiver.begin(1)
    granting = sides.of(lambda: sides.receiver.ask(sides.rounds[0]))
    for word in ("offset", "nbytes", "ready", "plan"):
        assert in_order(granting[: granting.index("write granted") + 1], f"write {word}", "fence", "write granted")

    slots = []
    granted = sides.of(lambda: slots.append(sides.sender.slot(first)))
    seen = granted.index("read granted")
    for word in ("nbytes", "plan", "offset"):
        assert "fence" in granted[seen : granted.index(f"read {word}")]

    def send():
        slots[0].fill_(5)
        sides.events.append("write data")
        sides.sender.post(first)

    assert in_order(sides.of(send), "write data", "fence", "write ready")

    taken = sides.of(lambda: slots.extend(sides.receiver.take([first])))
    seen = taken.index("read ready")
    for access in ("read nbytes", "read plan", "read offset", "read data"):
        assert "fence" in taken[seen : taken.index(access)]
    assert slots[1].eq(5).all() and len(slots[1]) == first.nbytes

    def release():
        sides.events.append("read data")
        sides.receiver.release([first])

    assert in_order(sides.of(release), "read data", "fence", "write granted")


def test_the_accesses_are_seen(sides):
    """The test above would say nothing if they were not."""
    sides.sender.begin(1)
    sides.receiver.begin(1)
    for messages in sides.rounds:
        sides.receiver.ask(messages)
        for message in messages:
            sides.sender.slot(message)
            sides.sender.post(message)
        sides.receiver.take(messages)
        sides.receiver.release(messages)
    counted = {event: sides.events.count(event) for event in sides.events}
    messages = sum(map(len, sides.rounds))
    assert messages > 2
    assert counted["write ready"] == 2 * messages and counted["read data"] == messages
    assert counted["write granted"] == 2 * messages and counted["read granted"] >= messages
