"""Says whether a plan fits, with the error of its own arithmetic.

Held against real ranks (tests/real/test_memory_truth.py, tests/real/test_resident_memory.py), bytes of weights,
gradients and optimizer are within 2 % of the plan, and everything else within 10 %.
"""

from collections.abc import Mapping
from typing import Any, Literal

Fit = Literal["fits", "may not fit", "does not fit"]
_STATES = frozenset(("parameters", "gradients", "optimizer", "reference", "teacher", "engine_weights", "kv_cache"))
_ERROR_OF_STATES = 0.02
_ERROR_OF_OTHERS = 0.10


def fit_of(memory: Mapping[str, Any]) -> Fit:
    """Returns whether a plan's `memory` fits. `may not fit`: what is missing is less than the error of the plan."""
    if memory["fits"]:
        return "fits"
    host = memory["host"]
    parts = [(phase["terms"], phase["device_bytes"]) for phase in memory["phases"].values()]
    parts.append((host["terms"], host["node_bytes"]))
    large = any(sum(terms.values()) - error_of(terms) > limit for terms, limit in parts)
    if large or memory["kv_cache"]["longest_sequences_per_engine"] <= 0:
        return "does not fit"
    return "may not fit"


def error_of(terms: Mapping[str, int]) -> float:
    """Returns the bytes by which a plan's terms may be wrong."""
    return sum(size * (_ERROR_OF_STATES if name in _STATES else _ERROR_OF_OTHERS) for name, size in terms.items())
