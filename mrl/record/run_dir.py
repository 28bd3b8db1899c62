"""The folder of one run: its layout and JSON lines, and how it is continued without a line lost or doubled."""

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from mrl.errors import ConfigError
from mrl.plain_files import LINES_BYTES, parse_json, read_text, reason
from mrl.record.run_lock import RunLock, Waiting
from mrl.whole_file import appears_whole

CONFIG = "config.resolved.yaml"
METRICS = "metrics.jsonl"
SHOWN_ROWS = "shown_rows.json"
MOST_STEPS = 2**31
UNDER_WAY = "under_way.json"  # see mrl.record.attempts


@dataclass(frozen=True)
class RunDir:
    """Paths of a run directory. `RunDir.open` makes it and takes its lock; `close` gives that back."""

    path: Path
    lock: RunLock | None = field(default=None, compare=False, repr=False)  # None where it is only looked at

    @property
    def config(self) -> Path:
        """The resolved configuration, as YAML."""
        return self.path / CONFIG

    @property
    def plan(self) -> Path:
        """Answer of `mrl plan` for the run, as JSON."""
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        """One JSON line a step."""
        return self.path / METRICS

    @property
    def samples(self) -> Path:
        """A file `step-N.parquet` of training samples a step; see mrl.record.sample_files."""
        return self.path / "samples"

    @property
    def spool(self) -> Path:
        """A file a group that is finished and not trained on yet, in a folder of the process; see mrl.train.spool.

        Removed between two processes.
        """
        return self.path / "spool"

    @property
    def lost_engines(self) -> Path:
        """A line an engine that was lost in the middle of generation; see mrl.train.lost_engines."""
        return self.path / "lost_engines.jsonl"

    @property
    def validation(self) -> Path:
        """A file `step-N.jsonl` of held-out responses a validation."""
        return self.path / "validation"

    @property
    def checkpoints(self) -> Path:
        """A folder `step-N` a checkpoint."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Output of ranks, engines and the reward function."""
        return self.path / "logs"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def report(self) -> Path:
        """The page that `mrl report` makes of the run."""
        return self.path / "report.html"

    @classmethod
    def open(
        cls,
        path: Path | str,
        config_yaml: str,
        resume: bool = False,
        poll: Callable[[], None] = lambda: None,
        clock: Waiting = time,
    ) -> "RunDir":
        """Takes `path` for this process, makes its folders and writes the resolved configuration where none stands.

        A folder that holds a run is opened only to resume it, and keeps its configuration until `write_config`. So an
        attempt to resume that fails changes nothing. What an attempt left that reached no step is removed, and so are
        checkpoints and files of responses that were never finished. Raises ConfigError where another run stands or
        where no folder can be written. Where another process has the directory, it raises as RunLock.take, which may
        wait and then calls `poll`. It has not got the lock where it raises.
        """
        run = cls(Path(path))
        try:
            run._make(resume)
            run = replace(run, lock=RunLock.take(run.path, poll, clock))
        except OSError as error:
            raise ConfigError(
                f"trainer.run_dir: cannot write {run.path} ({error.strerror}); give another one"
            ) from error
        try:
            run._clear(resume)
            if not (resume and run.config.exists()):
                run.write_config(config_yaml)
        except BaseException:
            run.close()
            raise
        return run

    def write_config(self, config_yaml: str) -> None:
        """Replaces the resolved configuration."""
        self.check_lock()
        write_text(self.config, config_yaml)

    def refuse_another_run(self) -> None:
        """Raises ConfigError where a run stands that has something to lose: a step, or a checkpoint."""
        if self._holds_a_run():
            raise ConfigError(
                f"trainer.run_dir: {self.path} holds another run; "
                "pass --resume to continue it (trainer.resume_mode: auto always does), or give another --run-dir, or "
                "remove the folder"
            )

    def _make(self, resume: bool) -> None:
        if not resume:
            self.refuse_another_run()
        for folder in (self.path, self.samples, self.checkpoints, self.logs):
            folder.mkdir(parents=True, exist_ok=True)

    def _clear(self, resume: bool) -> None:
        if not resume:
            self.refuse_another_run()  # which may have been trained while this start waited for its lock
            self.truncate_metrics(-1)  # what an attempt that reached no step left
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """What processes that were killed were at; no live one has this directory. See mrl.whole_file for the files."""
        self.check_lock()
        for folder in self.checkpoints.glob("*.tmp-*"):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (*self.samples.glob(".step-*.tmp"), *self.validation.glob(".step-*.tmp")):
            file.unlink(missing_ok=True)

    def _holds_a_run(self) -> bool:
        """Whether anything is there to lose.

        A run that died before its first step leaves at most a validation of the untrained model.
        """
        trained = any(row["training/global_step"] > 0 for _, row in _whole_lines(self.metrics))
        return trained or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))

    def close(self) -> None:
        """Gives the lock back, if it is this process's."""
        if self.lock is not None:
            self.lock.give_back()

    def check_lock(self) -> None:
        """Checks the lock; called before something is written.

        Raises LostLock where another process has the directory by now.
        """
        if self.lock is not None:
            self.lock.check()

    def raise_if_lost(self) -> None:
        """Raises LostLock once it is known that another process has the directory; cheap enough to be called often."""
        if self.lock is not None:
            self.lock.raise_if_lost()

    def truncate_metrics(self, after_step: int) -> int:
        """Drops what was written past `after_step`, the step of the checkpoint that is resumed; returns the number of
        lines kept.

        The steps that are trained again write their lines, and samples, again, so none is there twice. A torn last
        line, left by a crash in the middle of a write, is dropped. The file is rewritten atomically.
        """
        self.check_lock()
        kept = [line for line, row in _whole_lines(self.metrics) if row["training/global_step"] <= after_step]
        write_text(self.metrics, "".join(kept))
        for file in (*self.samples.glob("step-*.*"), *self.validation.glob("step-*.jsonl")):
            if step_of(file) > after_step:
                file.unlink()
        for name in (SHOWN_ROWS, UNDER_WAY):  # the next step writes its own
            (self.path / name).unlink(missing_ok=True)
        # its files cannot be cut; the sink writes the kept lines anew
        shutil.rmtree(self.tensorboard, ignore_errors=True)
        return len(kept)


def step_of(file: Path) -> int:
    """The step of a file `step-N.*` of `samples/` or `validation/`."""
    return int(file.name.split(".")[0].removeprefix("step-"))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, in order, without a torn last line; none of a file that is not there.

    Raises ConfigError, naming the line, when a line in the middle is no JSON object.
    """
    return [row for _, row in _whole_lines(path)]


def _whole_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.exists():
        return
    # only "\n" ends a line: JSON text may hold U+2028 and U+0085, at which splitlines() would cut too
    try:
        lines = re.findall(r"[^\n]*\n|[^\n]+", read_text(path, LINES_BYTES, errors="replace"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason(error)}") from error
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            return  # torn: a line counts once its newline is there
        try:
            row = parse_json(line)
            _check_step(row["training/global_step"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number}: not a metrics line ({error!r}); mend or remove the line") from error
        yield line, row


def _check_step(step: Any) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < MOST_STEPS:
        raise ValueError(f"step {str(step)[:40]}")


def write_text(path: Path, text: str) -> None:
    """Replaces `path` atomically and durably: readers see the old text or the new one."""
    with appears_whole(path) as work:
        work.write_text(text, encoding="utf-8")


def open_lines(path: Path) -> TextIO:
    """Opens a file of lines to add some; one that a kill in the middle of a write left torn is ended first.

    Readers pass over a torn line, and what is added to one would be lost with it.
    """
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if file.read(1) not in (b"", b"\n"):
            file.write(b"\n")
    return path.open("a", encoding="utf-8")


def json_safe(value: Any) -> Any:
    """Replaces numbers that JSON cannot hold (NaN, inf) by null, and numpy scalars by plain ones."""
    match value:
        case Mapping():
            return {str(k): json_safe(v) for k, v in value.items()}
        case list() | tuple():
            return [json_safe(v) for v in value]
        case None | bool() | int() | str():
            return value
    if hasattr(value, "item"):
        return json_safe(value.item())
    if math.isfinite(value):
        return float(value)
    return None


def json_line(row: Mapping[str, Any]) -> str:
    """One line of strict JSON. Thousands of finite numbers, the usual case, are not looked at one by one in Python."""
    try:
        return json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n"
    except (ValueError, TypeError):
        return json.dumps(json_safe(row), allow_nan=False, ensure_ascii=False) + "\n"
