"""Notes of a rehearsal before it runs: keys that it changed, and switches that it cannot exercise."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Change:
    """A key that has another value in the rehearsal."""

    key: str
    was: Any
    now: Any
    why: str


@dataclass(frozen=True)
class OutOfReach:
    """A switch that the rehearsal does not exercise."""

    switch: str
    why: str
