"""The folder of one run: its layout and JSON lines, and a resume that neither loses nor doubles a line."""

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError
from mrl.plain_files import LINES_BYTES, parse_json, read_text, reason
from mrl.record.run_lock import RunLock, Waiting
from mrl.whole_file import appears_whole

CONFIG = "config.resolved.yaml"
METRICS = "metrics.jsonl"
SHOWN_ROWS = "shown_rows.json"
MOST_STEPS = 2**31
UNDER_WAY = "under_way.json"  # written by mrl.record.attempts


@dataclass(frozen=True)
class RunDir:
    """Paths of a run directory. `RunDir.open` creates it and takes its lock, `close` releases the lock."""

    path: Path
    lock: RunLock | None = field(default=None, compare=False, repr=False)  # None for reading only

    @property
    def config(self) -> Path:
        """The resolved configuration, as YAML."""
        return self.path / CONFIG

    @property
    def plan(self) -> Path:
        """The result of `mrl plan` for the run, as JSON."""
        return self.path / "plan.json"

    @property
    def compared(self) -> Path:
        """A line for each comparison of the plan with the run, written by mrl.tools.plan_view."""
        return self.path / "plan_compared.jsonl"

    @property
    def explained(self) -> Path:
        """The newest answer of `mrl explain`, as JSON."""
        return self.path / "explained.json"

    @property
    def metrics(self) -> Path:
        """One JSON line for each step."""
        return self.path / METRICS

    @property
    def samples(self) -> Path:
        """A file `step-N.parquet` of training samples for each step, written by mrl.record.sample_files."""
        return self.path / "samples"

    @property
    def images(self) -> Path:
        """The encoded images of prompts and turns, each in a file under its name, written by mrl.data.image_reader.

        Those of turns that nothing refers to any more are removed by mrl.driver.turn_images.
        """
        return self.path / "images"

    @property
    def spool(self) -> Path:
        """A file for each finished group that is not trained yet, in a folder of the process, written by
        mrl.generate.spool.

        Between two processes it has at most those by the newest checkpoint's weights, which the next start uses.
        """
        return self.path / "spool"

    @property
    def lost_engines(self) -> Path:
        """A line for each engine that was lost during generation, written by mrl.generate.lost_engines."""
        return self.path / "lost_engines.jsonl"

    @property
    def warnings(self) -> Path:
        """A line `step`, `text` for each warning of a step that no metric shows."""
        return self.path / "warnings.jsonl"

    @property
    def validation(self) -> Path:
        """A file `step-N.jsonl` of validation responses for each validation."""
        return self.path / "validation"

    @property
    def checkpoints(self) -> Path:
        """A folder `step-N` for each checkpoint."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Output of ranks, engines and the reward function."""
        return self.path / "logs"

    @property
    def profiles(self) -> Path:
        """A folder `step-N` with a trace of each profiled rank for each step of record.profile.steps."""
        return self.path / "profiles"

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
        """Takes `path` for this process, creates its folders, and writes the resolved configuration if there is none.

        A folder that holds a run is only opened to resume it, and keeps its configuration until `write_config`. So a
        failed resume changes nothing. Remains of attempts that reached no step are removed, and so are unfinished
        checkpoints and sample files. Raises ConfigError if another run is there, or if no folder can be written. While
        another process has the directory, RunLock.take may wait, calling `poll`, and then raises. After an error this
        process does not hold the lock.
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
        """Raises ConfigError for a folder with a run that has something to lose: a step or a checkpoint."""
        # a run that died before its first step leaves at most a validation of the untrained model
        trained = any(row["training/global_step"] > 0 for _, row in _whole_lines(self.metrics))
        if trained or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir())):
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
            self.refuse_another_run()  # another process may have trained it while this start waited for the lock
            self.truncate_metrics(-1)  # remains of an attempt that reached no step
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """Removes unfinished files of killed processes. No live process has this directory. See mrl.whole_file for
        names.
        """
        self.check_lock()
        for folder in self.checkpoints.glob("*.tmp-*"):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (*self.samples.glob(".step-*.tmp"), *self.validation.glob(".step-*.tmp")):
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Releases the lock, if this process has it."""
        if self.lock is not None:
            self.lock.give_back()

    def check_lock(self) -> None:
        """Checks the lock. Call it before writing anything.

        Raises LostLock if another process has the directory now.
        """
        if self.lock is not None:
            self.lock.check()

    def raise_if_lost(self) -> None:
        """Raises LostLock once another process is known to have the directory. Cheap enough to be called often."""
        if self.lock is not None:
            self.lock.raise_if_lost()

    def truncate_metrics(self, after_step: int) -> int:
        """Drops everything written after `after_step`, the step of the resumed checkpoint. Returns the number of kept
        lines.

        Steps that are trained again write their lines and samples again, so none is there twice. A torn last line, left
        by a crash during a write, is dropped. The file is rewritten atomically.
        """
        self.check_lock()
        kept = [line for line, row in _whole_lines(self.metrics) if row["training/global_step"] <= after_step]
        write_text(self.metrics, "".join(kept))
        for file in (*self.samples.glob("step-*.*"), *self.validation.glob("step-*.jsonl")):
            if step_of(file) > after_step:
                file.unlink()
        for name in (SHOWN_ROWS, UNDER_WAY):  # the next step writes its own
            (self.path / name).unlink(missing_ok=True)
        # event files cannot be truncated; the logger writes the kept lines again
        shutil.rmtree(self.tensorboard, ignore_errors=True)
        return len(kept)


def step_of(file: Path) -> int:
    """Returns the step of a file `step-N.*` in `samples/` or `validation/`."""
    return int(file.name.split(".")[0].removeprefix("step-"))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics.jsonl in order, without a torn last line; nothing if the file is absent.

    Raises ConfigError, naming the line, when a line in the middle is not a JSON object of numbers and texts.
    """
    return [row for _, row in _whole_lines(path)]


def _whole_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.exists():
        return
    # only "\n" ends a line: JSON text may contain U+2028 and U+0085, at which splitlines() also splits
    try:
        lines = re.findall(r"[^\n]*\n|[^\n]+", read_text(path, LINES_BYTES, errors="replace"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason(error)}") from error
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            return  # torn: only a line with its newline counts
        try:
            row = parse_json(line)
            step = row["training/global_step"]
            if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < MOST_STEPS:
                raise ValueError(f"step {str(step)[:40]}")
            if below := next((name for name, value in row.items() if isinstance(value, dict | list)), None):
                raise ValueError(f"{below} is no number")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number}: not a metrics line ({error!r}); repair or remove the line") from error
        yield line, row


def write_text(path: Path, text: str) -> None:
    """Replaces `path` atomically and durably: readers see the old text or the new one."""
    with appears_whole(path) as work:
        work.write_text(text, encoding="utf-8")


def append_lines(path: Path, lines: str, durable: bool = False) -> None:
    """Appends whole lines, all of them or none: a disk that refuses a part gets the file back as it was.

    First ends a last line that a kill during a write left torn. Readers skip it, and would skip anything appended to
    it. `durable`: the lines are on the disk when this returns. Raises OSError if the disk refuses.
    """
    with path.open("a+b", buffering=0) as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        is_torn = file.read(1) not in (b"", b"\n")
    append_whole(path, ("\n" * is_torn + lines).encode(), durable)


def append_whole(path: Path, data: bytes, durable: bool = False) -> None:
    """Appends bytes, all of them or none. As `append_lines`."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        left = memoryview(data)
        try:
            while left:
                left = left[file.write(left) :]
            if durable:
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


def json_safe(value: Any) -> Any:
    """Replaces numbers that JSON lacks (NaN, inf) by null, and numpy scalars by plain numbers."""
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
    """Formats one line of strict JSON. In the usual case Python does not check thousands of numbers one by one."""
    try:
        return json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n"
    except (ValueError, TypeError):
        return json.dumps(json_safe(row), allow_nan=False, ensure_ascii=False) + "\n"
