"""Controls how many responses run: slightly more while the KV cache has room, much fewer when it is short.

Additive increase, multiplicative decrease. An engine with a full cache preempts: it drops a response's cache and
computes it again. So the window grows only while it is used up and the cache is not, and shrinks before any preemption.
Equal observations give equal windows.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RateRules:
    """Limits of the window, in responses, and thresholds for the use of the KV cache."""

    lowest: int  # at least 1
    highest: int
    grow_below: float = 0.7  # of the cache, in the fullest engine
    shrink_above: float = 0.85
    step: float = 0.05  # share of `highest` that a good observation adds
    factor: float = 0.8  # factor after a bad observation


@dataclass(frozen=True)
class Observation:
    """The work of all engines since the last observation."""

    kv_use: float  # share of the cache in use, in the fullest engine
    preemptions: int
    under_way: int  # responses


@dataclass(frozen=True)
class Rate:
    """The current window, as a real number so that small steps add up."""

    rules: RateRules
    size: float

    @classmethod
    def start(cls, rules: RateRules) -> "Rate":
        """Starts as wide as allowed, so that nothing is slowed down while the cache suffices."""
        return cls(rules, float(rules.highest))

    @property
    def window(self) -> int:
        """Number of responses that may run."""
        return int(self.size)

    def after(self, seen: Observation) -> "Rate":
        """Returns the window after one more observation."""
        rules = self.rules
        size = self.size
        if seen.preemptions or seen.kv_use > rules.shrink_above:
            size = min(size, max(seen.under_way, rules.lowest)) * rules.factor
        elif seen.kv_use < rules.grow_below and seen.under_way >= self.window:
            size += max(1.0, rules.step * rules.highest)
        return Rate(rules, min(max(size, float(rules.lowest)), float(rules.highest)))
