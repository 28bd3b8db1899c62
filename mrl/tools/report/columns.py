"""Metrics in columns, and curves thinned to some of their real points.

Example: a column of 6 steps thinned to at most 4 points. Of each 3 steps, the smallest and the largest value are kept.

    step     1    2    3    4    5    6
    value    5    9    1    4    4    7        kept: (2, 9) (3, 1) (4, 4) (6, 7)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

STEP = "training/global_step"


@dataclass(frozen=True)
class Curve:
    """A metric over steps, both [points], only where the value is finite.

    `of` is the number of points before thinning.
    """

    steps: np.ndarray  # int32
    values: np.ndarray  # float64
    of: int

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float:
        """The newest value."""
        return float(self.values[-1])

    def thinned(self, most: int) -> "Curve":
        """Returns at most `most` (2 or more) points: the smallest and the largest value of equal intervals of steps."""
        if len(self) <= most:
            return self
        if (self.values == self.values[0]).all():
            kept = np.array([0, len(self) - 1])
        else:
            edges = np.linspace(0, len(self), most // 2 + 1).astype(int)
            stretches = [(a, b) for a, b in pairwise(edges) if b > a]
            extremes = [(a + self.values[a:b].argmin(), a + self.values[a:b].argmax()) for a, b in stretches]
            kept = np.unique(np.array(extremes))
        return Curve(self.steps[kept], self.values[kept], self.of)


def curves_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Returns every metric of the rows, ordered by first appearance, without values that are not finite."""
    series: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        step = row[STEP]
        for name, value in row.items():
            if value is None or isinstance(value, str | bool | list | dict) or name == STEP:
                continue
            steps, values = series.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
    return {name: curve for name, (steps, values) in series.items() if len(curve := _finite(steps, values))}


def _finite(steps: list[int], values: list[float]) -> Curve:
    x = np.array(steps, np.int32)
    y = np.array(values, np.float64)
    finite = np.isfinite(y)
    return Curve(x[finite], y[finite], int(finite.sum()))
