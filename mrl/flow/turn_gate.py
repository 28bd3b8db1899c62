"""Limits how many conversations an engine samples at once. Those that wait for tools do not count.

An example of 2 slots: a, b, c and d begin. a and b sample. a calls a tool, and c samples meanwhile. a's answer comes
while both slots are taken and d waits: a is next, since its prefix is in the engine's cache.
"""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TurnGate:
    """Slots for requests of one engine. Later turns go first, then earlier arrivals."""

    def __init__(self, slots: int | None):
        """`slots` is their number; None sets no limit."""
        self._free = slots
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def slot(self, is_first: bool) -> AsyncIterator[None]:
        """Waits for a slot. `is_first` says that this engine has sampled nothing of the conversation yet."""
        if self._free is None:
            yield
            return
        await self._take(is_first)
        try:
            yield
        finally:
            self._give()

    async def _take(self, is_first: bool) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (is_first, next(self._numbers), turn))
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # cancelled after it got a slot
                self._give()
            raise

    def _give(self) -> None:
        """Gives the slot to the next request that still waits."""
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
