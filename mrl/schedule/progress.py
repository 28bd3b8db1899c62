"""Finds engines that hold requests but make no tokens. A long generation is not late, a stopped engine soon is.

The caller passes times, in seconds of any monotonic clock.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class LastProgress:
    """Tokens of an engine at its last progress, and the time."""

    tokens: int
    at: float


class ProgressWatch:
    """The time when each engine last made a token, or had nothing to do."""

    def __init__(self, limit_s: float):
        self.limit_s = limit_s
        self._seen: dict[str, LastProgress] = {}

    def note(self, engine: str, tokens: int, holds_requests: bool, now: float) -> None:
        """Records an engine's total tokens. A changed number counts as progress, and so does having no requests."""
        before = self._seen.get(engine)
        if before is None or before.tokens != tokens or not holds_requests:
            self._seen[engine] = LastProgress(tokens, now)

    def excuse(self, now: float) -> None:
        """Restarts the time of all engines, which stood still for a reason such as a weight sync."""
        self._seen = {engine: LastProgress(seen.tokens, now) for engine, seen in self._seen.items()}

    def forget(self, engine: str) -> None:
        """Stops watching a lost engine until `note` is called for it again."""
        self._seen.pop(engine, None)

    def late(self, now: float) -> list[str]:
        """Returns the engines without progress for longer than the limit."""
        return sorted(engine for engine, seen in self._seen.items() if now - seen.at > self.limit_s)
