"""What the metrics of a run's steps say of its plan: seconds by the plan's phases, bytes, and lengths of samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from mrl.plan.calibration_file import SYNC
from mrl.plan.devices import MeasuredLengths
from mrl.units import GIB

Row = Mapping[str, Any]
WARM = 2  # the first step whose seconds count: the one before loads kernels and caches
# phases of a plan, and the metrics that add up to them; generation is counted by its tokens instead
_SECONDS = {
    "log_prob": ("timing_s/old_log_prob",),
    "ref": ("timing_s/ref",),
    "teacher": ("timing_s/teacher",),
    "values": ("timing_s/values",),
    "critic": ("timing_s/update_critic",),
    "update": ("timing_s/update_actor",),
    SYNC: ("reshard/seconds",),
}
_REST = ("timing_s/reward", "timing_s/adv", "timing_s/record", "timing_s/switch", "timing_s/outside")
_OF_A_TOKEN = "timing_per_token_ms/gen"
_QUANTILES = 20  # equally likely lengths that stand for mean and longest
STEP = "training/global_step"


@dataclass(frozen=True)
class StepSeconds:
    """Seconds by phase, each the median over some steps, and the deviation of its logarithm."""

    median: dict[str, float]
    error: dict[str, float]
    steps: int


def usable(rows: Sequence[Row]) -> list[Row]:
    """Returns the lines of steps whose seconds and lengths count."""
    needed = ("timing_s/step", "response_length/mean", "prompt_length/mean")
    return [row for row in rows if row[STEP] >= WARM and all(row.get(name) is not None for name in needed)]


def seconds_of(rows: Sequence[Row], samples: int) -> StepSeconds:
    """Returns the seconds of steps of `samples` samples. `rows` come from `usable`, one at least."""
    by_phase: dict[str, list[float]] = {}
    for row in rows:
        for phase, spent in _seconds(row, samples).items():
            by_phase.setdefault(phase, []).append(spent)
    median = {phase: float(np.median(values)) for phase, values in by_phase.items()}
    error = {phase: _error(values) for phase, values in by_phase.items()}
    return StepSeconds({phase: spent for phase, spent in median.items() if spent > 0}, error, len(rows))


def _error(values: Sequence[float]) -> float:
    """Returns the deviation of a median's logarithm, by the spread of the values around it."""
    logs = np.log(np.maximum(values, 1e-9))
    spread = 1.4826 * float(np.median(np.abs(logs - np.median(logs))))
    return 1.2533 * spread / len(values) ** 0.5


def _seconds(row: Row, samples: int) -> dict[str, float]:
    found = {}
    if row.get(_OF_A_TOKEN) is not None:
        found["generation"] = row[_OF_A_TOKEN] * 1e-3 * row["response_length/mean"] * samples
    for phase, names in _SECONDS.items():
        if all(row.get(name) is not None for name in names):
            found[phase] = sum(row[name] for name in names)
    around_sync = (row.get("timing_s/reshard") or 0.0) - (row.get("reshard/seconds") or 0.0)
    found["rest"] = sum(row.get(name) or 0.0 for name in _REST) + max(around_sync, 0.0)
    return found


def bytes_of(rows: Sequence[Row]) -> dict[str, float]:
    """Returns measured bytes: of the fullest rank, sent by a sync, and staged by it; those that a run has metrics
    of.
    """
    names = {
        "ranks": ("perf/max_memory_allocated_gb", GIB),
        "sync sent": ("reshard/bytes_moved", 1),
        "sync staging": ("reshard/peak_staging_bytes", 1),
    }
    found = {}
    for what, (name, unit) in names.items():
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            found[what] = max(values) * unit
    return found


def lengths_of(rows: Sequence[Row], limit: int, drafted_by: str = "") -> MeasuredLengths:
    """Returns the lengths of some steps by their metrics. `rows` come from `usable`. `limit`: of responses.

    `drafted_by`: the run's rollout.speculation.method; empty if it drafted none.
    """
    prompt, response, longest, cut = (
        float(np.mean([row.get(name) or 0.0 for row in rows]))
        for name in (
            "prompt_length/mean", "response_length/mean", "response_length/max", "response_length/clip_ratio",
        )
    )  # fmt: skip
    usual = (_QUANTILES * response - longest) / (_QUANTILES - 1)
    lengths = (*[max(usual, 1.0)] * (_QUANTILES - 1), max(longest, usual, 1.0))
    ends = (1 - min(cut, 1.0)) / max(response, 1.0)
    drafts = {"accepted": _accepted(rows), "drafted_by": drafted_by} if drafted_by else {}
    return MeasuredLengths(max(prompt, 1.0), lengths, limit, min(cut, 1.0), ends, **drafts)


def _accepted(rows: Sequence[Row]) -> tuple[float, ...]:
    """Returns the share of decode steps in which a drafted first, second, ... token was accepted.

    Metrics have the acceptance of drafts, and the share of steps that drafted; without the latter all did.
    """
    shares = []
    for position in count(1):
        name = f"drafts/acceptance_at/{position}"
        found = [row[name] * row.get("drafts/step_share", 1.0) for row in rows if row.get(name) is not None]
        if not found:
            return tuple(shares)
        shares.append(float(np.mean(found)))
