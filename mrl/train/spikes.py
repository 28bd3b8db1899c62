"""Reports updates with a much larger gradient than usual, each with its samples.

Clipping bounds the effect of such an update on the weights. Its samples show the reason.
"""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

SPIKE = 30.0  # relative to the median
USUAL = 64  # number of the newest updates for the median
LEAST = 8  # number of updates before one is judged
SHOWN = 20  # ranges of samples in a line


class SpikeWatch:
    """Compares the gradient norms of a run's updates with earlier ones. Each start of the run begins anew."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=USUAL)

    def look(self, step: int, clip_grad: float, norms: Sequence[float], sample_ids: Sequence[np.ndarray]) -> None:
        """Takes the norms of a step's updates, in their order, and prints a line for each that is a spike.

        `norms`: before clipping; NaN for a skipped update. `sample_ids`: of each update's rows.
        """
        for number, (norm, ids) in enumerate(zip(norms, sample_ids, strict=True), 1):
            if not math.isfinite(norm):
                continue
            # groups of equal values give updates of 0, which must not make other updates unusual
            if len(self._norms) >= LEAST and norm > SPIKE * (usual := float(np.median(self._norms))) > 0:
                print(f"step {step}: {_words(number, len(norms), norm, usual, clip_grad)}", flush=True)
                print(f"  its samples: {in_ranges(ids)}; mrl samples shows them", flush=True)
            self._norms.append(norm)


def _words(number: int, updates: int, norm: float, usual: float, clip_grad: float) -> str:
    became = f"actor.optim.clip_grad ({clip_grad:g}) leaves it as it is"
    if 0 < clip_grad < norm:
        became = f"it was clipped to {clip_grad:g} (actor.optim.clip_grad)"
    which = f"the gradient of update {number} of {updates}"
    return f"warning: {which} has norm {norm:.3g}, more than {SPIKE:g} times the usual {usual:.3g}; {became}"


def in_ranges(ids: np.ndarray) -> str:
    """Writes whole numbers as text, consecutive ones as a range: `0-15, 32-47`."""
    ordered = np.unique(ids)
    parts = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    found = [f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts if len(part)]
    more = [f"and {len(found) - SHOWN} more ranges"] if len(found) > SHOWN else []
    return ", ".join([*found[:SHOWN], *more])
