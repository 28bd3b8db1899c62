"""Finds the first step at which a run leaves its own band.

Each metric is predicted from the steps before: a straight line through the last WINDOW of them (Theil and Sen: the
median of all slopes, so that a few strange steps do not move it), and WIDER times their spread around it. The
deviation of the next steps, divided by the spread and by the error of the line, is taken for a t variable of DEGREES
degrees of freedom. A step is a break where

* it and the one after it deviate to the same side, each with a probability of sqrt(p), or
* it deviates alone with a probability of p,

and p is chosen so that a healthy run of so many steps and metrics has a break with probability FALSE_ALARM at most, if
deviations are independent. Positive metrics of many magnitudes are compared as logarithms, which single zeros have not
and are left out; three things are judged without a band: a mismatch that begins after steps of equal bits, what falls
to 0 and stays there, and what is no finite number before there is a band. What is wrong from the first step on has no
band to leave, and is judged by fixed bounds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mrl.driver.advice import MISMATCH, MISMATCH_LIMIT
from mrl.plan.measured_steps import STEP

FALSE_ALARM = 0.05  # of a whole run
MEASURED = (4, 18)  # healthy runs that left a band, and all that were tried
WINDOW = 20  # steps that predict the next one
LEAST = 8  # steps before a first step is judged
DEGREES = 4
# Steps of real runs resemble their neighbours, and a spread of few steps is uncertain: of 18 healthy runs of 13 to 61
# steps 6 left a band without it, and with it 4, whose policies suddenly wrote responses of other lengths
WIDER = 1.5


_DIFFERENT = "generation and training compute different probabilities"
ENDED = 4  # steps of 0 in a row
_UNIFORM = "train/uniform_group_share"


@dataclass(frozen=True)
class Watched:
    """A metric that is judged. `least`: the smallest change that matters, in the units that are compared."""

    name: str
    logs: bool
    least: float
    words: str
    begins: float | None = None  # above which it is a break after zeros
    floor: float = 1e-12  # below which changes are rounding; for logarithms
    ends: bool = False  # whether it is a break that it is 0 from a step on


WATCHED = (
    # float32 rounds a KL near 0 to 1e-7, and probabilities to less
    Watched("rollout_corr/k3_kl", True, 0.7, _DIFFERENT, begins=1e-6),
    Watched("training/rollout_probs_diff_mean", True, 0.7, _DIFFERENT, begins=1e-4, floor=1e-7),
    Watched("actor/grad_norm", True, 0.5, "the gradient's norm", ends=True),
    Watched("actor/entropy", True, 0.1, "entropy", ends=True),
    Watched("actor/pg_clipfrac", False, 0.1, "the share of what the band clips"),
    Watched("actor/ppo_kl", False, 1e-3, "the step from the old policy"),
    Watched("critic/score/mean", False, 0.03, "the score"),
    Watched("response_length/mean", True, 0.05, "the length of responses", ends=True),
    Watched("response_length/clip_ratio", False, 0.05, "the share of responses that are cut off"),
)
_LARGEST = float(np.finfo(np.float64).max)
BOUNDS = {MISMATCH: MISMATCH_LIMIT}  # those of warnings in the console


@dataclass(frozen=True)
class Break:
    """A metric that leaves its band at a step. `low`, `high`: the band; `chance`: of it in a healthy run, 0 where it is
    judged by a fixed bound.
    """

    step: int
    name: str
    value: float
    low: float
    high: float
    chance: float
    words: str


def usual(low: float | None, high: float | None, chance: float) -> str:
    """Says what a metric with a break is in healthy steps; None is no finite number."""
    if high == _LARGEST:
        return "allowed: any finite number"
    low, high = ("no finite number" if each is None else f"{each:.3g}" for each in (low, high))
    if chance:
        return f"usually {low} to {high} (by chance: {chance:.2g})"
    return f"allowed: up to {high}" if low == "0" else f"usually {low} to {high}"


def breaks(rows: Sequence[Mapping[str, Any]], false_alarm: float = FALSE_ALARM) -> list[Break]:
    """Returns the first break of each metric, the earliest first, then the least likely. `rows`: lines of steps."""
    rows = [row for row in rows if row[STEP] > 0]
    found = []
    judged = max(len(rows) - LEAST, 1)
    p = false_alarm / (2 * judged * len(WATCHED))
    for watched in WATCHED:
        first = (
            _first_break(watched, rows, p, judged * len(WATCHED)),
            next(_at_zero(watched, rows), None),
            next(_no_numbers(watched, rows), None),
        )
        found += sorted(filter(None, first), key=lambda each: each.step)[:1]
    return sorted(found, key=lambda each: (each.step, each.chance))


def beyond(rows: Sequence[Mapping[str, Any]]) -> list[Break]:
    """Returns the metrics that are beyond a fixed bound at the first step that has one there."""
    words = {watched.name: watched.words for watched in WATCHED}
    for row in rows:
        found = [
            Break(row[STEP], name, row[name], 0.0, bound, 0.0, words[name])
            for name, bound in BOUNDS.items()
            if row[STEP] > 0 and (row.get(name) or 0.0) > bound
        ]
        if found:
            return found
    return []


def judged_step(rows: Sequence[Mapping[str, Any]], step: int, false_alarm: float = FALSE_ALARM) -> list[Break]:
    """Returns what leaves its band at a given step, which was not searched for; the least likely first."""
    found = [
        each
        for watched in WATCHED
        for each in (*_at_zero(watched, rows), *_no_numbers(watched, rows))
        if each.step == step
    ]
    rows = [row for row in rows if 0 < row[STEP] <= step]
    for watched in WATCHED:
        steps, values = _values(watched, rows)
        if len(steps) > LEAST and steps[-1] == step:
            line = _Line.through(steps[:-1], values[:-1], watched.least)
            deviation = line.deviation(steps[-1], values[-1])
            chance = two_sided(deviation)
            if chance < false_alarm / len(WATCHED):
                found.append(_break(watched, step, values[-1], line, min(1.0, chance * len(WATCHED)), false_alarm))
    return sorted(found, key=lambda each: each.chance)


def _no_numbers(watched: Watched, rows: Sequence[Mapping[str, Any]]) -> Iterator[Break]:
    """Yields breaks of steps that are no finite number before there is a band: any finite number is allowed there."""
    finite = 0
    for row in rows:
        if finite == LEAST:
            return
        if row[STEP] > 0 and watched.name in row:
            finite += row[watched.name] is not None
            if row[watched.name] is None:
                yield Break(row[STEP], watched.name, np.inf, 0.0, _LARGEST, 0.0, watched.words)


def _at_zero(watched: Watched, rows: Sequence[Mapping[str, Any]]) -> Iterator[Break]:
    """Yields breaks from 0 or to it. A gradient of groups that all have one score each is 0 in healthy runs."""
    told = [row for row in rows if row[STEP] > 0 and watched.name in row]
    values = np.array([np.inf if row[watched.name] is None else row[watched.name] for row in told], np.float64)
    for place in range(LEAST, len(told)):
        step, before = told[place][STEP], values[place - LEAST : place]
        if watched.begins is not None and not before.any() and values[place] > watched.begins:
            yield Break(step, watched.name, float(values[place]), 0.0, watched.begins, 0.0, watched.words)
        after = told[place : place + ENDED]
        is_end = before.all() and len(after) == ENDED and not values[place : place + ENDED].any()
        if watched.ends and is_end and any(row.get(_UNIFORM, 0.0) < 1 for row in after):
            yield Break(step, watched.name, 0.0, float(before.min()), float(before.max()), 0.0, watched.words)


def _values(watched: Watched, rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps, and values as they are compared. What is not a finite number is infinite: it leaves any band."""
    pairs = [(row[STEP], row[watched.name]) for row in rows if watched.name in row]
    if watched.logs:  # groups of one score have no gradient, and equal bits no mismatch; see _at_zero
        pairs = [pair for pair in pairs if pair[1] != 0]
    steps = np.array([step for step, _ in pairs], np.float64)
    values = np.array([np.inf if value is None else value for _, value in pairs], np.float64)
    if watched.logs:
        values = np.log(np.maximum(values, watched.floor))
    return steps, values


@dataclass(frozen=True)
class _Line:
    """The line through some steps. `spread`: deviation of one step around it; `error`: of the line, in spreads."""

    slope: float
    center: float
    middle: float
    spread: float
    count: int
    width: float

    @classmethod
    def through(cls, steps: np.ndarray, values: np.ndarray, least: float) -> "_Line":
        steps, values = steps[-WINDOW:], values[-WINDOW:]
        is_finite = np.isfinite(values)
        steps, values = steps[is_finite], values[is_finite]
        first, second = np.triu_indices(len(steps), 1)
        slope = float(np.median((values[second] - values[first]) / (steps[second] - steps[first])))
        center = float(np.median(steps))
        middle = float(np.median(values - slope * (steps - center)))
        around = values - middle - slope * (steps - center)
        # of a median of few deviations around a fitted line; a change below `least` is never a break
        spread = 1.4826 * float(np.median(np.abs(around))) * len(steps) / max(len(steps) - 2, 1)
        spread = WIDER * max(spread, float(np.abs(around).mean()), least / 8)
        width = float(((steps - steps.mean()) ** 2).sum())
        return cls(slope, center, middle, spread, len(steps), max(width, 1.0))

    def at(self, step: float) -> float:
        return self.middle + self.slope * (step - self.center)

    def error(self, step: float) -> float:
        """Deviation of a value at a step from the line, if nothing changed; 1.57 is the loss by medians."""
        return self.spread * (1 + 1.57 * (1 / self.count + (step - self.center) ** 2 / self.width)) ** 0.5

    def deviation(self, step: float, value: float) -> float:
        return (value - self.at(step)) / self.error(step)


def _first_break(watched: Watched, rows: Sequence[Mapping[str, Any]], p: float, tests: int) -> Break | None:
    steps, values = _values(watched, rows)
    alone, twice = quantile(p), quantile(p**0.5)
    for place in range(LEAST, len(steps)):
        before = np.isfinite(values[:place])
        if before.sum() < LEAST:
            continue
        line = _Line.through(steps[:place], values[:place], watched.least)
        now = line.deviation(steps[place], values[place])
        later = [line.deviation(steps[k], values[k]) for k in range(place + 1, min(place + 2, len(steps)))]
        stays = [each for each in later if each * now > 0 and abs(each) >= twice]
        if abs(now) >= alone or (abs(now) >= twice and stays):
            chance = two_sided(now) if abs(now) >= alone else two_sided(now) * two_sided(stays[0])
            limit = alone if abs(now) >= alone else twice
            return _break(watched, int(steps[place]), values[place], line, min(1.0, 2 * chance * tests), None, limit)
    return None


def _break(
    watched: Watched, step: int, value: float, line: _Line, chance: float, p: float | None, limit: float | None = None
) -> Break:
    limit = quantile(p) if limit is None else limit
    ends = [line.at(step) - limit * line.error(step), line.at(step) + limit * line.error(step)]
    if watched.logs:
        value, *ends = (float(np.exp(each)) for each in (value, *ends))
    return Break(step, watched.name, float(value), ends[0], ends[1], chance, watched.words)


def two_sided(deviation: float) -> float:
    """Returns the probability of a t variable of DEGREES degrees to be farther from 0. Exact for four of them."""
    if not np.isfinite(deviation):
        return 0.0
    # with x = t / sqrt(t^2 + 4): P(|T| > t) = 1 - x (3 - x^2) / 2
    x = abs(deviation) / (deviation**2 + DEGREES) ** 0.5
    return max((1 - x) ** 2 * (2 + x) / 2, 1e-300)


def quantile(p: float) -> float:
    """Returns the deviation that a t variable of DEGREES degrees exceeds, on either side, with probability p."""
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        if two_sided(middle) > p:
            low = middle
        else:
            high = middle
    return high
