"""Validation scores, and whether two of them differ by more than chance.

Two validations of the same prompts are compared by prompt: the mean difference over its standard error, normally
distributed for many prompts, is rarely large by chance. Prompts are the units, because responses to a prompt are not
independent (see mrl.record.validation_metrics). The value of an answer is its `acc` if the reward gives one, as in the
core metrics. A bonus makes no answer more right.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mrl.plain_files import LINES_BYTES, parse_json, read_text
from mrl.record.validation_metrics import ACC, REWARD, Z95
from mrl.reward.items import OK, UNJUDGED

LEVEL = 0.05
FEW_PROMPTS = 12  # with fewer, the normal distribution is too optimistic


@dataclass(frozen=True)
class Response:
    """One validation response, as in validation/step-N.jsonl."""

    data_source: str
    prompt_id: int
    sample_id: int
    input: str
    output: str
    truth: str
    score: float
    reason: str
    acc: float | None = None  # the reward's part of that name; None if absent


@dataclass(frozen=True)
class Difference:
    """The mean of `second` minus `first` over shared prompts, its standard error, and its probability by chance."""

    prompts: int
    first: float
    second: float
    mean: float
    standard_error: float
    p: float
    quantity: str = REWARD  # the compared quantity: `acc`, or `reward` if a side lacks it

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval."""
        return Z95 * self.standard_error

    def significant(self, level: float = LEVEL) -> bool:
        """Tells whether chance would be as large in less than `level` of all cases, with enough prompts to say so."""
        return self.prompts >= FEW_PROMPTS and self.p < level

    def words(self, level: float = LEVEL) -> str:
        """Describes the difference in a sentence."""
        size = (
            f"{self.quantity} {self.first:.3g} to {self.second:.3g} ({self.mean:+.3g} ± {self.half_width:.2g}, "
            f"{self.prompts} prompts)"
        )
        if self.prompts < FEW_PROMPTS:
            return f"{size}: too few prompts to tell from chance"
        if not self.significant(level):
            return f"{size}: no more than chance (p = {self.p:.2g})"
        chance = "p < 0.0001"
        if not (self.p < 1e-4):
            chance = f"p = {self.p:.2g}"
        return f"{size}: {'better' if self.mean > 0 else 'worse'} by more than chance ({chance})"


def read_responses(folder: Path, step: int) -> list[Response]:
    """Returns the responses of one validation without invalid lines; nothing for a step without file."""
    return list(_responses(_lines(folder, step)))


def invalid_lines(folder: Path, step: int) -> int:
    """Returns the number of lines of one validation that are no responses with scores."""
    lines = _lines(folder, step)
    return len(lines) - len(list(_responses(lines)))


def _lines(folder: Path, step: int) -> list[str]:
    try:
        text = read_text(folder / f"step-{step}.jsonl", LINES_BYTES, errors="replace")
    except (OSError, ValueError):
        return []
    return [line for line in text.split("\n") if line]


def _responses(lines: Sequence[str]) -> Iterator[Response]:
    for line in lines:
        try:
            row: dict[str, Any] = parse_json(line)
            yield Response(
                str(row["data_source"]),
                int(row["prompt_id"]),
                int(row["sample_id"]),
                str(row["input"]),
                str(row["output"]),
                str(row.get("gts")),
                _finite(row["score"]),
                str(row["reason"]),
                _acc(row.get("reward")),
            )
        except (ValueError, KeyError, TypeError, OverflowError):
            continue


def _acc(parts: Any) -> float | None:
    value = None
    if isinstance(parts, dict):
        value = parts.get(ACC)
    if isinstance(value, bool | int | float):
        return _finite(value)
    return None


def _finite(value: Any) -> float:
    """Returns a number. Raises ValueError for NaN and infinity, which no reward function's score is."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a score of {number}")
    return number


def quantities(*validations: Sequence[Response]) -> dict[str, str]:
    """Returns the quantity to compare for each data source: `acc` if all scored answers of all `validations` have it,
    else `reward`.
    """
    scored = [one for responses in validations for one in responses if one.reason == OK]
    without = {one.data_source for one in scored if one.acc is None}
    with_acc = {one.data_source for one in scored} - without
    sources = {one.data_source for responses in validations for one in responses}
    return {source: ACC if source in with_acc else REWARD for source in sources}


def prompt_means(responses: Sequence[Response], by: Mapping[str, str]) -> dict[str, dict[tuple[int, str], float]]:
    """Returns the mean of each prompt by data source, of the quantity that `by` names.

    A prompt is its number and its text, because other data has other prompts. As in the metrics, a failed answer has
    the lowest `acc` of its data source, at most 0. A prompt with an unjudged response is left out.
    """
    left_out = {_prompt(one) for one in responses if one.reason in UNJUDGED}
    responses = [one for one in responses if _prompt(one) not in left_out]
    wrong: dict[str, float] = defaultdict(float)
    for one in responses:
        if one.reason == OK:
            wrong[one.data_source] = min(wrong[one.data_source], one.acc or 0.0)
    by_prompt: dict[str, dict[tuple[int, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in responses:
        right = wrong[one.data_source] if one.acc is None else one.acc
        value = right if by[one.data_source] == ACC else one.score
        by_prompt[one.data_source][one.prompt_id, one.input].append(value)
    means = {}
    for source, prompts in by_prompt.items():
        means[source] = {prompt: float(np.mean(values)) for prompt, values in prompts.items()}
    return means


def _prompt(response: Response) -> tuple[str, int, str]:
    return response.data_source, response.prompt_id, response.input


def differences(first: Sequence[Response], second: Sequence[Response]) -> dict[str, Difference]:
    """Compares the prompts that both answered, by data source. Skips sources with fewer than two shared prompts."""
    by = quantities(first, second)
    before = prompt_means(first, by)
    after = prompt_means(second, by)
    by_source = {}
    for source in sorted(before.keys() & after.keys()):
        shared = sorted(before[source].keys() & after[source].keys())
        if len(shared) >= 2:
            then = np.array([before[source][prompt] for prompt in shared])
            now = np.array([after[source][prompt] for prompt in shared])
            by_source[source] = replace(paired(then, now), quantity=by[source])
    return by_source


def paired(first: np.ndarray, second: np.ndarray) -> Difference:
    """Compares two values for each prompt, both [prompts], of at least two prompts."""
    change = second - first
    mean = float(change.mean())
    error = float(change.std(ddof=1) / math.sqrt(len(change)))
    chance = math.erfc(abs(mean) / error / math.sqrt(2)) if error else float(mean == 0)
    return Difference(len(change), float(first.mean()), float(second.mean()), mean, error, chance)
