"""Which engine gets a request: the one that holds its prefix, or the one with the fewest tokens before it.

Tokens of a request are those of its prompt, those kept, and as many as it may add: how many it will add nobody knows.
What levels engines out is that none has more than `max_requests`: the rest go, one by one, to whoever is done with
some.

The choice follows from the order of requests, their lengths and what was answered before. Without `max_requests` all
requests are placed at once, before any is answered, so that no clock has a say in it.
"""

from collections.abc import Iterable
from math import ceil

LONGER = 1.5  # times the mean queue, beyond which an engine gets no request for the sake of a prefix that it holds
MORE = 1.25  # times the slots of an engine: what takes a slot that comes free is there already


def request_limit_of(slots: int) -> int:
    """Requests that an engine is given which computes `slots` at once."""
    return ceil(MORE * slots)


class EngineLoads:
    """Tokens and requests outstanding at each engine, and where each prefix is."""

    def __init__(self, engines: Iterable[str], max_requests: int | None = None):
        """`max_requests`: requests that an engine has at most; None: any number."""
        self.tokens = dict.fromkeys(engines, 0)
        self.requests = dict.fromkeys(self.tokens, 0)
        self._max_requests = max_requests
        self._holders = dict[object, str]()

    @property
    def free(self) -> list[str]:
        """Engines that may get a request."""
        limit = self._max_requests
        return [engine for engine, requests in self.requests.items() if limit is None or requests < limit]

    def place(self, prefix: object, tokens: int, waiting: int) -> str | None:
        """The engine for a request of so many tokens, which are counted there; None where none is free.

        `waiting`: tokens of all requests that are to be placed now, this one among them.
        """
        if not (free := self.free):
            return None
        mean = (sum(self.tokens.values()) + waiting) / len(self.tokens)
        holder = self._holders.get(prefix)
        if holder not in free or self.tokens[holder] > LONGER * mean:
            holder = min(free, key=self.tokens.__getitem__)  # the first of several
        self._holders[prefix] = holder
        self.tokens[holder] += tokens
        self.requests[holder] += 1
        return holder

    def done(self, engine: str, tokens: int) -> None:
        """A request of so many tokens has been answered, or taken back; nothing for an engine that is lost."""
        if engine in self.tokens:
            self.tokens[engine] -= tokens
            self.requests[engine] -= 1

    def forget_prefixes(self) -> None:
        """New weights: what caches held is dropped."""
        self._holders.clear()

    def lose(self, engine: str) -> None:
        """The engine gets nothing until it joins again."""
        self.tokens.pop(engine, None)
        self.requests.pop(engine, None)
        self._holders = {prefix: holder for prefix, holder in self._holders.items() if holder != engine}

    def join(self, engine: str) -> None:
        """An engine that has no request."""
        self.tokens[engine] = self.requests[engine] = 0
