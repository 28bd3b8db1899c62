"""How many conversations an engine samples at once; those that tools work for are none of them.

An example of 2 slots: a, b, c and d begin. a and b sample. a calls a tool, and c samples meanwhile. a's answer comes
while both slots are taken and d waits: a is next, since its prefix is in the engine's cache.
"""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TurnGate:
    """Seats for requests of one engine; later turns go first, then who came first."""

    def __init__(self, slots: int | None):
        """None: any number."""
        self._free = slots
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def slot(self, is_first: bool) -> AsyncIterator[None]:
        """Waits for one. `is_first`: nothing of the conversation has been sampled by this engine."""
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
            if turn.done() and not turn.cancelled():  # cancelled after it was given one
                self._give()
            raise

    def _give(self) -> None:
        """The slot goes to the next who still waits."""
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
