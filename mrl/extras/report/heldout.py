"""Held-out scores and whether two of them differ by more than chance.

Two validations of the same prompts are compared prompt by prompt: the mean difference over its standard error, of
normal distribution for many prompts, is what chance alone would rarely make large. Prompts are the units, as responses
of one are not independent (see mrl.record.validation_metrics).
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mrl.record.validation_metrics import Z95

LEVEL = 0.05
FEW_PROMPTS = 12  # below it the normal distribution promises too much


@dataclass(frozen=True)
class Response:
    """One held-out response, as validation/step-N.jsonl has it."""

    data_source: str
    prompt_id: int
    sample_id: int
    input: str
    output: str
    truth: str
    score: float
    reason: str


@dataclass(frozen=True)
class Difference:
    """Mean of `second` less `first` over shared prompts, its standard error and the chance of one as large without any
    effect.
    """

    prompts: int
    first: float
    second: float
    mean: float
    standard_error: float
    p: float

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval."""
        return Z95 * self.standard_error

    def significant(self, level: float = LEVEL) -> bool:
        """Whether chance alone would be as large in less than `level` of all cases, of enough prompts to say so."""
        return self.prompts >= FEW_PROMPTS and self.p < level

    def words(self, level: float = LEVEL) -> str:
        """In a sentence."""
        size = (
            f"{self.first:.3g} to {self.second:.3g} ({self.mean:+.3g} ± {self.half_width:.2g}, {self.prompts} prompts)"
        )
        if self.prompts < FEW_PROMPTS:
            return f"{size}: too few prompts to tell from chance"
        if not self.significant(level):
            return f"{size}: no more than chance (p = {self.p:.2g})"
        chance = "p < 0.0001" if self.p < 1e-4 else f"p = {self.p:.2g}"
        return f"{size}: {'better' if self.mean > 0 else 'worse'} by more than chance ({chance})"


def read_responses(folder: Path, step: int) -> list[Response]:
    """The responses of one validation; lines that are none are left out, none of a step without file."""
    try:
        text = (folder / f"step-{step}.jsonl").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return list(_responses(text.split("\n")))


def _responses(lines: Sequence[str]) -> Iterator[Response]:
    for line in lines:
        try:
            row: dict[str, Any] = json.loads(line)
            yield Response(
                str(row["data_source"]), int(row["prompt_id"]), int(row["sample_id"]), str(row["input"]),
                str(row["output"]),
                str(row.get("gts")), float(row["score"]), str(row["reason"]),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError):
            continue


def prompt_means(responses: Sequence[Response]) -> dict[str, dict[tuple[int, str], float]]:
    """Mean score of each prompt, by data source. A prompt is its number and its text: other data has other prompts."""
    by_prompt: dict[str, dict[tuple[int, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in responses:
        by_prompt[one.data_source][one.prompt_id, one.input].append(one.score)
    return {
        source: {prompt: float(np.mean(scores)) for prompt, scores in by.items()} for source, by in by_prompt.items()
    }


def differences(first: Sequence[Response], second: Sequence[Response]) -> dict[str, Difference]:
    """By data source, over the prompts that both answered; none of a source that shares no two."""
    before, after, by_source = prompt_means(first), prompt_means(second), {}
    for source in sorted(before.keys() & after.keys()):
        shared = sorted(before[source].keys() & after[source].keys())
        if len(shared) >= 2:
            by_source[source] = paired(
                np.array([before[source][p] for p in shared]), np.array([after[source][p] for p in shared])
            )
    return by_source


def paired(first: np.ndarray, second: np.ndarray) -> Difference:
    """Of two values a prompt, both [prompts], two at least."""
    change = second - first
    mean, error = float(change.mean()), float(change.std(ddof=1) / math.sqrt(len(change)))
    chance = math.erfc(abs(mean) / error / math.sqrt(2)) if error else float(mean == 0)
    return Difference(len(change), float(first.mean()), float(second.mean()), mean, error, chance)
