"""Rewards for the form of a response alone; meant as small bonuses beside a rule for its content (reward.bonus_rules)."""

from collections.abc import Mapping
from typing import Any

from mrl.reward.answers import boxed, conclusion


def think_format(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """1 if the response is reasoning, one `</think>`, and an answer behind it, both with content.

    The opening `<think>` may be missing: chat templates with thinking on put it into the prompt.
    """
    text = solution_str.strip()
    opened, closed = text.count("<think>"), text.count("</think>")
    if closed != 1 or opened > 1 or (opened == 1 and not text.startswith("<think>")):
        return 0.0
    thought, _, answer = text.removeprefix("<think>").partition("</think>")
    return float(bool(thought.strip()) and bool(answer.strip()))


def boxed_format(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """1 if there is exactly one `\\boxed{}` with content behind the reasoning."""
    found = boxed(conclusion(solution_str))
    return float(len(found) == 1 and bool(found[0].strip()))
