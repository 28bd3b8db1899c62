"""What a rehearsal says of itself before it runs: keys that it changed, and switches that are out of its reach."""

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
