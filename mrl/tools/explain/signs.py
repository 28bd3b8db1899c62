"""Early signs: drifts of metrics that tell of trouble before a break does, each with the chance that it is noise.

A drift is the sign of all differences between later and earlier steps (Mann and Kendall's S), normal with variance
n (n - 1) (2 n + 5) / 18 where nothing drifts. Neighbouring steps resemble each other, so the variance grows by what the
differences of a step from the median have in common with those of the step before (Hamed and Rao, 1998, with the first
lag alone). Only the last WINDOW steps count.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import erfc, sqrt
from typing import Any

import numpy as np

from mrl.plan.measured_steps import STEP

WINDOW = 40
LEAST = 12  # steps
CHANCE = 0.01  # a sign less likely than that is told; of each kind there is one test
_MISMATCH = "rollout_corr/k3_kl"
_HELD_OUT = "val-core/"


@dataclass(frozen=True)
class Sign:
    """One sign, in words. `chance`: of it in a run where nothing drifts."""

    words: str
    chance: float

    def __str__(self) -> str:
        return f"{self.words} (by chance: {self.chance:.1g})"


def drift(values: Sequence[float]) -> tuple[float, float]:
    """Returns the normal deviation of a drift, positive where values rise, and its one-sided chance."""
    numbers = np.array(values, np.float64)
    n = len(numbers)
    if n < LEAST or np.ptp(numbers) == 0:
        return 0.0, 0.5
    first, second = np.triu_indices(n, 1)
    score = float(np.sign(numbers[second] - numbers[first]).sum())
    variance = n * (n - 1) * (2 * n + 5) / 18
    slope = float(np.median((numbers[second] - numbers[first]) / (second - first)))
    around = numbers - slope * np.arange(n)
    around = around - np.median(around)
    power = float((around**2).sum())
    alike = float((around[1:] * around[:-1]).sum()) / power if power > 0 else 0.0
    variance *= 1 + 2 * max(alike, 0.0) * (n - 1) / n
    deviation = (score - np.sign(score)) / sqrt(variance)
    return deviation, erfc(abs(deviation) / sqrt(2)) / 2


def signs(rows: Sequence[Mapping[str, Any]]) -> list[Sign]:
    """Returns the signs of a run's lines, the least likely first."""
    rows = [row for row in rows if row[STEP] > 0][-WINDOW:]
    return sorted((sign for sign in _all(rows) if sign.chance < CHANCE), key=lambda sign: sign.chance)


def _all(rows: Sequence[Mapping[str, Any]]) -> Iterator[Sign]:
    cut = _drift(rows, "response_length/clip_ratio")
    if cut[0] > 0:
        yield Sign("more and more responses are cut off at data.max_response_length", cut[1])
    entropy, mismatch = _drift(rows, "actor/entropy"), _drift(rows, _MISMATCH)
    if entropy[0] and mismatch[0] > 0:
        way = "rises" if entropy[0] > 0 else "falls"
        # both at once: the larger chance bounds that of both, however much they have in common
        yield Sign(f"entropy {way} while generation and training drift apart", max(entropy[1], mismatch[1]))
    score, length = _drift(rows, "critic/score/mean"), _drift(rows, "response_length/mean")
    for name in sorted({name for row in rows for name in row if name.startswith(_HELD_OUT) and "/mean@" in name}):
        held_out = [row[name] for row in rows if row.get(name) is not None]
        if score[0] > 0 and len(held_out) > 1 and held_out[-1] <= held_out[0]:
            yield Sign(f"the training score rises, and {name} does not: the reward may be gamed", score[1])
    if score[0] > 0 and length[0] > 0 and _partial(rows) <= 0:
        yield Sign("the score rises only as far as responses become longer", max(score[1], length[1]))
    uniform = _drift(rows, "train/uniform_group_share")
    if uniform[0] > 0:
        yield Sign("more and more groups have one score for all responses", uniform[1])


def _drift(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float]:
    return drift([row[name] for row in rows if row.get(name) is not None])


def _partial(rows: Sequence[Mapping[str, Any]]) -> float:
    """Returns how the score goes with the step where length is the same: the partial correlation of ranks."""
    names = ("critic/score/mean", "response_length/mean")
    both = [[row[name] for name in names] for row in rows if all(row.get(name) is not None for name in names)]
    scores, lengths = np.array(both).T
    ranks = [np.argsort(np.argsort(each)).astype(np.float64) for each in (scores, np.arange(len(scores)), lengths)]
    table = np.corrcoef(ranks)
    below = sqrt(max((1 - table[0, 2] ** 2) * (1 - table[1, 2] ** 2), 1e-12))
    return float((table[0, 1] - table[0, 2] * table[1, 2]) / below)
