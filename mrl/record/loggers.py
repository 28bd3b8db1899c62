"""Loggers beside the console: TensorBoard's event files, and the services W&B, MLflow and SwanLab.

TensorBoard's files are written with its own writer and without torch. The services are optional packages. They connect
in their own thread, never in the trainer's. Written for wandb 0.2x, mlflow 3, and swanlab 0.6 or later. Each service
reads account, server and offline mode from its own environment variables (WANDB_MODE=offline, MLFLOW_TRACKING_URI,
SWANLAB_MODE=local, ...). Its local files are in the run directory. A resumed run continues its former entry, whose id
is kept in the run directory.
"""

import importlib
import io
import math
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrl.record.lossy_output import FULL
from mrl.record.run_dir import append_whole, read_metrics
from mrl.record.views import Metrics, Rows, View

STEP = "training/global_step"
COLUMNS = ("data_source", "input", "output", "gts", "score")


@dataclass(frozen=True)
class RunInfo:
    """The names under which a service files the run, and the time limit of one call to it."""

    project: str = "mrl"
    name: str = "default"
    config: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 60.0


def _finite(metrics: Metrics) -> dict[str, float]:
    return {k: float(v) for k, v in metrics.items() if v is not None and math.isfinite(v)}


def _kept_id(file: Path) -> str | None:
    if file.exists():
        return file.read_text().strip()
    return None


class WandbSink(View):
    """Weights & Biases.

    `training/global_step` is the axis, so that steps trained again after a resume keep their position.
    """

    def __init__(self, folder: Path, info: RunInfo) -> None:
        """Connects with the first call. Raises ImportError without the package."""
        self._wandb = importlib.import_module("wandb")
        self._folder = folder
        self._info = info
        self._run = None

    def _open(self) -> Any:
        if self._run is None:
            known = self._folder / "wandb.id"
            self._run = self._wandb.init(
                project=self._info.project,
                name=self._info.name,
                config=dict(self._info.config),
                dir=str(self._folder),
                id=_kept_id(known),
                resume="allow",
            )
            known.write_text(self._run.id)
            self._run.define_metric(STEP)
            self._run.define_metric("*", step_metric=STEP)
        return self._run

    def write(self, step: int, metrics: Metrics) -> None:
        self._open().log({k: v for k, v in metrics.items() if v is not None} | {STEP: step})

    def generations(self, step: int, rows: Rows) -> None:
        """Logs a table for each validation."""
        table = self._wandb.Table(columns=list(COLUMNS), data=[list(_cells(row).values()) for row in rows])
        self._open().log({"val/generations": table, STEP: step})

    def close(self) -> None:
        """Finishes the run, uploads included."""
        if self._run is not None:
            self._run.finish()


class MlflowSink(View):
    """MLflow, through its client alone. Without MLFLOW_TRACKING_URI it writes into a file of the run directory."""

    def __init__(self, folder: Path, info: RunInfo, tracking_uri: str | None = None) -> None:
        """Connects with the first call. Raises ImportError without the package."""
        self._mlflow = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        self._folder = folder
        self._info = info
        self._uri = tracking_uri or f"sqlite:///{folder.resolve()}/mlflow.db"
        self._client = None
        self._id = ""

    def _open(self) -> Any:
        if self._client is None:
            client = self._mlflow.MlflowClient(tracking_uri=self._uri)
            experiment = client.get_experiment_by_name(self._info.project)
            artifacts = None
            if self._uri.startswith("sqlite:"):
                artifacts = (self._folder.resolve() / "mlflow").as_uri()
            number = experiment.experiment_id if experiment else client.create_experiment(self._info.project, artifacts)
            known = self._folder / "mlflow.id"
            self._id = _kept_id(known) or client.create_run(number, run_name=self._info.name).info.run_id
            known.write_text(self._id)
            self._client = client
        return self._client

    def write(self, step: int, metrics: Metrics) -> None:
        """Logs the step. MLflow does not allow `@` in names, so it becomes `_at_`, as in verl."""
        now = int(1000 * time.time())
        batch = [self._entities.Metric(_mlflow_name(k), v, now, step) for k, v in _finite(metrics).items()]
        client = self._open()
        for begin in range(0, len(batch), 1000):  # the limit of one request
            client.log_batch(self._id, metrics=batch[begin : begin + 1000])

    def generations(self, step: int, rows: Rows) -> None:
        """Logs a JSON artifact for each validation."""
        shown = {"rows": [_cells(row) for row in rows]}
        self._open().log_dict(self._id, shown, f"generations/step-{step}.json")

    def close(self) -> None:
        """Ends the run."""
        if self._client is not None:
            self._client.set_terminated(self._id)


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


class SwanlabSink(View):
    """SwanLab. SWANLAB_MODE selects cloud, local, offline or disabled."""

    def __init__(self, folder: Path, info: RunInfo) -> None:
        """Connects with the first call. Raises ImportError without the package."""
        self._swanlab = importlib.import_module("swanlab")
        self._folder = folder
        self._info = info
        self._run = None

    def _open(self) -> Any:
        if self._run is None:
            known = self._folder / "swanlab.id"
            self._run = self._swanlab.init(
                project=self._info.project,
                experiment_name=self._info.name,
                config=dict(self._info.config),
                logdir=str(self._folder / "swanlab"),
                id=_kept_id(known),
                resume="allow",
            )
            known.write_text(str(self._run.id))
        return self._run

    def write(self, step: int, metrics: Metrics) -> None:
        self._open().log(_finite(metrics), step=step)

    def generations(self, step: int, rows: Rows) -> None:
        """Logs each response as a text."""
        texts = [
            self._swanlab.Text(_cell(row["output"]), caption=f"score {row['score']:g}: {_cell(row['input'])[:200]}")
            for row in rows
        ]
        self._open().log({"val/generations": texts}, step=step)

    def close(self) -> None:
        """Finishes the run."""
        if self._run is not None:
            self._swanlab.finish()


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row's values of COLUMNS, by column."""
    return {column: _cell(row[column]) for column in COLUMNS}


def _cell(value: Any) -> Any:
    if isinstance(value, str | float | int):
        return value
    return str(value)


class TensorBoardSink(View):
    """Writes scalars, and validation responses as text.

    The content of `history`, the metrics.jsonl of a resumed run, is written first. Event files cannot be truncated at
    the resumed step, so `RunDir.truncate_metrics` removes them.
    """

    def __init__(self, folder: Path, history: Path | None = None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.record_writer import RecordWriter
        from tensorboard.util.tensor_util import make_tensor_proto

        had_events = folder.is_dir() and any(folder.iterdir())
        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._metadata = create_summary_metadata
        self._tensor = make_tensor_proto
        self._records = RecordWriter
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._waiting = b""  # records for which the disk has had no room so far
        self._append(file_version="brain.Event:2")
        if history is not None and not had_events:
            for row in read_metrics(history):
                self.write(row["training/global_step"], row)

    def write(self, step: int, metrics: Metrics) -> None:
        """Writes scalars. Values of None are left out."""
        self._add(
            step,
            [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items() if value is not None],
        )

    def generations(self, step: int, rows: Rows) -> None:
        """Writes one text for each response."""
        self._add(step, [self._text(f"val/generations/{i}", as_markdown(row)) for i, row in enumerate(rows)])

    def close(self) -> None:
        """Tries once more to write what the disk has refused."""
        self._append()

    def _text(self, tag: str, text: str) -> Any:
        metadata = self._metadata(tag, "")
        return self._summary.Value(tag=tag, metadata=metadata, tensor=self._tensor([text.encode("utf-8", "replace")]))

    def _add(self, step: int, values: list[Any]) -> None:
        self._append(step=step, summary=self._summary(value=values))

    def _append(self, **event: Any) -> None:
        """Writes an event behind those that wait for room. Its own writer's thread ends with a full disk."""
        if event:
            record = io.BytesIO()
            self._records(record).write(self._event(wall_time=time.time(), **event).SerializeToString())
            self._waiting += record.getvalue()
        try:
            append_whole(self._file, self._waiting)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return
        self._waiting = b""


def as_markdown(row: Mapping[str, Any]) -> str:
    """Formats a response with its prompt, truth and score. The text is indented, so it is not taken for markup."""
    paragraphs = [f"score {row['score']:g} ({row['data_source']})"]
    for name, text in (("prompt", row["input"]), ("response", row["output"]), ("truth", row["gts"])):
        indented = "\n".join(f"    {line}" for line in str(text).splitlines())
        paragraphs += [f"{name}:", indented]
    return "\n\n".join(paragraphs)
