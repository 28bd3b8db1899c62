"""Built-in reward functions, with verl's signature: (data_source, solution_str, ground_truth, extra_info) -> score or dict(score=...)."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from mrl.reward.choices import multiple_choice
from mrl.reward.dapo_math import math_dapo
from mrl.reward.format_rules import boxed_format, think_format
from mrl.reward.math_verifier import math

Score = float | dict[str, Any]
RewardFunction = Callable[..., Score]

GSM8K_TAIL = 300  # characters: the answer stands at the end, and the pattern need not see the rest
GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """1 if the response is the ground truth, spaces around both aside, else 0."""
    return float(solution_str.strip() == str(ground_truth).strip())


def gsm8k(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> Score:
    """1 if the last `#### number` in the response's last 300 characters is the ground truth, thousands commas aside (verl's strict form).

    The part `answered` says whether there was such a number at all.
    """
    answers = GSM8K_ANSWER.findall(solution_str[-GSM8K_TAIL:])
    if not answers:
        return {"score": 0.0, "answered": 0.0}
    return {"score": float(answers[-1].replace(",", "") == str(ground_truth).replace(",", "")), "answered": 1.0}


RULES: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "math": math,
    "math_dapo": math_dapo,
    "multiple_choice": multiple_choice,
    "think_format": think_format,
    "boxed_format": boxed_format,
}

# What `auto` uses for a data_source that is not itself a rule's name; the keys are those in verl's prepared files and of `mrl data`.
RULE_OF_DATA_SOURCE: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo_reasoning": "math_dapo",
}
RULE_OF_PREFIX: dict[str, str] = {"aime": "math_dapo", "dianjin": "multiple_choice"}  # aime2024, aime_2025, dianjin/cflue_mcq, ...


def rule_name(data_source: str) -> str:
    """The rule that `auto` uses for a data source; its own name where none is known."""
    if data_source in RULES or data_source in RULE_OF_DATA_SOURCE:
        return RULE_OF_DATA_SOURCE.get(data_source, data_source)
    return next((rule for prefix, rule in RULE_OF_PREFIX.items() if data_source.startswith(prefix)), data_source)
