"""Engines that died or stood still in the middle of generation, and what they were at: a file of the run directory.

    RUN/lost_engines.jsonl   a line a loss: step, engines, why; of each unfinished group there its number, the id of
                             its prompt, and tokens that had come back

The loss ends the run; resumed it goes on with these groups. A prompt that engines are lost under again and again is set
aside by its id (mrl/schedule/suspects.py), and said so; without the file it is asked for again.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mrl.errors import DataError
from mrl.record.run_dir import open_lines
from mrl.schedule.suspects import Suspects, suspects

TOLD = 5  # prompts named in a message


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
        """Raises ValueError, KeyError or TypeError for a line that is none."""
        row = json.loads(line)
        groups = [Unfinished(**group) for group in row["groups"]]
        return cls(int(row["step"]), list(row["engines"]), str(row["why"]), groups)


def whole_losses(path: Path) -> tuple[list[Loss], int]:
    """Losses that can be read, in the order of time, and how many lines cannot; a last line without an end is none."""
    losses, lines = [], _lines(path)
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            losses.append(Loss.of(line))
    return losses, len(lines) - len(losses)


def _lines(path: Path) -> list[str]:
    """With their line's end; none of a file that is not there."""
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if path.exists() else []


class LostEngines:
    """What the file says, and what is added to it."""

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None):
        """`check`: raises where nothing may be written."""
        self._path, self._check = path, check

    def note(self, step: int, engines: Sequence[str], why: str, groups: Sequence[Unfinished]) -> str:
        """Adds a loss; what to tell of it."""
        self._check()
        with open_lines(self._path) as file:
            file.write(json.dumps(asdict(Loss(step, list(engines), why, list(groups)))) + "\n")
        prompts = ", ".join(str(group.prompt_id) for group in groups[:TOLD]) + (", ..." if len(groups) > TOLD else "")
        return f"{len(groups)} unfinished groups go on when the run is resumed (prompts {prompts})" if groups else ""

    def suspects(self) -> Suspects:
        """By the losses so far. Raises DataError for a file that is damaged; torn lines are passed over, and said."""
        losses, torn = [], 0
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
        return suspects([[group.prompt_id for group in loss.groups] for loss in losses])
