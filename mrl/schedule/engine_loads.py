"""Which engine gets a request: the one that holds its prefix, or the one with the fewest tokens before it.

Tokens of a request are those of its prompt, those kept, and as many as it may add. So the choice follows from the
order of requests, their lengths and what was answered before; in a fixed order of all three it is always the same.
"""

from collections.abc import Iterable

LONGER = 1.5  # times the mean queue, beyond which an engine gets no request for the sake of a prefix that it holds


class EngineLoads:
    """Tokens outstanding at each engine, and where each prefix is."""

    def __init__(self, engines: Iterable[str]):
        self.tokens = dict.fromkeys(engines, 0)
        self._holders: dict[int, str] = {}

    def place(self, prefix: int, tokens: int, waiting: int) -> str | None:
        """The engine for a request of so many tokens, which are counted there; None without engines.

        `waiting`: tokens of all requests that are to be placed now, this one among them.
        """
        if not self.tokens:
            return None
        mean = (sum(self.tokens.values()) + waiting) / len(self.tokens)
        holder = self._holders.get(prefix)
        if holder not in self.tokens or self.tokens[holder] > LONGER * mean:
            holder = min(self.tokens, key=self.tokens.__getitem__)  # the first of several
        self._holders[prefix] = holder
        self.tokens[holder] += tokens
        return holder

    def done(self, engine: str, tokens: int) -> None:
        """A request of so many tokens has been answered, or taken back; nothing for an engine that is lost."""
        if engine in self.tokens:
            self.tokens[engine] -= tokens

    def forget_prefixes(self) -> None:
        """New weights: what caches held is dropped."""
        self._holders.clear()

    def lose(self, engine: str) -> None:
        """The engine gets nothing until it joins again."""
        self.tokens.pop(engine, None)

    def join(self, engine: str) -> None:
        """An engine that has no request."""
        self.tokens[engine] = 0
