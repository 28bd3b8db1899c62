"""Engines that died or stood still in the middle of generation, and what they were at: a file of the run directory.

    RUN/lost_engines.jsonl   a line a loss: step, engines, why; of each unfinished group there its number, the id of
                             its prompt, and tokens that had come back

The run goes on without the engine, or ends and is resumed: both with these groups. A prompt that engines are lost under
again and again is set aside by its id (mrl/schedule/suspects.py), and said so; without the file it is asked for again.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mrl.errors import DataError
from mrl.plain_files import LINES_BYTES, parse_json, read_text, reason
from mrl.record.run_dir import open_lines
from mrl.schedule.suspects import Suspects, suspects

TOLD = 5  # prompts named in a message
AGAIN = "started again inside the run"  # why of a loss that the run did without


@dataclass(frozen=True)
class Unfinished:
    """A group that a lost engine was at."""

    number: int
    prompt_id: int
    tokens: int  # that had come back before


@dataclass(frozen=True)
class Loss:
    """A line of the file. `groups`: what the engines had not finished."""

    step: int
    engines: list[str]
    why: str
    groups: list[Unfinished]

    @classmethod
    def of(cls, line: str) -> "Loss":
        """Reads a line. Raises ValueError, KeyError or TypeError for a line that is no loss."""
        row = parse_json(line)
        groups = [Unfinished(**group) for group in row["groups"]]
        return cls(int(row["step"]), list(row["engines"]), str(row["why"]), groups)


def whole_losses(path: Path) -> tuple[list[Loss], int]:
    """Losses that can be read, in the order of time, and how many lines cannot; a last line without an end is none."""
    losses = []
    lines = _lines(path)
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            losses.append(Loss.of(line))
    return losses, len(lines) - len(losses)


def _lines(path: Path) -> list[str]:
    """Lines with their ends; none of a file that is not there. Raises DataError for one that cannot be read."""
    if not path.exists():
        return []
    try:
        return read_text(path, LINES_BYTES, errors="replace").split("\n")[:-1]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {reason(error)}") from error


class LostEngines:
    """What the file says, and what is added to it."""

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None):
        """`check`: raises where nothing may be written."""
        self._path = path
        self._check = check
        self._losses: list[Loss] | None = None  # those of the file as it was read, and what was noted since

    def note(self, step: int, engines: Sequence[str], why: str, groups: Sequence[Unfinished]) -> str:
        """Adds a loss; what to tell of it."""
        self._check()
        loss = Loss(step, list(engines), why, list(groups))
        if self._losses is not None:
            self._losses.append(loss)
        with open_lines(self._path) as file:
            file.write(json.dumps(asdict(loss)) + "\n")
        prompts = ", ".join(str(group.prompt_id) for group in groups[:TOLD]) + (", ..." if len(groups) > TOLD else "")
        if groups:
            return f"{len(groups)} unfinished groups go on when the run is resumed (prompts {prompts})"
        return ""

    def suspects(self) -> Suspects:
        """Suspects by the losses so far. Raises DataError for a damaged file; torn lines are passed over, and said."""
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
        """Suspects by what `suspects` read and what was noted since, also where the disk did not take it."""
        return suspects([[group.prompt_id for group in loss.groups] for loss in self._losses or []])
