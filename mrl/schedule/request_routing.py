"""Requests on their way to engines: each is sent once, and answered once.

    queued  -- assignments -->  under way at an engine  -- answered -->  done

An example, two engines of two places each, answers of any length: a and b hold two requests each, the fifth waits for
whoever answers first. So no engine is idle while a request waits, however long those of another turn out to be.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from mrl.schedule.engine_loads import EngineLoads


@dataclass(frozen=True)
class Queued:
    """A request that is not answered yet."""

    number: int  # unique
    prefix: Hashable  # its prompt: an engine that has computed it computes it no second time
    tokens: int  # of the prompt, and as many as it may add


class RequestRouting:
    """Which engine is sent which requests next."""

    def __init__(self, engines: Iterable[str], places: int | None, requests: Iterable[Queued] = ()):
        """`places`: see EngineLoads."""
        self._loads, self._queue, self._queued_tokens = EngineLoads(engines, places), deque[Queued](), 0
        self._under_way: dict[int, tuple[str, int]] = {}  # by number: engine, tokens
        self.add(requests)

    def add(self, requests: Iterable[Queued]) -> None:
        """Behind those that are queued."""
        for request in requests:
            self._queue.append(request)
            self._queued_tokens += request.tokens

    @property
    def unanswered(self) -> int:
        """Requests that are queued or under way."""
        return len(self._queue) + len(self._under_way)

    def assignments(self) -> dict[str, list[int]]:
        """Numbers of the requests to be sent now, by engine, in their order."""
        sent: dict[str, list[int]] = {}
        while self._queue and self._loads.free:
            request = self._queue.popleft()
            engine = self._loads.place(request.prefix, request.tokens, self._queued_tokens)
            self._queued_tokens -= request.tokens
            self._under_way[request.number] = engine, request.tokens
            sent.setdefault(engine, []).append(request.number)
        return sent

    def answered(self, numbers: Iterable[int]) -> None:
        """Their responses are there. Raises KeyError for one that is not under way."""
        for number in numbers:
            self._loads.done(*self._under_way.pop(number))
