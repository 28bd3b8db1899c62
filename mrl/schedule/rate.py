"""How many responses are under way: a little more while the KV cache has room, a good deal less when it is short.

Additive increase, multiplicative decrease. An engine whose cache is full preempts: it drops a response's cache and
computes it all again. So the window grows only while it is full itself and the cache is not, and shrinks before
anything is preempted. The same observations give the same windows.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RateRules:
    """Limits of the window, in responses, and shares of the KV cache."""

    lowest: int  # at least 1
    highest: int
    grow_below: float = 0.7  # of the cache, in the fullest engine
    shrink_above: float = 0.85
    step: float = 0.05  # of `highest`, that a good observation adds
    factor: float = 0.8  # that a bad one leaves


@dataclass(frozen=True)
class Observation:
    """What all engines did since the observation before."""

    kv_use: float  # share of the cache in use, in the fullest engine
    preemptions: int
    under_way: int  # responses


@dataclass(frozen=True)
class Rate:
    """The window now; real, so that small steps add up."""

    rules: RateRules
    size: float

    @classmethod
    def start(cls, rules: RateRules) -> "Rate":
        """Starts as wide as allowed: with a cache that suffices nothing is ever slowed down."""
        return cls(rules, float(rules.highest))

    @property
    def window(self) -> int:
        """Responses that may be under way."""
        return int(self.size)

    def after(self, seen: Observation) -> "Rate":
        """The window that follows from one more observation."""
        rules = self.rules
        size = self.size
        if seen.preemptions or seen.kv_use > rules.shrink_above:
            size = min(size, max(seen.under_way, rules.lowest)) * rules.factor
        elif seen.kv_use < rules.grow_below and seen.under_way >= self.window:
            size += max(1.0, rules.step * rules.highest)
        return Rate(rules, min(max(size, float(rules.lowest)), float(rules.highest)))
