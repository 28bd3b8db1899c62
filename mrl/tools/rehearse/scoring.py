"""The reward of a rehearsal. It calls the user's function on every response, and notes the result.

Random weights know nothing, so most groups would have one score and no advantage. So a seeded 0 or 1 replaces the
user's value while all answers to a prompt had the same value. That value is what dynamic sampling compares, or the
score. Each group then has both. With dynamic sampling one prompt in four, the second, keeps its values and can be
replaced. Answers of validation, errors of the function and results of a wrong type go to the trainer unchanged.

It runs in the scoring processes and imports what they import. Each call prints one line of JSON, which logs/reward.log
keeps.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mrl.reward.items import OK, ONE_TURN, RewardSpec
from mrl.reward.resolve import resolve
from mrl.reward.worker import judge

ROW = "rehearsal_row"  # in extra_info: number of the row that is answered; the user's function does not see it
SETTINGS = "scoring.json"  # beside the reward's file
CALL = "rehearsed_reward"  # key of a printed line
VALIDATION = 10_000  # rows from this number on are validation rows
UNIFORM = 4  # with dynamic sampling, one prompt in so many keeps its values
_PROGRAM = '''"""Written by mrl rehearse: calls the configuration's own reward."""

from pathlib import Path

from mrl.tools.rehearse.scoring import load_scorer

compute_score = load_scorer(Path(__file__).with_name("{settings}"))
'''


@dataclass(frozen=True)
class ScoringSettings:
    """Settings of the scorer. `reward` has the fields of the RewardSpec; None where the user's file is missing.

    `keys` are parts that are compared within a group.
    """

    reward: dict[str, Any] | None
    group: int  # responses a prompt
    keys: tuple[str, ...]
    metric: str  # what dynamic sampling compares; "score" where it is off
    leaves_uniform: bool
    seed: int
    turns: bool = False  # responses have several turns, which the function may read


def write_scorer(file: Path, settings: ScoringSettings) -> None:
    """Writes the reward's file and its settings."""
    file.write_text(_PROGRAM.format(settings=SETTINGS), encoding="utf-8")
    file.with_name(SETTINGS).write_text(json.dumps(asdict(settings)), encoding="utf-8")


def load_scorer(file: Path) -> Callable[..., Any]:
    """Returns the function that the trainer calls. Raises what loading the user's own function raises."""
    settings = ScoringSettings(**json.loads(file.read_text(encoding="utf-8")))
    function = None
    if settings.reward is not None:
        function = resolve(RewardSpec(**settings.reward))
    return RehearsalScorer(settings, function)


class RehearsalScorer:
    """Scores responses one by one, and remembers those of the same group."""

    def __init__(self, settings: ScoringSettings, function: Callable[..., Any] | None):
        self._settings = settings
        self._function = function
        self._seen: dict[
            int, list[float]
        ] = {}  # row -> the user's values of its current group; rows in order of arrival

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
    ) -> Any:
        """Returns the user's answer. Its score is seeded where the group has no differences."""
        info = dict(extra_info or {})
        row = info.pop(ROW, None)
        info = ONE_TURN | info if self._settings.turns else info
        answer: Any = 0.0
        if self._function is not None:
            answer = self._function(
                data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=info
            )
        reason, own, parts, _ = judge(answer)
        if reason != OK:
            _note(row, own, None, answer)
            return answer
        of_training = isinstance(row, int) and row < VALIDATION
        given = None
        if of_training and self._says_nothing(row, parts.get(self._settings.metric, own)):
            given = self._seeded(row)
        _note(row, own, given, answer)
        if given is None and self._function is not None:
            return answer
        return self._with(answer, own if given is None else given)

    def _says_nothing(self, row: int, value: float | str) -> bool:
        """Whether all answers of the group so far, this one included, have one value."""
        seen = self._seen.setdefault(row, [])
        if len(seen) == self._settings.group:
            seen.clear()
        seen.append(value)
        left = self._settings.leaves_uniform and list(self._seen).index(row) % UNIFORM == 1
        return len(set(seen)) == 1 and not left

    def _seeded(self, row: int) -> float:
        """Alternates 0 and 1 within a group, so that both occur. The first one follows from seed and row."""
        first = random.Random(f"{self._settings.seed} {row}").randrange(2)
        return float((first + len(self._seen[row])) % 2)

    def _with(self, answer: Any, score: float) -> Any:
        """Returns the answer with another score, and with that value in the parts that groups are compared by."""
        if not isinstance(answer, dict):
            parts = {}
            if self._function is None:
                parts = dict.fromkeys(self._settings.keys, score)
            if parts:
                return {"score": score, **parts}
            return score
        return {**answer, "score": score, **{key: score for key in self._settings.keys if key in answer}}


def _note(row: Any, own: float | None, given: float | None, answer: Any) -> None:
    kind = f"a mapping with {', '.join(map(str, answer))}" if isinstance(answer, dict) else f"a {type(answer).__name__}"
    print(json.dumps({CALL: {"row": row, "own": own, "given": given, "kind": kind}}), flush=True)
