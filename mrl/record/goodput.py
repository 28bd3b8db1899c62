"""Divides the wall time of a run since its first start into steps that remain and time lost, by cause.

The input is `attempts.jsonl` (described in attempts.py) and the metrics of the steps. A killed start records no end.
What it was doing when killed, and the time until the next start, therefore count as one cause.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError
from mrl.record.attempts import read_events
from mrl.record.run_dir import RunDir, read_metrics
from mrl.record.run_lock import in_use

STARTING = "starting the run"
RESTARTING = "starting lost ranks again"
AGAIN = "steps that were trained again"
BESIDE = "beside finished steps"  # the step that a loss interrupted, validation before the first step, the last save
DOWN = "between an end and the next start"
KILLED = "after the last step of killed starts, to the next start"
CAUSES = (STARTING, RESTARTING, AGAIN, BESIDE, DOWN, KILLED)
_LOOP = "loop"


@dataclass(frozen=True)
class Goodput:
    """Times in seconds. `useful`: steps that remain in metrics.jsonl; `lost`: by cause, without causes of 0 seconds."""

    wall: float
    useful: float
    lost: Mapping[str, float]

    @property
    def share(self) -> float:
        """Useful seconds as a share of the wall time."""
        if self.wall:
            return self.useful / self.wall
        return 0.0

    def __str__(self) -> str:
        lost = ", ".join(f"{cause} {seconds:.0f}" for cause, seconds in self.lost.items())
        return (
            f"goodput {self.share:.2f}: {self.useful:.0f} s of steps in {self.wall:.0f} s since the first start"
            f"{f'; lost seconds: {lost}' if lost else ''}"
        )


@dataclass
class _Interval:
    """Time of one kind. `step` is the last finished one at its beginning, or infinite if not known yet."""

    kind: str
    began: float
    step: float
    seconds: float = 0.0
    is_killed: bool = False
    again: float = 0.0  # seconds of its steps that were trained again later


@dataclass
class _Timeline:
    """The intervals so far, of which the last one is still open."""

    intervals: list[_Interval] = field(default_factory=list)

    def turn(self, kind: str, at: float, step: float = math.inf, is_killed: bool = False) -> None:
        """Ends the interval and begins another."""
        if self.intervals:
            self.intervals[-1].seconds = at - self.intervals[-1].began
            self.intervals[-1].is_killed = is_killed
        self.intervals.append(_Interval(kind, at, step))

    def rewound(self, step: int, seconds: float) -> None:
        """Marks `seconds` of the newest intervals as trained again: the steps after `step`."""
        self.intervals[-1].step = step
        for interval in reversed(self.intervals[:-1]):
            if interval.kind == _LOOP:
                own = min(seconds, interval.seconds - interval.again)
                interval.again += own
                seconds -= own


def goodput(events: Iterable[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], now: float) -> Goodput | None:
    """Computes goodput from the events of attempts.jsonl and the rows of metrics.jsonl; None if no loop began.

    An event that lacks what it needs is skipped.
    `now` is in seconds since the epoch: the last known moment of a run that has not ended.
    """
    timeline = _Timeline()
    for event in events:
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            _take(timeline, event)
    if all(interval.kind != _LOOP for interval in timeline.intervals):
        return None
    last = timeline.intervals[-1]
    last.seconds = 0.0 if last.kind == DOWN else max(0.0, now - last.began)
    return _summed(timeline.intervals, _durations(rows))


def _durations(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Returns the seconds of each step. A step whose row has no number takes no time."""
    steps = {}
    for row in rows:
        with suppress(TypeError, ValueError):
            if row["training/global_step"] > 0:
                steps[row["training/global_step"]] = _finite(row.get("timing_s/step", 0.0))
    return steps


def _finite(value: Any) -> float:
    """Returns a number. Raises ValueError or TypeError for anything else."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"not finite: {number}")
    return number


def _take(timeline: _Timeline, event: Mapping[str, Any]) -> None:
    kind = event.get("event")
    at = datetime.fromisoformat(event["time"]).timestamp()
    goes_on = bool(timeline.intervals) and timeline.intervals[-1].kind != DOWN
    if kind == "began":
        timeline.turn(STARTING, at, int(event["step"]), is_killed=goes_on)
    elif not goes_on:
        return
    elif kind == "ready":
        timeline.turn(_LOOP, at, timeline.intervals[-1].step)
    elif kind == "restarted":
        timeline.turn(RESTARTING, at)
    elif kind == "rewound":
        timeline.rewound(int(event["step"]), _finite(event["seconds"]))
    elif kind == "ended":
        timeline.turn(DOWN, at)


def _summed(intervals: Sequence[_Interval], steps: Mapping[int, float]) -> Goodput:
    lost = dict.fromkeys(CAUSES, 0.0)
    useful = 0.0
    for number, interval in enumerate(intervals):
        until = min((later.step for later in intervals[number + 1 :]), default=math.inf)
        kept = sum(seconds for step, seconds in steps.items() if interval.step < step <= until)
        useful += kept
        rest = max(0.0, interval.seconds - kept - interval.again)
        lost[_cause(interval)] += rest
        lost[AGAIN] += interval.again
    wall = sum(interval.seconds for interval in intervals)
    return Goodput(wall, useful, {cause: seconds for cause, seconds in lost.items() if seconds > 0})


def _cause(interval: _Interval) -> str:
    if interval.kind != _LOOP:
        return interval.kind
    if interval.is_killed:
        return KILLED
    return BESIDE


def goodput_of(folder: Path) -> Goodput | None:
    """Computes goodput of a run directory, up to now if the run is alive.

    A killed run counts up to its last line of metrics.
    """
    run = RunDir(folder)
    events = read_events(folder)
    try:
        now = time.time() if in_use(folder) else run.metrics.stat().st_mtime
        return goodput(events, read_metrics(run.metrics), now)
    except (OSError, ConfigError):
        return None
