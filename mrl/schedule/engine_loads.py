"""Chooses the engine of a request: the one that holds its prefix, or the one with the fewest tokens.

A request counts the tokens of its prompt, those kept, and all that it may add. The real number is unknown. What
balances engines is the limit `max_requests`. Further requests go, one by one, to engines that finish some.

The choice depends on the order of requests, their lengths, and earlier answers. Without `max_requests` all requests are
placed at once, before any answer, so the choice does not depend on time.
"""

from collections.abc import Iterable
from math import ceil

LONGER = 1.5  # times the mean queue; with more, an engine gets no request for the sake of a prefix
MORE = 1.25  # times the slots of an engine, so that a free slot is filled at once


def request_limit_of(slots: int) -> int:
    """Returns the limit of requests for an engine that computes `slots` at once."""
    return ceil(MORE * slots)


class EngineLoads:
    """Pending tokens and requests of each engine, and which engine holds which prefix."""

    def __init__(self, engines: Iterable[str], max_requests: int | None = None):
        """`max_requests` limits the requests at an engine; None means no limit."""
        self.tokens = dict.fromkeys(engines, 0)
        self.requests = dict.fromkeys(self.tokens, 0)
        self._max_requests = max_requests
        self._holders = dict[object, str]()

    @property
    def free(self) -> list[str]:
        """Returns the engines that may get a request."""
        limit = self._max_requests
        return [engine for engine, requests in self.requests.items() if limit is None or requests < limit]

    def assign(self, prefix: object, tokens: int, waiting: int) -> str | None:
        """Returns the engine for a request of so many tokens and counts them there; None if no engine is free.

        `waiting`: tokens of all requests to be placed now, including this one.
        """
        if not (free := self.free):
            return None
        mean = (sum(self.tokens.values()) + waiting) / len(self.tokens)
        holder = self._holders.get(prefix)
        if holder not in free or self.tokens[holder] > LONGER * mean:
            holder = min(free, key=self.tokens.__getitem__)  # the first, if several are equal
        self._holders[prefix] = holder
        self.tokens[holder] += tokens
        self.requests[holder] += 1
        return holder

    def done(self, engine: str, tokens: int) -> None:
        """Removes an answered or withdrawn request from the loads. Ignores a lost engine."""
        if engine in self.tokens:
            self.tokens[engine] -= tokens
            self.requests[engine] -= 1

    def forget_prefixes(self) -> None:
        """Forgets all prefixes, because new weights clear the caches."""
        self._holders.clear()

    def lose(self, engine: str) -> None:
        """Removes an engine until it joins again."""
        self.tokens.pop(engine, None)
        self.requests.pop(engine, None)
        self._holders = {prefix: holder for prefix, holder in self._holders.items() if holder != engine}

    def join(self, engine: str) -> None:
        """Adds an engine without requests."""
        self.tokens[engine] = self.requests[engine] = 0
