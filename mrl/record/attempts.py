"""Every start of a run, and how it ended: `attempts.jsonl` in the run directory, which no resume cuts.

A start writes a line with `event` began: `time` (UTC), `command`, `versions`, `host`, `pid`, `step` (of the checkpoint
that it goes on from, 0 for a new run), `plug_ins` (key, path and SHA-256 of each file of the user's that runs). One
that goes on writes `event` rewound: `step`, behind which it does, and `seconds` of the steps after it, which are
trained again; and, where there are some, `event` resumed with `generated_again` (responses that the start before it had
generated for later steps, and that were lost with them). Every one writes `event` ready as its loop begins. Ranks that
are lost and started again inside it write `event` restarted: `step`, the last one that was finished before, and `why`,
and then those lines again; an engine that is lost and started again `event` engine_restarted: `engine`, `step`, that of
the weights that engines serve, and `why`. Its end, unless the process was killed, writes `event` ended: `time`,
`exit_code` and `message`, the codes being those of mrl.errors. `under_way.json` names the step that is under way and
how many of its responses are there; who goes on from a checkpoint counts and removes it.
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
from mrl.record.run_dir import METRICS, UNDER_WAY, json_line, open_lines, read_metrics

ATTEMPTS = "attempts.jsonl"
NOTE_EVERY_S = 1.0


@dataclass(frozen=True)
class Attempt:
    """One start of the run. `exit_code` is None while it goes on, and where it was killed."""

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
    restarted_at: tuple[int, ...] = ()  # steps that were finished when ranks were lost and started again
    engines_restarted: tuple[tuple[str, int], ...] = ()  # engines that were, each with the step of the weights then

    @property
    def is_of_this_process(self) -> bool:
        """Whether this very process made the start."""
        return (self.host, self.pid) == (socket.gethostname(), os.getpid())


class AttemptNotes:
    """What is written of a start while it goes on."""

    def __init__(self, append: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._append = append

    def generated_again(self, responses: int) -> None:
        """Notes that so many responses are lost and generated again; writes nothing where there are none."""
        if responses:
            self._append("resumed", {"generated_again": responses})

    def rewound(self, step: int, seconds: float) -> None:
        """The start goes on behind `step`; the steps after it, which took so long, are trained again."""
        self._append("rewound", {"step": step, "seconds": seconds})

    def ready(self) -> None:
        """All processes stand, and the loop begins."""
        self._append("ready", {})

    def restarted(self, step: int, why: str) -> None:
        """Ranks were lost after `step`, and are started again."""
        self._append("restarted", {"step": step, "why": why})

    def engine_restarted(self, engine: str, step: int, why: str) -> None:
        """An engine was lost while the weights of `step` were served, and is started again."""
        self._append("engine_restarted", {"engine": engine, "step": step, "why": why})


@contextmanager
def attempt(
    folder: Path,
    step: int,
    versions: Mapping[str, str],
    check: Callable[[], None] = lambda: None,
    plug_ins: Sequence[Mapping[str, str]] = (),
) -> Iterator[AttemptNotes]:
    """Writes that the run was started, and, when the block ends, how. What the disk refuses of it ends no run.

    Where `check` raises LostLock nothing is written: the last start is another's.
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
        append("ended", {"exit_code": _exit_code(error), "message": without_secrets(_text(error))})
        raise
    append("ended", {"exit_code": 0, "message": ""})


class UnderWay:
    """Keeps `under_way.json`: responses that are there of the step after `step`, as they come, at most once a second
    while more are awaited. `check`: raises LostLock where nothing may be written.
    """

    def __init__(self, folder: Path, step: int, check: Callable[[], None] = lambda: None) -> None:
        self._folder = folder
        self._step = step
        self._check = check
        self._responses = self._noted = 0
        self._noted_at = -math.inf

    def arrived(self, responses: int, asked: int) -> None:
        """Notes how many of the responses that were asked for are there. Raises LostLock."""
        self._responses = responses
        if responses == asked or time.monotonic() - self._noted_at >= NOTE_EVERY_S:
            self._note()

    def done(self, step: int) -> None:
        """The step has its line of metrics, which counts them from here on."""
        self._step = step
        self._responses = 0
        self._noted = 0

    def close(self) -> None:
        """Notes those that came since it last did, where it may."""
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
    """Writes how many responses of `step` are there. A disk that refuses it ends no run."""
    with suppress(OSError):
        (folder / UNDER_WAY).write_text(json_line({"step": step, "responses": responses}), encoding="utf-8")


def seconds_after(folder: Path, step: int) -> float:
    """Seconds of the steps after `step` so far. To be asked before RunDir.truncate_metrics, as `generated_after`."""
    later = [row for row in read_metrics(folder / METRICS) if row["training/global_step"] > step]
    return sum(float(row.get("timing_s/step", 0.0)) for row in later)


def generated_after(folder: Path, step: int, group_size: int) -> int:
    """Responses generated after `step`: those that later steps were trained on, and those of the step that was under
    way.

    Dropped groups are included. A run that goes on from `step` generates them again. Asked before
    RunDir.truncate_metrics, after which none is left.
    """
    later = [row for row in read_metrics(folder / METRICS) if row["training/global_step"] > step]
    responses = sum(int(row.get("train/trained_groups", 0)) * group_size for row in later)
    with suppress(OSError, ValueError, KeyError, TypeError):
        newest = read_json(folder / UNDER_WAY)
        if newest["step"] > max([step, *(row["training/global_step"] for row in later)]):
            responses += int(newest["responses"])
    return responses


def read_attempts(folder: Path) -> list[Attempt]:
    """The starts of a run, in order; none of a run that older versions wrote.

    A line that is no such object is passed over.
    """
    attempts: list[Attempt] = []
    for line in _lines(folder / ATTEMPTS):
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            _take(attempts, parse_json(line))
    return attempts


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All whole lines of the file, in order; a line that is no event is passed over."""
    events = []
    for line in _lines(folder / ATTEMPTS):
        with suppress(ValueError, KeyError, TypeError):
            event = parse_json(line)
            datetime.fromisoformat(event["time"])
            events.append(event)
    return events


def _lines(file: Path) -> list[str]:
    """Lines of a file; none where it is not there. Raises ConfigError for one that cannot be read."""
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
        with open_lines(folder / ATTEMPTS) as file:
            file.write(line)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, MrlError):
        return error.exit_code
    return 1


def _text(error: BaseException) -> str:
    if isinstance(error, Exception):
        return described(error)
    return type(error).__name__
