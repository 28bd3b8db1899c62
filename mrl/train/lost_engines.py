"""Engines that died or stood still in the middle of generation, and what they were at: a file of the run directory.

    RUN/lost_engines.jsonl   a line a loss: step, engines, why; of each unfinished group there its number, the id of
                             its prompt, and tokens that had come back

The loss ends the run; resumed it goes on with these groups. A prompt that engines are lost under again and again is set
aside by its id (mrl/schedule/suspects.py), and said so; without the file it is asked for again.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mrl.errors import DataError
from mrl.schedule.suspects import Suspects, suspects

TOLD = 5  # prompts named in a message


@dataclass(frozen=True)
class Unfinished:
    """A group that a lost engine was at."""

    number: int
    prompt_id: int
    tokens: int  # that had come back before


class LostEngines:
    """What the file says, and what is added to it."""

    def __init__(self, path: Path):
        self._path = path

    def note(self, step: int, engines: Sequence[str], why: str, groups: Sequence[Unfinished]) -> str:
        """Adds a loss; what to tell of it."""
        line = {"step": step, "engines": list(engines), "why": why, "groups": [asdict(group) for group in groups]}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        prompts = ", ".join(str(group.prompt_id) for group in groups[:TOLD]) + (", ..." if len(groups) > TOLD else "")
        return f"{len(groups)} unfinished groups go on when the run is resumed (prompts {prompts})" if groups else ""

    def suspects(self) -> Suspects:
        """By the losses so far. Raises DataError for a file that is damaged; a torn last line is left out."""
        if not self._path.exists():
            return Suspects()
        lines = self._path.read_text(encoding="utf-8").split("\n")[:-1]
        try:
            found = [[group["prompt_id"] for group in json.loads(line)["groups"]] for line in lines]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self._path} is damaged ({error}); without it prompts that engines were lost under are forgotten"
            ) from error
        return suspects(found)
