"""Where a step's metrics go. JSONL is the record and always on. The others are views and cannot stop training."""

import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mrl.errors import ConfigError, EnvironmentFault, MrlError
from mrl.record.loggers import MlflowSink, RunInfo, SwanlabSink, TensorBoardSink, WandbSink
from mrl.record.run_dir import RunDir, append_lines, json_line
from mrl.record.views import Metrics, Rows, View, ViewThread


class JsonlSink:
    """Writes one object for each step, which is on disk when `write` returns, unless the disk is full.

    Then the line waits in memory, is printed about, and comes before the next one. Keys keep their order,
    `training/global_step` first. `check` raises where nothing may be written.
    """

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None) -> None:
        """Opens the file. Raises EnvironmentFault where the disk does not let it."""
        check()
        self._path = path
        self._check = check
        self._waiting: dict[int, str] = {}  # by step: lines that the disk has refused so far
        try:
            append_lines(path, "")
        except OSError as error:
            raise EnvironmentFault(f"{path} cannot be opened for new lines ({error.strerror})") from error

    def write(self, step: int, metrics: Metrics) -> None:
        """Appends the step's line durably, behind those that the disk refused before."""
        self._check()
        self._waiting = {earlier: line for earlier, line in self._waiting.items() if earlier < step}
        self._waiting[step] = json_line({"training/global_step": step} | dict(metrics))
        if fault := self._refusal():
            print(f"error: {self._path}: {fault}; not written yet: {self._steps()}. Training goes on", flush=True)

    def close(self) -> None:
        """Tries once more to write what the disk has refused. Prints which lines are lost."""
        if not self._waiting:
            return
        try:
            self._check()
            fault = self._refusal()
        except MrlError as lost:
            fault = str(lost)
        if fault:
            print(f"error: {self._path}: {fault}; lost: {self._steps()}", flush=True)

    def _refusal(self) -> str:
        """Writes the lines that wait. Returns why the disk refuses them; empty if they are written."""
        try:
            append_lines(self._path, "".join(self._waiting.values()), durable=True)
        except OSError as error:
            return error.strerror or str(error)
        self._waiting.clear()
        return ""

    def _steps(self) -> str:
        return ", ".join(f"the line of step {step}" for step in self._waiting)


class Record:
    """All destinations of a run's metrics.

    The JSONL line is written first. Where the disk is full it waits in memory, and the run goes on.

    A view has its own thread. A view that raises, or spends more than `timeout_s` seconds on one call, is logged once
    and then left out. Training continues. It only waits for views at the end of the run, at most for `timeout_s`
    seconds.
    """

    def __init__(self, jsonl: JsonlSink, views: Mapping[str, View], timeout_s: float = 60.0) -> None:
        self._jsonl = jsonl
        self._timeout_s = timeout_s
        self._views = [ViewThread(name, view, timeout_s) for name, view in views.items()]

    def write(self, step: int, metrics: Metrics) -> None:
        """Writes the line. The views follow in their own threads."""
        self._jsonl.write(step, metrics)
        kept = dict(metrics)  # the caller may change its own mapping meanwhile
        self._call(lambda view: view.write(step, kept))

    def progress(self, phase: str, done: int, total: int) -> None:
        """Tells the views that `done` of `total` parts of a phase are finished. Dropped for views that are busy."""
        self._call(lambda view: view.progress(phase, done, total), droppable=True)

    def generations(self, step: int, rows: Rows) -> None:
        """Gives a few validation responses to the views that show text."""
        self._call(lambda view: view.generations(step, rows))

    def close(self) -> None:
        """Waits for the views to finish, for `timeout_s` seconds in total."""
        views = [view for view in self._views if view.alive]
        for view in views:
            view.ask_to_close()
        deadline = time.monotonic() + self._timeout_s
        for view in views:
            view.wait_closed(deadline)
        self._jsonl.close()

    def _call(self, job: Callable[[View], None], droppable: bool = False) -> None:
        self._views = [view for view in self._views if view.alive]
        for view in self._views:
            view.call(job, droppable)


def _console(run_dir: RunDir, total_steps: int, info: RunInfo) -> View:
    from mrl.record.console import make_console

    return make_console(total_steps, logs=run_dir.logs)


VIEWS: dict[str, Callable[[RunDir, int, RunInfo], View]] = {
    "console": _console,
    "tensorboard": lambda run_dir, total_steps, info: TensorBoardSink(run_dir.tensorboard, run_dir.metrics),
    "wandb": lambda run_dir, total_steps, info: WandbSink(run_dir.path, info),
    "mlflow": lambda run_dir, total_steps, info: MlflowSink(run_dir.path, info, os.environ.get("MLFLOW_TRACKING_URI")),
    "swanlab": lambda run_dir, total_steps, info: SwanlabSink(run_dir.path, info),
}
HOSTED = ("wandb", "mlflow", "swanlab")  # extras of the installation, and packages, of the same name


def check_packages(names: Sequence[str]) -> None:
    """Raises ConfigError for a view whose package is not installed. Imports nothing, so it can run before anything
    starts.
    """
    for name in names:
        if name in HOSTED and importlib.util.find_spec(name) is None:
            raise ConfigError(_missing(name, name))


def _missing(view: str, package: str | None) -> str:
    cure = "install it"
    if view in HOSTED:
        cure = f"pip install 'mrl[{view}]'"
    return f"trainer.logger: {view} needs the package {package}; {cure}, or remove {view} from the list"


def make_sinks(
    names: Sequence[str],
    run_dir: RunDir,
    total_steps: int,
    info: RunInfo | None = None,
    more: Mapping[str, View] | None = None,
) -> Record:
    """Makes the record of a run with the views that `trainer.logger` names. `jsonl` is always on and may be named.

    `more` are further views. Raises ConfigError for an unknown name, or a view whose package is missing or broken.
    Raises EnvironmentFault if the disk or the network refuses a view.
    """
    info = info or RunInfo()
    for name in names:
        if name not in VIEWS and name != "jsonl":
            raise ConfigError(f"trainer.logger: {name!r} is not a logger; allowed: {', '.join(['jsonl', *VIEWS])}")
    views = {name: _view(name, run_dir, total_steps, info) for name in dict.fromkeys(names) if name != "jsonl"}
    return Record(JsonlSink(run_dir.metrics, run_dir.check_lock), {**views, **(more or {})}, info.timeout_s)


def _view(name: str, run_dir: RunDir, total_steps: int, info: RunInfo) -> View:
    try:
        return VIEWS[name](run_dir, total_steps, info)
    except ImportError as error:
        raise ConfigError(_missing(name, error.name)) from error
    except Exception as error:
        # a broken installation can raise anything, and a run should not begin without what was requested
        fault = EnvironmentFault if isinstance(error, OSError) else ConfigError
        what = f"{type(error).__name__}: {error}"
        raise fault(
            f"trainer.logger: {name} cannot be started ({what}); repair it, or remove {name} from the list"
        ) from error
