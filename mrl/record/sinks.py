"""Where a step's metrics go. JSONL is the record and always on; the others are views, and none of them can stop training."""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mrl.errors import ConfigError
from mrl.record.run_dir import RunDir, read_metrics

log = logging.getLogger(__name__)

Metrics = Mapping[str, float]


class Sink(Protocol):
    """A view of the metrics."""

    def write(self, step: int, metrics: Metrics) -> None: ...

    def progress(self, phase: str, done: int, total: int) -> None:
        """Called often while a long phase goes on; shows it where somebody looks."""

    def close(self) -> None: ...


def json_safe(value: Any) -> Any:
    """The same with numbers that JSON cannot hold (NaN, inf) as null, and numpy scalars as plain ones."""
    match value:
        case Mapping():
            return {str(k): json_safe(v) for k, v in value.items()}
        case list() | tuple():
            return [json_safe(v) for v in value]
        case None | bool() | int() | str():
            return value
    if hasattr(value, "item"):
        return json_safe(value.item())
    return float(value) if math.isfinite(value) else None


def json_line(row: Mapping[str, Any]) -> str:
    """One line of strict JSON. Thousands of finite numbers, the usual case, are not looked at one by one in Python."""
    try:
        return json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n"
    except (ValueError, TypeError):
        return json.dumps(json_safe(row), allow_nan=False, ensure_ascii=False) + "\n"


class JsonlSink:
    """One object a step, on disk when `write` returns. Keys keep the order in which they come, `training/global_step` first."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Metrics) -> None:
        self._file.write(json_line({"training/global_step": step} | dict(metrics)))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars in TensorBoard's event files, written with TensorBoard's own writer and without torch.

    What already stands in `history`, the metrics.jsonl of a resumed run, is written first: event files cannot be cut at the resumed step,
    so `RunDir.truncate_metrics` removes them.
    """

    def __init__(self, folder: Path, history: Path | None = None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        had_events = folder.is_dir() and any(folder.iterdir())
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(folder))
        if history is not None and not had_events:
            for row in read_metrics(history):
                self.write(row["training/global_step"], row)

    def write(self, step: int, metrics: Metrics) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items() if value is not None]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=values)))
        self._writer.flush()

    def progress(self, phase: str, done: int, total: int) -> None:
        """Nothing: event files hold finished steps."""

    def close(self) -> None:
        self._writer.close()


class Record:
    """All sinks of a run. The JSONL line is written first and its errors are raised: a run whose record cannot be written must not go on.

    A view that raises is logged once, left out from then on, and training continues.
    """

    def __init__(self, jsonl: JsonlSink, views: Mapping[str, Sink]) -> None:
        self._jsonl, self._views = jsonl, dict(views)

    def write(self, step: int, metrics: Metrics) -> None:
        self._jsonl.write(step, metrics)
        for name in list(self._views):
            self._attempt(name, lambda view: view.write(step, metrics))

    def progress(self, phase: str, done: int, total: int) -> None:
        """`done` of `total` parts of a phase, for the views."""
        for name in list(self._views):
            self._attempt(name, lambda view: view.progress(phase, done, total))

    def close(self) -> None:
        for name in list(self._views):
            self._attempt(name, lambda view: view.close())
        self._jsonl.close()

    def _attempt(self, name: str, action: Callable[[Sink], None]) -> None:
        try:
            action(self._views[name])
        except Exception:
            log.exception("trainer.logger: %s failed and is left out from now on; metrics.jsonl goes on", name)
            del self._views[name]


def _console(run_dir: RunDir, total_steps: int) -> Sink:
    from mrl.record.console import make_console

    return make_console(total_steps)


def _tensorboard(run_dir: RunDir, total_steps: int) -> Sink:
    return TensorBoardSink(run_dir.tensorboard, run_dir.metrics)


VIEWS: dict[str, Callable[[RunDir, int], Sink]] = {"console": _console, "tensorboard": _tensorboard}


def make_sinks(names: Sequence[str], run_dir: RunDir, total_steps: int) -> Record:
    """The record of a run with the views that `trainer.logger` names; `jsonl` may be named and is on anyhow.

    Raises ConfigError for a name that is none, or a view whose package is missing.
    """
    for name in names:
        if name not in VIEWS and name != "jsonl":
            raise ConfigError(f"trainer.logger: {name!r} is no logger; allowed: {', '.join(['jsonl', *VIEWS])}")
    views = {name: _view(name, run_dir, total_steps) for name in dict.fromkeys(names) if name != "jsonl"}
    return Record(JsonlSink(run_dir.metrics), views)


def _view(name: str, run_dir: RunDir, total_steps: int) -> Sink:
    try:
        return VIEWS[name](run_dir, total_steps)
    except ImportError as error:
        raise ConfigError(f"trainer.logger: {name} needs the package {error.name}; install it or take {name} off the list") from error
