"""Fits a plan's assumptions to the measured seconds of runs, as far as the runs determine them.

Every assumption has a usual value and a range. In logarithms the range is a normal distribution, the measured seconds
of a phase are another around the predicted ones, and the best values follow from least squares (Gauss and Newton, with
the ranges as further rows). An assumption is determined where the runs narrow its range to half at most, whatever the
others are. All others keep their usual values: a phase that two of them explain equally well tells neither. What the
determined ones leave of a phase becomes a factor on its seconds: its size is right, although its cause is unknown.
What the runs leave open is kept as draws of all assumptions together: each explains the runs, and another layout may
be the fastest by each (mrl.tools.run_search).

Example: log-probs and updates both take twice the predicted seconds. Most of both is behind `compute_share`, which
becomes about half. If only updates are slow, links explain that as well as launches. Then neither is changed, and the
factor of updates becomes two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log
from typing import Any

import numpy as np

from mrl.plan.calibration_file import CONSTANTS, SYNC, Calibration, Fitted, OpenDraw, at_lengths
from mrl.plan.devices import USUAL, Assumptions, MeasuredLengths, usual_ends
from mrl.plan.engine_memory import EngineMemory
from mrl.plan.plan_inputs import BatchPlan, PlanInputs, batch_plan, engine_of
from mrl.plan.times import phase_seconds

DETERMINED = 0.5  # largest part of its range that remains of an assumption
MODEL_ERROR = 0.03  # of a predicted phase, as a share, whatever the number of measured steps
INTERVAL = 1.645  # standard deviations, on both sides 90 %
_NO_RANGE = 0.35  # deviation, in logarithms, of an assumption without a published range
_NOMINAL = 1.5  # the same on a device whose figures are nominal, also of a phase's factor
_UNCERTAIN_PHASE = 0.5  # deviation of a phase's factor
_NOTABLE_PHASE = 2.0  # deviations of the measured seconds at which a factor is told
_STEPS = 12  # of the iteration
_DIFFERENCE = 0.02  # of a logarithm, for derivatives
_LARGEST_STEP = 0.5
SHARES = frozenset(("compute_share", "head_share", "prefill_mfu", "decode_memory_share", "link_share"))
DRAWS = 32  # of what the runs leave open
_FEELS = 0.02  # change of a phase for a change of an assumption, both as logarithms, that is worth naming


@dataclass(frozen=True)
class MeasuredRun:
    """Measured seconds of some steps of a run, by phase, and what was planned for it.

    `errors`: standard deviations of the logarithms of `seconds`. `lengths`: those of the same steps. `sync`: see
    `sync_parts`.
    """

    inputs: PlanInputs
    seconds: Mapping[str, float]
    errors: Mapping[str, float]
    lengths: MeasuredLengths
    sync: Mapping[str, float]

    @cached_property
    def _batch(self) -> BatchPlan:
        return batch_plan(self.inputs.config, self.inputs.train)

    @cached_property
    def _engine(self) -> EngineMemory:
        return engine_of(self.inputs)

    def predicted(self, assumed: Assumptions) -> dict[str, float]:
        """Predicts all measured phases at the measured lengths."""
        inputs = replace(self.inputs, assumptions=at_lengths(assumed, self.lengths))
        seconds = phase_seconds(inputs, self._batch, self._engine)
        if SYNC in self.seconds:
            seconds[SYNC] = sync_seconds(assumed, self.sync)
        return {phase: seconds[phase] for phase in self.phases}

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """The phases that were measured and are predicted."""
        planned = phase_seconds(self.inputs, self._batch, self._engine).keys() | {SYNC}
        return tuple(phase for phase in self.seconds if phase in planned)


def sync_parts(planned: Mapping[str, Any]) -> dict[str, float]:
    """Returns the predicted seconds of a stored plan's weight sync by cause, if all rates were reached."""
    assumed = planned["assumptions"]
    share = assumed.get("sync_share", 1.0)
    reached = {"wire": assumed["link_share"], "words": 1.0}
    return {name: seconds * reached.get(name, share) for name, seconds in planned["reshard"]["seconds_of"].items()}


def sync_seconds(assumed: Assumptions, parts: Mapping[str, float]) -> float:
    """Predicts a weight sync whose parts are those of `sync_parts`."""
    reached = {"wire": assumed.link_share, "words": 1.0}
    return sum(seconds / reached.get(name, assumed.sync_share) for name, seconds in parts.items())


def calibrate(observations: Sequence[MeasuredRun], lengths: MeasuredLengths) -> Calibration:
    """Fits assumptions to observations of one or more runs on one kind of device. `lengths`: of all of them."""
    nominal = _is_nominal(observations)
    ranges = {name: deviation_of(name, nominal) for name in CONSTANTS}
    logs = _solved(observations, CONSTANTS, ranges, nominal)
    jacobian = _jacobian(observations, CONSTANTS, logs, nominal)
    spread = _covariance(observations, jacobian, np.array([ranges[name] for name in CONSTANTS]))
    fitted = []
    for place, name in enumerate(CONSTANTS):
        if spread[place, place] ** 0.5 <= DETERMINED * ranges[name]:
            half = INTERVAL * spread[place, place] ** 0.5
            fitted.append(_with_interval(name, logs[place], half, jacobian[:, place], nominal))
    names = {each.name for each in fitted}
    left = {name: _why_left(name, jacobian, spread) for name in CONSTANTS if name not in names}
    assumed = replace(USUAL, **{each.name: each.value for each in fitted})
    return Calibration(
        tuple(fitted), left, _phase_factors(observations, assumed), lengths, _drawn(observations, logs, spread, nominal)
    )


def _is_nominal(observations: Sequence[MeasuredRun]) -> bool:
    return observations[0].inputs.device.platform == "cpu"


def _drawn(
    observations: Sequence[MeasuredRun], logs: np.ndarray, spread: np.ndarray, nominal: bool
) -> tuple[OpenDraw, ...]:
    """Draws all CONSTANTS around the best ones, in pairs on both sides; the same ones for the same runs. What a draw
    does not explain of a phase becomes a factor that goes with it.
    """
    numbers = np.random.default_rng(0).normal(size=(DRAWS // 2, len(logs)))
    shifts = numbers @ np.linalg.cholesky(spread).T
    draws = []
    for row in np.concatenate([logs + shifts, logs - shifts]):
        assumed = _assumed(CONSTANTS, row, nominal)
        values = tuple(getattr(assumed, name) for name in CONSTANTS)
        draws.append(OpenDraw(values, _phase_factors(observations, assumed)))
    return tuple(draws)


def deviation_of(name: str, nominal: bool) -> float:
    """Returns the standard deviation of the logarithm of an assumption, before any run. Its range is two of them."""
    if nominal:
        return _NOMINAL
    faster, slower = usual_ends(name)
    if faster <= 0 or faster == slower:
        return _NO_RANGE
    return abs(log(slower / faster)) / 2


def _with_interval(name: str, shift: float, half: float, column: np.ndarray, nominal: bool) -> Fitted:
    """Returns an assumption of logarithm `shift` from its usual value. More of it is faster where seconds then fall."""
    value, low, high = (_value(name, shift + change, nominal) for change in (0.0, -half, half))
    more_is_slower = column.sum() > 0
    return Fitted(name, value, *((low, high) if more_is_slower else (high, low)))


def _value(name: str, shift: float, nominal: bool) -> float:
    value = getattr(USUAL, name) * float(np.exp(shift))
    if name in SHARES and not nominal:
        return min(value, 1.0)
    if name == "expert_load":
        return max(value, 1.0)
    return value


def _assumed(names: Sequence[str], logs: np.ndarray, nominal: bool) -> Assumptions:
    changed = {name: _value(name, shift, nominal) for name, shift in zip(names, logs, strict=True)}
    return replace(USUAL, **changed)


def _predicted_logs(observations: Sequence[MeasuredRun], assumed: Assumptions) -> np.ndarray:
    seconds = [spent for each in observations for spent in each.predicted(assumed).values()]
    return np.log(np.maximum(seconds, 1e-9))


def _measured_logs(observations: Sequence[MeasuredRun]) -> tuple[np.ndarray, np.ndarray]:
    """Returns logarithms of all measured seconds, and their deviations."""
    seconds = [each.seconds[phase] for each in observations for phase in each.phases]
    errors = [each.errors[phase] for each in observations for phase in each.phases]
    return np.log(np.maximum(seconds, 1e-9)), np.array(errors)


def _jacobian(observations: Sequence[MeasuredRun], names: Sequence[str], logs: np.ndarray, nominal: bool) -> np.ndarray:
    """Returns d log(seconds) / d log(assumption), [measured phases, names]."""
    columns = []
    for place in range(len(names)):
        sides = []
        for change in (_DIFFERENCE, -_DIFFERENCE):
            moved = logs.copy()
            moved[place] += change
            sides.append(_predicted_logs(observations, _assumed(names, moved, nominal)))
        columns.append((sides[0] - sides[1]) / (2 * _DIFFERENCE))
    return np.stack(columns, axis=1)


def _solved(
    observations: Sequence[MeasuredRun], names: Sequence[str], ranges: Mapping[str, float], nominal: bool
) -> np.ndarray:
    """Returns the logarithms of the best values, relative to the usual ones."""
    logs = np.zeros(len(names))
    weights = np.array([1 / ranges[name] for name in names])
    target, errors = _measured_logs(observations)
    for _ in range(_STEPS):
        missing = target - _predicted_logs(observations, _assumed(names, logs, nominal))
        slope = _jacobian(observations, names, logs, nominal)
        rows = np.concatenate([slope / errors[:, None], np.diag(weights)])
        wanted = np.concatenate([missing / errors, -logs * weights])
        step = np.clip(np.linalg.lstsq(rows, wanted, rcond=None)[0], -_LARGEST_STEP, _LARGEST_STEP)
        logs = logs + step
        if np.abs(step).max() < 1e-4:
            break
    return logs


def _covariance(observations: Sequence[MeasuredRun], jacobian: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    _, errors = _measured_logs(observations)
    weighted = jacobian / errors[:, None]
    return np.linalg.inv(weighted.T @ weighted + np.diag(ranges**-2))


def _why_left(name: str, jacobian: np.ndarray, spread: np.ndarray) -> str:
    """Says why runs do not determine an assumption: none depends on it, or another one explains the same."""
    place = CONSTANTS.index(name)
    if np.abs(jacobian[:, place]).max() < _FEELS:
        return "no measured phase depends on it"
    deviations = np.sqrt(np.diag(spread))
    related = np.abs(spread[place] / deviations / deviations[place])
    related[place] = 0.0
    partner = int(related.argmax())
    if related[partner] < 0.2:
        return "the measured phases depend on it too little"
    return f"not distinguishable from {CONSTANTS[partner]}"


def _phase_factors(observations: Sequence[MeasuredRun], assumed: Assumptions) -> dict[str, float]:
    """Returns a factor for each phase that is still off by more than its error, in all observations together."""
    uncertain = _NOMINAL if _is_nominal(observations) else _UNCERTAIN_PHASE
    missing: dict[str, list[tuple[float, float]]] = {}
    for each in observations:
        predicted = each.predicted(assumed)
        for phase in each.phases:
            off = log(max(each.seconds[phase], 1e-9) / max(predicted[phase], 1e-9))
            missing.setdefault(phase, []).append((off, each.errors[phase] ** -2))
    factors = {}
    for phase, found in missing.items():
        weight = sum(w for _, w in found)
        mean = sum(off * w for off, w in found) / (weight + uncertain**-2)
        if abs(mean) > _NOTABLE_PHASE * weight**-0.5:
            factors[phase] = float(np.exp(mean))
    return factors
