"""Holds finished responses in an engine's process until the driver knows of them and has taken their blocks.

    calls                            Outbox                                    driver
    responses as they finish  -->    held, a hundredth of what they took  -->  take_finished: numbers of all, once
                                     blocks                               -->  take_blocks: an object each, by one call

A message or a call costs the driver more than all that it does with a response. So responses wait for others, also for
those of other calls. A large number of them is sent at once, and so is the last of all.
"""

import asyncio
import math
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from mrl.data.samples import SampleRows, Samples
from mrl.engine.engine_calls import DEATH
from mrl.errors import Interrupted
from mrl.store.response_store import in_blocks

SHARE = 0.01  # longest wait as a share of a response's time: an engine's free slot stays empty that much longer
HELD_S = 2.0  # longest wait
LOSS_S = 2.0  # longest wait of an engine's loss for other calls, whose conversations are still handed over
MANY = 20  # rows; their numbers take less than the kilobyte that Ray sends inline with an answer


class FinishedRows(NamedTuple):
    """The message to the driver about finished rows."""

    rows: bytes  # SampleRows.to_bytes of all blocks
    sizes: tuple[int, ...]  # rows of each block
    routed: bool  # their routes are stored beside them
    ticket: int  # with which the blocks can be taken
    ended: tuple[int, ...]  # calls all of whose responses have been reported
    held_s: float  # most seconds that the first of them waited


class Outbox:
    """The finished responses of one client. The client asks again and again, one question at a time."""

    def __init__(self):
        self._calls: dict[int, float] = {}  # calls under way, with the time.monotonic of their start
        self._ended: set[int] = set()
        self._error: Exception | None = None
        self._error_at = math.inf  # time.monotonic at which the error is reported
        self._held: list[Samples] = []
        self._routed = False
        self._until = math.inf  # time.monotonic until which responses are held
        self._waits_s = 0.0
        self._blocks: dict[int, list[Samples]] = {}
        self._tickets = 0
        self._is_asked = False
        self._changed = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way, nothing is left to report or take, and nobody asks."""
        return not (self._calls or self._ended or self._blocks or self._error or self._is_asked)

    @contextmanager
    def call(self, number: int) -> Iterator[None]:
        """Counts a call as under way, and reports an error that ends it."""
        self._calls[number] = time.monotonic()
        try:
            yield
        except Exception as error:
            self._fail(error)
        except asyncio.CancelledError:
            self._fail(Interrupted(f"call {number} was cancelled before all of it was answered"))
            raise
        finally:
            del self._calls[number]
            self._ended.add(number)
            self._changed.set()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._error_at = time.monotonic() + (LOSS_S if isinstance(error, DEATH) else 0.0)

    def add(self, number: int, batch: Samples, routed: bool) -> None:
        """Adds responses to a call. `routed` says whether routes were asked for."""
        if not self._held:
            now = time.monotonic()
            self._waits_s = min(HELD_S, SHARE * (now - self._calls[number]))
            self._until = now + self._waits_s
        self._held.append(batch)
        self._routed |= routed
        self._changed.set()

    async def take_finished(self, awaited: Collection[int]) -> FinishedRows:
        """Returns what finished, once it was held long enough.

        `awaited` are calls that the client knows to be under way; they may not have begun here. Raises the error of a
        call, after the responses before it; that of a lost engine after other calls too, unless these take long.
        """
        self._is_asked = True
        try:
            while not self._is_due(awaited):
                self._changed.clear()
                due = self._until if self._held else self._error_at
                left_s = None if due == math.inf else max(0.0, due - time.monotonic())
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), left_s)
        finally:
            self._is_asked = False
        if self._error and not self._held:
            raise self._error
        return self._tell()

    def _is_due(self, awaited: Collection[int]) -> bool:
        if self._error:
            return bool(self._held) or not self._calls or time.monotonic() >= self._error_at
        if not (self._calls or set(awaited) - self._ended):
            return True
        many = sum(map(len, self._held)) >= MANY
        return bool(self._held) and (many or time.monotonic() >= self._until)

    def _tell(self) -> FinishedRows:
        # the client asks again while it has an open call, so it gets the error then
        ended = set() if self._error else self._ended
        blocks = in_blocks(self._held)
        numbers = [batch.numbers for batch in self._held]
        rows = b""
        if numbers:
            rows = SampleRows.joined(numbers).to_bytes()
        self._tickets += 1
        sizes = tuple(map(len, blocks))
        finished = FinishedRows(rows, sizes, self._routed, self._tickets, tuple(sorted(ended)), self._waits_s)
        if blocks:
            self._blocks[self._tickets] = blocks
        self._held = []
        self._ended = self._ended - ended
        self._routed = False
        return finished

    def take_blocks(self, ticket: int) -> list[Samples]:
        """Returns the blocks of one answer of `take_finished`, once."""
        return self._blocks.pop(ticket)


class Outboxes:
    """The outboxes of all clients, by number. Idle ones are removed."""

    def __init__(self):
        self._boxes: dict[int, Outbox] = {}

    def of(self, client: int) -> Outbox:
        """Returns the outbox of a client, a new one where it has none."""
        self._boxes = {number: box for number, box in self._boxes.items() if number == client or not box.is_idle}
        return self._boxes.setdefault(client, Outbox())
