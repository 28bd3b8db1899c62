"""Records every start of a run and its end in `attempts.jsonl` in the run directory. A resume never truncates the file.

Each line has an `event`:

* `began`: `time` (UTC), `command`, `versions`, `host`, `pid`, `step` (of the checkpoint that it resumes from, 0 for a
  new run), `plug_ins` (key, path and SHA-256 of each file of the user's that runs).
* `rewound`, after a resume: `step` from which it continues, and `seconds` of the later steps, which are trained again.
* `resumed`, after a resume, where there are some: `generated_again`, the responses to later steps that are lost. It
  comes again for each group that was found and is not used after all.
* `ready`: the loop begins.
* `restarted`, when lost ranks are started again: `step` (the last finished one) and `why`. The lines of a resume
  follow.
* `engine_restarted`, when a lost engine is started again: `engine`, `step` (of the weights that engines serve), `why`.
* `ended`, unless the process was killed: `time`, `exit_code` (those of mrl.errors) and `message`.

`under_way.json` names the current step and the number of its responses so far. A resume counts and removes it.
"""

import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError, EnvironmentFault, LostLock, MrlError, described
from mrl.plain_files import LINES_BYTES, parse_json, read_json, read_text, reason
from mrl.record.redact import command_without_secrets, without_secrets
from mrl.record.run_dir import METRICS, UNDER_WAY, append_lines, json_line, read_metrics

ATTEMPTS = "attempts.jsonl"
NOTE_EVERY_S = 1.0


@dataclass(frozen=True)
class Attempt:
    """One start of the run. `exit_code` is None while it runs, and if it was killed."""

    began: str
    command: tuple[str, ...]
    versions: dict[str, str]
    host: str
    pid: int
    step: int
    ended: str | None = None
    exit_code: int | None = None
    message: str = ""
    generated_again: int = 0
    restarted_at: tuple[int, ...] = ()  # finished steps at which lost ranks were started again
    # engines that were started again, each with the step of the weights then
    engines_restarted: tuple[tuple[str, int], ...] = ()

    @property
    def is_of_this_process(self) -> bool:
        """Tells whether this process made the start."""
        return (self.host, self.pid) == (socket.gethostname(), os.getpid())


class AttemptNotes:
    """Writes the events of a start while it runs."""

    def __init__(self, append: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._append = append

    def generated_again(self, responses: int) -> None:
        """Records the number of responses that are lost and generated again. Writes nothing for 0."""
        if responses:
            self._append("resumed", {"generated_again": responses})

    def rewound(self, step: int, seconds: float) -> None:
        """Records that the start continues after `step`, and the seconds of later steps, which are trained again."""
        self._append("rewound", {"step": step, "seconds": seconds})

    def ready(self) -> None:
        """Records that all processes have started and the loop begins."""
        self._append("ready", {})

    def restarted(self, step: int, why: str) -> None:
        """Records that ranks were lost after `step` and are started again."""
        self._append("restarted", {"step": step, "why": why})

    def engine_restarted(self, engine: str, step: int, why: str) -> None:
        """Records that an engine was lost while it served the weights of `step`, and is started again."""
        self._append("engine_restarted", {"engine": engine, "step": step, "why": why})


@contextmanager
def attempt(
    folder: Path,
    step: int,
    versions: Mapping[str, str],
    check: Callable[[], None] = lambda: None,
    plug_ins: Sequence[Mapping[str, str]] = (),
) -> Iterator[AttemptNotes]:
    """Records the start of the run and, when the block ends, its end. A disk that refuses to write does not end the
    run.

    Nothing is written where `check` raises LostLock, because the last start then belongs to another process.
    """
    append = partial(_append, folder, check)
    began = {
        "command": command_without_secrets(sys.argv),
        "versions": dict(versions),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "step": step,
        "plug_ins": [dict(each) for each in plug_ins],
    }
    append("began", began)
    try:
        yield AttemptNotes(append)
    except BaseException as error:
        exit_code = error.exit_code if isinstance(error, MrlError) else 1
        append("ended", {"exit_code": exit_code, "message": without_secrets(_text(error))})
        raise
    append("ended", {"exit_code": 0, "message": ""})


class UnderWay:
    """Keeps `under_way.json`: the number of responses of the step after `step`, written at most once a second.

    The last response is always recorded. `check` raises LostLock where nothing may be written.
    """

    def __init__(self, folder: Path, step: int, check: Callable[[], None] = lambda: None) -> None:
        self._folder = folder
        self._step = step
        self._check = check
        self._responses = self._noted = 0
        self._noted_at = -math.inf

    def arrived(self, responses: int, asked: int) -> None:
        """Records how many of the requested responses have arrived. Raises LostLock."""
        self._responses = responses
        if responses == asked or time.monotonic() - self._noted_at >= NOTE_EVERY_S:
            self._note()

    def done(self, step: int) -> None:
        """Says that the step's metrics are written, which count its responses from now on."""
        self._step = step
        self._responses = 0
        self._noted = 0

    def close(self) -> None:
        """Records the responses since the last write, if it may still write."""
        if self._responses > self._noted:
            with suppress(LostLock):
                self._note()

    def _note(self) -> None:
        self._noted_at = time.monotonic()
        with suppress(EnvironmentFault):
            self._check()
            note_under_way(self._folder, self._step + 1, self._responses)
            self._noted = self._responses


def note_under_way(folder: Path, step: int, responses: int) -> None:
    """Writes how many responses of `step` have arrived. A disk that refuses to write does not end the run."""
    with suppress(OSError):
        (folder / UNDER_WAY).write_text(json_line({"step": step, "responses": responses}), encoding="utf-8")


def seconds_after(folder: Path, step: int) -> float:
    """Returns the seconds of all steps after `step`. Call it before RunDir.truncate_metrics removes them."""
    later = [row for row in read_metrics(folder / METRICS) if row["training/global_step"] > step]
    return sum(float(row.get("timing_s/step", 0.0)) for row in later)


def generated_after(folder: Path, step: int, group_size: int) -> int:
    """Returns the number of responses generated after `step`: for later finished steps, and for the current one.

    Dropped groups are included. A run that resumes from `step` generates all of them again. Call it before
    RunDir.truncate_metrics removes them.
    """
    later = [row for row in read_metrics(folder / METRICS) if row["training/global_step"] > step]
    responses = sum(int(row.get("train/trained_groups", 0)) * group_size for row in later)
    with suppress(OSError, ValueError, KeyError, TypeError):
        newest = read_json(folder / UNDER_WAY)
        if newest["step"] > max([step, *(row["training/global_step"] for row in later)]):
            responses += int(newest["responses"])
    return responses


def read_attempts(folder: Path) -> list[Attempt]:
    """Returns the starts of a run in order; nothing without the file.

    Lines that are not such an object are skipped.
    """
    attempts: list[Attempt] = []
    for line in _lines(folder / ATTEMPTS):
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            _take(attempts, parse_json(line))
    return attempts


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Returns all complete lines of the file in order. A line that is not an event is skipped."""
    events = []
    for line in _lines(folder / ATTEMPTS):
        with suppress(ValueError, KeyError, TypeError):
            event = parse_json(line)
            datetime.fromisoformat(event["time"])
            events.append(event)
    return events


def _lines(file: Path) -> list[str]:
    """Returns the lines of a file; nothing if it is absent. Raises ConfigError if it cannot be read."""
    try:
        return read_text(file, LINES_BYTES, errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {reason(error)}") from error


def _take(attempts: list[Attempt], row: dict[str, Any]) -> None:
    if row["event"] == "began":
        versions = {str(name): str(version) for name, version in row["versions"].items()}
        attempts.append(
            Attempt(
                str(row["time"]),
                tuple(command_without_secrets(list(map(str, row["command"])))),
                versions,
                str(row["host"]),
                int(row["pid"]),
                int(row["step"]),
                generated_again=int(row.get("generated_again", 0)),
            )
        )
    elif attempts and row["event"] == "resumed":
        lost = attempts[-1].generated_again + int(row["generated_again"])
        attempts[-1] = replace(attempts[-1], generated_again=lost)
    elif attempts and row["event"] == "restarted":
        attempts[-1] = replace(attempts[-1], restarted_at=(*attempts[-1].restarted_at, int(row["step"])))
    elif attempts and row["event"] == "engine_restarted":
        engine = (str(row["engine"]), int(row["step"]))
        attempts[-1] = replace(attempts[-1], engines_restarted=(*attempts[-1].engines_restarted, engine))
    elif attempts:
        ended = {
            "ended": str(row["time"]),
            "exit_code": int(row["exit_code"]),
            "message": without_secrets(str(row["message"])),
        }
        attempts[-1] = Attempt(**vars(attempts[-1]) | ended)


def _append(folder: Path, check: Callable[[], None], event: str, row: Mapping[str, Any]) -> None:
    line = json_line({"event": event, "time": datetime.now(UTC).isoformat(timespec="seconds")} | row)
    with suppress(OSError, EnvironmentFault, LostLock):
        check()
        append_lines(folder / ATTEMPTS, line)


def _text(error: BaseException) -> str:
    if isinstance(error, Exception):
        return described(error)
    return type(error).__name__
