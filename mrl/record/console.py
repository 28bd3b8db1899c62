"""Shows the progress of a run: one line for each step, or a live table on a terminal."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from mrl.errors import verbose
from mrl.record.views import Metrics, Rows, View

REWARD = {"reward": "critic/score/mean"}
HEADLINE = {
    "mismatch": "training/rollout_probs_diff_mean",
    "clip": "actor/pg_clipfrac",
    "length": "response_length/mean",
}
MORE = {"entropy": "actor/entropy", "grad": "actor/grad_norm", "tok/s/dev": "perf/throughput"}  # with --verbose
PHASE = "timing_s/"
SHOWN_STEPS = 12


def make_console(
    total_steps: int, stream: TextIO | None = None, logs: Path | None = None
) -> "PlainConsole | LiveConsole":
    """Returns a live table on a terminal, with the folder of logs below it; otherwise plain lines."""
    stream = stream or sys.stdout
    if stream.isatty():
        return LiveConsole(total_steps, stream, logs)
    return PlainConsole(total_steps, stream)


class TimeLeft:
    """Estimates the remaining time from the mean step time in this process.

    Set-up and validation before the first step are not counted.
    """

    def __init__(self, total_steps: int, now: Callable[[], float] = time.monotonic) -> None:
        self._total = total_steps
        self._now = now
        self._spent = 0.0
        self._steps = 0

    def after(self, step: int, metrics: Metrics) -> str:
        """Returns the time left after a step, as `1:02:03`; `?` before the first step is timed."""
        if PHASE + "step" in metrics:
            self._spent = self._spent + metrics[PHASE + "step"]
            self._steps = self._steps + 1
        if not self._steps:
            return "?"
        minutes, rest = divmod(round(max((self._total - step) * self._spent / self._steps, 0.0)), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def phases(metrics: Metrics) -> dict[str, float]:
    """Returns the seconds of each phase, longest first, without the whole step."""
    times = {
        name.removeprefix(PHASE): value
        for name, value in metrics.items()
        if name.startswith(PHASE) and name != PHASE + "step"
    }
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def validation(metrics: Metrics) -> dict[str, float]:
    """Returns the mean validation scores of this line under short names, without best-of and majority scores.

    One score is `val`. Of several each has the name of its data source, as `val gsm8k`.
    """
    scores = {name: value for name, value in metrics.items() if name.startswith("val-core/") and "/mean@" in name}
    if len(scores) == 1:
        return {"val": next(iter(scores.values()))}
    sources = [name.removeprefix("val-core/").rpartition("/mean@")[0] for name in scores]
    short = [source.rpartition("/")[0].rpartition("/")[2] or source for source in sources]
    shown = short if len(set(short)) == len(short) else sources
    return {f"val {name}": value for name, value in zip(shown, scores.values(), strict=True)}


def generation_lines(step: int, rows: Rows) -> str:
    """Formats validation responses for reading. Long texts are shortened in the middle."""
    return "".join(
        f"step {step}, {row['data_source']}, score {row['score']:g}\n  prompt: {_cut(row['input'])}\n"
        f"  response: {_cut(row['output'])}\n  truth: {_cut(str(row['gts']))}\n"
        for row in rows
    )


def _cut(text: str, length: int = 600) -> str:
    if len(text) <= length:
        return text
    return f"{text[: length // 2]} [...] {text[-length // 2 :]}"


def headline(metrics: Metrics) -> dict[str, float | None]:
    """Returns what a line shows of a step by its short name, in its order: reward, validation, then the rest."""
    more = HEADLINE | MORE if verbose() else HEADLINE
    first, rest = ({label: metrics.get(name) for label, name in names.items()} for names in (REWARD, more))
    return first | validation(metrics) | rest


def format_line(step: int, total_steps: int, metrics: Metrics, left: str) -> str:
    """Formats one plain line. What is absent is left out; phases of the step are only there with --verbose."""
    parts = [f"step {step}/{total_steps}"]
    parts += [f"{label} {_cell(value)}" for label, value in headline(metrics).items() if value is not None]
    if PHASE + "step" in metrics:
        times = ""
        if verbose():
            times = f" ({', '.join(f'{name} {seconds:.1f}' for name, seconds in phases(metrics).items())})"
        parts.append(f"{metrics[PHASE + 'step']:.1f} s{times}")
    return " | ".join([*parts, f"left {left}"])


class Pace:
    """Limits something to once in `seconds`. The first time is `seconds` after the start."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._now = now
        self._last = now()

    def due(self) -> bool:
        """Returns True when the interval has passed, and starts the next one."""
        if self._now() - self._last < self._seconds:
            return False
        self._last = self._now()
        return True


class PlainConsole(View):
    """Prints a line for each step, and sometimes a line during a long phase."""

    def __init__(self, total_steps: int, stream: TextIO, pace: Pace | None = None) -> None:
        self._total = total_steps
        self._stream = stream
        self._time_left = TimeLeft(total_steps)
        self._pace = pace or Pace(30.0)

    def progress(self, phase: str, done: int, total: int) -> None:
        """Prints how far a phase is."""
        if self._pace.due():
            print(f"{phase}: {done} of {total}", file=self._stream, flush=True)

    def write(self, step: int, metrics: Metrics) -> None:
        """Prints the step's line."""
        print(
            format_line(step, self._total, metrics, self._time_left.after(step, metrics)), file=self._stream, flush=True
        )

    def generations(self, step: int, rows: Rows) -> None:
        """Prints validation responses."""
        print(generation_lines(step, rows), end="", file=self._stream, flush=True)

    def close(self) -> None:
        """Flushes the stream."""
        self._stream.flush()


class LiveConsole(View):
    """A table of the last steps that is redrawn in place. It stays on the terminal when the run ends."""

    def __init__(self, total_steps: int, stream: TextIO, logs: Path | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._total = total_steps
        self._time_left = TimeLeft(total_steps)
        self._logs = logs
        self._rows: list[tuple[int, dict[str, float]]] = []
        self._left = "?"
        self._pace = Pace(0.25)
        self._live = Live(console=Console(file=stream), auto_refresh=False)
        self._live.start()
        self._draw("ranks and engines start")

    def write(self, step: int, metrics: Metrics) -> None:
        """Draws the table with the step's row."""
        self._rows = [*self._rows, (step, dict(metrics))][-SHOWN_STEPS:]
        self._left = self._time_left.after(step, metrics)
        self._draw(make_table(self._rows, self._total, self._left))

    def progress(self, phase: str, done: int, total: int) -> None:
        """Shows how far a phase is, below the table."""
        if self._pace.due():
            note = f"{phase}: {done} of {total}"
            self._draw(make_table(self._rows, self._total, self._left, note) if self._rows else note)

    def _draw(self, picture: Any) -> None:
        from rich.console import Group
        from rich.text import Text

        below = []
        if self._logs is not None:
            below = [Text(f"logs: {self._logs}", style="dim")]
        self._live.update(Group(picture, *below), refresh=True)

    def generations(self, step: int, rows: Rows) -> None:
        """Prints validation responses above the table."""
        self._live.console.print(generation_lines(step, rows), end="", markup=False, highlight=False)

    def close(self) -> None:
        """Leaves the last picture on the terminal."""
        self._live.stop()


def make_table(rows: list[tuple[int, dict[str, float]]], total_steps: int, left: str, note: str = "") -> Any:
    """Makes a rich table with one row for each step: headline metrics and validation scores.

    The phases of the last step that took 0.1 s or more, or `note`, are below it. Empty columns are left out, so that it
    fits 80 characters.
    """
    from rich.table import Table

    last_step, last = rows[-1]
    times = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases(last).items() if verbose() or seconds >= 0.1)
    table = Table(
        title=f"step {last_step} of {total_steps}, {left} left",
        caption=note or (f"seconds: {times}" if times else None),
        box=None,
    )
    table.padding = (0, 1, 0, 0)
    table.pad_edge = False
    cells = [_cells(step, metrics) for step, metrics in rows]
    order = max(cells, key=len)  # a row of a step with validation has the most columns
    columns = [label for label in order if any(row.get(label) for row in cells)]
    for label in columns:
        table.add_column(label, justify="right")
    for row in cells:
        table.add_row(*(row.get(label, "") for label in columns))
    return table


def _cells(step: int, metrics: Metrics) -> dict[str, str]:
    cells = {label: _cell(value) for label, value in headline(metrics).items()}
    return {"step": str(step), **cells, "seconds": _cell(metrics.get(PHASE + "step"))}


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"
