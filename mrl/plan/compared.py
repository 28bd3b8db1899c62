"""Compares a run's plan with the run itself, after its first steps: seconds and bytes by phase, and lengths.

Lengths come first, since all seconds follow from them. The seconds of a phase are compared with those predicted for the
measured lengths. Where they leave the band between the better and the worse end of all assumptions, the comparison
names the assumption that explains them with the smallest change, in relation to its range.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from typing import Any

from mrl.plan.calibration import deviation_of, sync_parts, sync_seconds
from mrl.plan.calibration_file import CONSTANTS, SYNC, at_lengths
from mrl.plan.devices import Assumptions, faster, slower
from mrl.plan.fit import error_of
from mrl.plan.measured_steps import Row, bytes_of, lengths_of, seconds_of, usable
from mrl.plan.memory_phases import ACTOR, phase_bytes
from mrl.plan.plan_inputs import PlanInputs, batch_plan, engine_of
from mrl.plan.step_work import longest_response, mean_lengths
from mrl.plan.times import phase_seconds

AFTER_STEPS = (2, 5, 20)
_LENGTH_BAND = 0.25  # of an assumed length, as a share
_LEAST_S = 0.05  # seconds of a phase that are worth naming
# of an assumption: a hundredth to a hundredfold as a logarithm, found to about a hundredth
_FARTHEST = log(100)
_HALVINGS = 10


@dataclass(frozen=True)
class PlanRow:
    """One predicted value beside the measured one. `unit`: s, bytes or tokens. `planned`: before any step was seen.

    `low`, `high`: the band of `predicted`. `cause`: what explains a value outside the band; empty within.
    """

    what: str
    unit: str
    planned: float
    predicted: float
    low: float
    high: float
    measured: float
    cause: str = ""

    @property
    def is_off(self) -> bool:
        """Tells whether the measured value lies outside the band."""
        return not self.low <= self.measured <= self.high


def compare(inputs: PlanInputs, planned: Mapping[str, Any], rows: Sequence[Row]) -> list[PlanRow]:
    """Compares a stored plan with the lines of some steps of its run; empty where none has seconds."""
    rows = usable(rows)
    if not rows:
        return []
    lengths = lengths_of(rows, inputs.config.data.max_response_length, inputs.config.rollout.drafted_by)
    measured = replace(inputs, assumptions=at_lengths(inputs.assumptions, lengths))
    return [*_lengths(inputs, measured), *_seconds(measured, planned, rows), *_bytes(planned, rows)]


def _lengths(inputs: PlanInputs, measured: PlanInputs) -> list[PlanRow]:
    config = inputs.config
    assumed = mean_lengths(config, inputs.assumptions)
    found = mean_lengths(config, measured.assumptions)
    longest = longest_response(config, inputs.assumptions), longest_response(config, measured.assumptions)
    pairs = {
        "prompt, mean": (assumed.prompt, found.prompt, "prompt_share"),
        "response, mean": (assumed.response, found.response, "response_share"),
        "response, longest": (*longest, "data.max_response_length, which no response reached"),
    }
    rows = []
    for what, (before, now, cause) in pairs.items():
        low, high = before * (1 - _LENGTH_BAND), before * (1 + _LENGTH_BAND)
        found_off = PlanRow(what, "tokens", before, before, low, high, now)
        rows.append(replace(found_off, cause=cause if found_off.is_off else ""))
    return rows


def _seconds(measured: PlanInputs, planned: Mapping[str, Any], rows: Sequence[Row]) -> list[PlanRow]:
    batch = batch_plan(measured.config, measured.train)
    engine = engine_of(measured)
    found = seconds_of(rows, batch.samples).median
    sync = sync_parts(planned)
    before = planned["times"]["phase_seconds"] | {SYNC: planned["reshard"]["predicted_seconds"]}

    def predicted(assumed: Assumptions) -> dict[str, float]:
        inputs = replace(measured, assumptions=assumed)
        return phase_seconds(inputs, batch, engine) | {SYNC: sync_seconds(assumed, sync)}

    low, usual, high = (predicted(change(measured.assumptions)) for change in (faster, lambda same: same, slower))
    compared = []
    for phase, spent in found.items():
        if phase not in usual or phase not in before:
            continue
        row = PlanRow(phase, "s", before[phase], usual[phase], low[phase], high[phase], spent)
        if row.is_off and max(spent, usual[phase]) >= _LEAST_S:
            row = replace(row, cause=_cause(phase, spent, measured.assumptions, predicted, measured))
        compared.append(row)
    return compared


def _cause(
    phase: str,
    spent: float,
    assumed: Assumptions,
    predicted: Callable[[Assumptions], dict[str, float]],
    measured: PlanInputs,
) -> str:
    """Names the assumption that explains the seconds of a phase by the smallest change, and its value then."""
    nominal = measured.device.platform == "cpu"
    found = []
    for name in CONSTANTS:
        usual = getattr(assumed, name)

        def off(power: float, name: str = name, usual: float = usual) -> float:
            return log(predicted(replace(assumed, **{name: usual * exp(power)}))[phase] / spent)

        if (power := _zero(off)) is not None:
            found.append((abs(power) / deviation_of(name, nominal), name, usual * exp(power)))
    if not found:
        return "no assumption explains it alone"
    _, name, value = min(found)
    return f"{name} {getattr(assumed, name):.3g} would have to be {value:.2g}"


def _zero(function: Callable[[float], float]) -> float | None:
    """Returns where a monotonous function is 0 within _FARTHEST of 0, by halving; None where it is nowhere."""
    low, high = -_FARTHEST, _FARTHEST
    at_low, at_high = function(low), function(high)
    if at_low * at_high > 0 or at_low == at_high:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if function(middle) * at_low > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _bytes(planned: Mapping[str, Any], rows: Sequence[Row]) -> list[PlanRow]:
    phases = planned["memory"]["phases"]
    fullest = max(phases, key=lambda name: phase_bytes(planned, name).holders[ACTOR])
    of_ranks = phase_bytes(planned, fullest).holders[ACTOR]
    terms = phases[fullest]["terms"]
    error = error_of(terms)
    sync = planned["reshard"]
    bands = {
        "ranks": (
            of_ranks,
            of_ranks - error,
            of_ranks + error,
            f"of phase {fullest}, most is {phases[fullest]['largest']}",
        ),
        "sync sent": (sync["bytes_moved"],) * 3 + ("other engines or ranks than planned took part",),
        # a rank packs one round while the one before is sent
        "sync staging": (sync["peak_staging_bytes"], 0, 2 * sync["peak_staging_bytes"], "two rounds of staging"),
    }
    compared = []
    for what, size in bytes_of(rows).items():
        expected, low, high, cause = bands[what]
        row = PlanRow(what, "bytes", expected, expected, low, high, size)
        compared.append(replace(row, cause=cause if row.is_off else ""))
    return compared


def to_json(step: int, rows: Sequence[PlanRow]) -> dict[str, Any]:
    """Returns one comparison as it is stored: `step`, and `rows` with the fields of `PlanRow`."""
    return {"step": step, "rows": [asdict(row) for row in rows]}


def lines(step: int, rows: Sequence[PlanRow]) -> list[str]:
    """Describes a comparison: the step in one line, and a line for each value that is off."""
    seconds = [row for row in rows if row.unit == "s"]
    whole = sum(row.predicted for row in seconds)
    spent = sum(row.measured for row in seconds)
    phases = ", ".join(f"{row.what} {row.measured:.3g} of {row.predicted:.3g}" for row in seconds)
    found = [f"plan after step {step}: a step takes {spent:.3g} s of predicted {whole:.3g} s ({phases})"]
    found += [
        f"  {row.what}: {with_unit(row.measured, row.unit)}, planned {with_unit(row.planned, row.unit)}: {row.cause}"
        for row in rows
        if row.cause
    ]
    return found


def with_unit(value: float, unit: str) -> str:
    """Returns a value with its unit; bytes in GB."""
    match unit:
        case "bytes":
            return f"{value / 1e9:.3g} GB"
        case "tokens":
            return f"{value:.3g} tokens"
    return f"{value:.3g} s"
