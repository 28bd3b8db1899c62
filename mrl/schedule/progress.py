"""Engines that hold requests and make no tokens: a long generation is not late, a stopped one soon is.

Times are given by whoever asks, in seconds of any clock that only goes forward.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Seen:
    """What an engine had made when it last got on, and when that was."""

    tokens: int
    at: float


class ProgressWatch:
    """When each engine last made a token, or had nothing to make."""

    def __init__(self, limit_s: float):
        self.limit_s = limit_s
        self._seen: dict[str, Seen] = {}

    def note(self, engine: str, tokens: int, holds_requests: bool, now: float) -> None:
        """An engine has made so many tokens since it began. Another number is progress, as is having nothing to do."""
        before = self._seen.get(engine)
        if before is None or before.tokens != tokens or not holds_requests:
            self._seen[engine] = Seen(tokens, now)

    def excuse(self, now: float) -> None:
        """All engines stood still for a reason, as in a weight sync: their time begins anew."""
        self._seen = {engine: Seen(seen.tokens, now) for engine, seen in self._seen.items()}

    def forget(self, engine: str) -> None:
        """An engine that is lost is watched no more, until it is noted again."""
        self._seen.pop(engine, None)

    def late(self, now: float) -> list[str]:
        """Engines without progress for longer than the limit."""
        return sorted(engine for engine, seen in self._seen.items() if now - seen.at > self.limit_s)
