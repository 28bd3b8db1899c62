"""Records engines that died or stopped during generation, and their unfinished groups, in a file of the run directory.

    RUN/lost_engines.jsonl   a line a loss: step, engines, why; of each unfinished group there its number, the id of
                             its prompt, and tokens that had come back

The run continues without the engine, or ends and is resumed. In both cases it continues these groups. A prompt that
repeatedly kills engines is set aside by its id (mrl/schedule/suspects.py), with a message. Without the file it is
requested again.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mrl.errors import DataError
from mrl.plain_files import LINES_BYTES, parse_json, read_text, reason
from mrl.record.run_dir import append_lines
from mrl.schedule.suspects import Suspects, suspects

TOLD = 5  # prompts that a message names
AGAIN = "started again inside the run"  # the reason recorded for a loss that did not end the run


@dataclass(frozen=True)
class Unfinished:
    """An unfinished group on a lost engine."""

    number: int
    prompt_id: int
    tokens: int  # tokens that had arrived before

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Unfinished":
        """Reads a group of a line. Raises as `Loss.of`."""
        return cls(int(row["number"]), int(row["prompt_id"]), int(row["tokens"]))


@dataclass(frozen=True)
class Loss:
    """A line of the file. `groups`: the unfinished groups of the engines."""

    step: int
    engines: list[str]
    why: str
    groups: list[Unfinished]

    @classmethod
    def of(cls, line: str) -> "Loss":
        """Reads a line. Raises ValueError, KeyError or TypeError for a line that is no loss."""
        row = parse_json(line)
        groups = [Unfinished.of(group) for group in row["groups"]]
        engines = row["engines"]
        if not isinstance(engines, list) or not all(isinstance(engine, str) for engine in engines):
            raise TypeError("engines are a list of names")
        return cls(int(row["step"]), engines, str(row["why"]), groups)


def whole_losses(path: Path) -> tuple[list[Loss], int]:
    """Returns the readable losses, in order of time, and the number of unreadable lines.

    A last line without an end is not a loss.
    """
    losses = []
    lines = _lines(path)
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            losses.append(Loss.of(line))
    return losses, len(lines) - len(losses)


def _lines(path: Path) -> list[str]:
    """Returns lines with their ends; none if the file does not exist. Raises DataError for an unreadable file."""
    if not path.exists():
        return []
    try:
        return read_text(path, LINES_BYTES, errors="replace").split("\n")[:-1]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {reason(error)}") from error


class LostEngines:
    """The losses in the file, and those that are added."""

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None):
        """`check` raises if nothing may be written."""
        self._path = path
        self._check = check
        self._losses: list[Loss] | None = None  # losses of the file when it was read, and those recorded since

    def note(self, step: int, engines: Sequence[str], why: str, groups: Sequence[Unfinished]) -> str:
        """Adds a loss. Returns the message about it."""
        self._check()
        loss = Loss(step, list(engines), why, list(groups))
        if self._losses is not None:
            self._losses.append(loss)
        append_lines(self._path, json.dumps(asdict(loss)) + "\n")
        prompts = ", ".join(str(group.prompt_id) for group in groups[:TOLD]) + (", ..." if len(groups) > TOLD else "")
        if groups:
            return f"{len(groups)} unfinished groups go on when the run is resumed (prompts {prompts})"
        return ""

    def suspects(self) -> Suspects:
        """Returns suspects from the losses so far. Raises DataError for a damaged file. Skips torn lines with a
        message.
        """
        losses = []
        torn = 0
        for line in _lines(self._path):
            try:
                losses.append(Loss.of(line))
            except json.JSONDecodeError:
                torn += 1
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{self._path} is damaged ({error}); without it prompts that engines were lost under are forgotten"
                ) from error
        if torn:
            print(
                f"warning: {self._path}: {torn} torn lines are passed over, of losses written as a process was killed"
            )
        self._losses = losses
        return self.suspects_now()

    def suspects_now(self) -> Suspects:
        """Returns suspects from the losses that `suspects` read and those recorded since, even if the disk refused
        these.
        """
        return suspects([[group.prompt_id for group in loss.groups] for loss in self._losses or []])
