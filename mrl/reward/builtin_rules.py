"""Built-in reward functions with verl's signature: (data_source, solution_str, ground_truth, extra_info) -> score or
dict(score=...).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from mrl.reward.answers import boxed, conclusion, truth_text, verls_box
from mrl.reward.latex import clean
from mrl.reward.math_verifier import math
from mrl.reward.reasoning_rule import REASONING, SOURCE, reasoning_gym

Score = float | dict[str, Any]
RewardFunction = Callable[..., Score]

GSM8K_TAIL = 300  # characters: the answer is at the end, and the pattern need not search the rest
GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")

LETTERS = "ABCDEFGHIJ"
LONGEST_CHOICE = 500  # characters; a longer box is an essay
# A, (A), AB, "A, C and D"; optionally the option's own text after a period, colon or bracket: "D. 780"
_CHOICE = re.compile(rf"\(?([{LETTERS}](?:[\s,;/&{LETTERS}]|and|和|与)*)\)?(?:\s*[.:)].*)?", re.DOTALL)

DAPO_TAIL = 300  # characters
DAPO_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
DAPO_NOTHING = "[INVALID]"
DAPO_BOX_TAIL = 100  # characters

# applied in this order, each to the former result
_DAPO_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_DAPO_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes",
    "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets",
    "multiples", "\\text{s}",
    "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ",
    "^{\\circ}", "\\;", ",\\!",
    "{,}", '"', "\\dots",
)  # fmt: skip
_DAPO_PATTERNS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
        (r"(\\text\{)(.*?)(\})", r"\2"),
        (r"(\\textbf\{)(.*?)(\})", r"\2"),
        (r"(\\overline\{)(.*?)(\})", r"\2"),
        (r"(\\boxed\{)(.*)(\})", r"\2"),
        (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
        (r"(sqrt)([^{])", r"sqrt{\2}"),
    )
)


def exact_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """Returns 1 if the response equals the ground truth, except for surrounding spaces, else 0."""
    return float(solution_str.strip() == truth_text(ground_truth).strip())


def gsm8k(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> Score:
    """Returns 1 if the last `#### number` in the response's last 300 characters is the ground truth, else 0.

    Thousands commas are ignored, as in verl's strict form. Parts: `acc` equals the score, as in verl; `answered` tells
    whether there was such a number.
    """
    answers = GSM8K_ANSWER.findall(solution_str[-GSM8K_TAIL:])
    correct = float(bool(answers) and answers[-1].replace(",", "") == truth_text(ground_truth).replace(",", ""))
    return {"score": correct, "acc": correct, "answered": float(bool(answers))}


def normalised(answer: str) -> str:
    """Returns the text after the last `=`, without units, formatting and shorthand. Whole numbers lose thousands
    commas.
    """
    text = answer.rpartition("=")[2]
    for before, after in (*_DAPO_REPLACED, *((word, "") for word in _DAPO_REMOVED)):
        text = text.replace(before, after)
    for pattern, replacement in _DAPO_PATTERNS:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def math_dapo(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns `score` 1 or -1, `acc` 1 or 0, and `pred`, the answer that was compared.

    The answer is the normalised text after the last `Answer:` in the last 300 characters. Without one it is the content
    of the last `\\boxed{}` in the last 100 characters, which has to be the truth to the letter. Without both, `pred` is
    `[INVALID]`. Behaves as math_dapo of verl 0.9.1, including its quirks, so that scores are comparable with published
    runs. The layered verifier of mrl.reward.math_verifier judges better; this rule is the reference.
    """
    correct, pred = dapo_judged(solution_str, truth_text(ground_truth))
    verdict = "match"
    if not correct:
        verdict = "no_answer" if pred == DAPO_NOTHING else "wrong"
    return {"score": 1.0 if correct else -1.0, "acc": float(correct), "verdict": verdict, "pred": pred}


def dapo_judged(
    solution: str, truth: str, box_alone: bool = False, boxes_from: int = -DAPO_BOX_TAIL
) -> tuple[bool, str | None]:
    """Returns whether the answer is right, and the answer. See `math_dapo`.

    With `box_alone` no `Answer:` is read, and the answer is None without a box. `boxes_from`: where boxes are searched
    from, as an index of the last 300 characters.
    """
    tail = solution[-DAPO_TAIL:]
    box = verls_box(tail[boxes_from:])
    if box_alone:
        return box == truth, box
    stated = DAPO_ANSWER.findall(tail)
    pred = normalised(stated[-1] if stated else DAPO_NOTHING)
    if pred == DAPO_NOTHING and box is not None:
        return box == truth, box
    return pred == normalised(truth), pred


def letters(text: str) -> str | None:
    """Returns the letters that a text chooses, each once, in alphabetical order; None if it is no choice ("ALL", "the
    first").
    """
    match = _CHOICE.fullmatch(clean(text[:LONGEST_CHOICE]))
    if match is None:
        return None
    return "".join(sorted({c for c in match[1] if c in LETTERS}))


def multiple_choice(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns 1 if the last `\\boxed{}` after the reasoning chooses exactly the right letters, else 0.

    Order and separators do not matter. Parts: `acc`, `verdict`, `pred`. Unlike a search for letters anywhere in the
    box, `\\boxed{CAB}` counts as letters and `\\boxed{None}` does not. Raises ValueError for a truth that is no choice.
    """
    truth = letters("".join(map(truth_text, ground_truth if isinstance(ground_truth, list) else [ground_truth])))
    if truth is None:
        raise ValueError(f"ground_truth {ground_truth!r} names no choice; expected letters of {LETTERS}")
    boxes = boxed(conclusion(solution_str))
    pred = None
    if boxes:
        pred = letters(boxes[-1])
    correct = float(pred == truth)
    verdict = "match"
    if not correct:
        verdict = "wrong"
        if pred is None:
            verdict = "no_answer"
    return {"score": correct, "acc": correct, "verdict": verdict, "pred": pred or ""}


def think_format(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """Returns 1 if the response is reasoning, one `</think>`, and an answer after it, both non-empty; else 0.

    The opening `<think>` may be missing, because chat templates with thinking put it into the prompt.
    """
    text = solution_str.strip()
    opened = text.count("<think>")
    closed = text.count("</think>")
    if closed != 1 or opened > 1 or (opened == 1 and not text.startswith("<think>")):
        return 0.0
    thought, _, answer = text.removeprefix("<think>").partition("</think>")
    return float(bool(thought.strip()) and bool(answer.strip()))


def boxed_format(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """Returns 1 if there is exactly one non-empty `\\boxed{}` after the reasoning, else 0."""
    boxes = boxed(conclusion(solution_str))
    return float(len(boxes) == 1 and bool(boxes[0].strip()))


def environment(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> Score:
    """Returns what the environment of the response gave. Raises ValueError for a response without environment."""
    outcome = (extra_info or {}).get("outcome")
    if outcome is None:
        raise ValueError("the response acted on no environment; see rollout.turns.environments")
    reward = outcome["reward"]
    if outcome["parts"]:
        return {"acc": reward, **outcome["parts"], "score": reward}
    return reward


ENVIRONMENT = "environment"
RULES: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "math": math,
    "math_dapo": math_dapo,
    "multiple_choice": multiple_choice,
    "think_format": think_format,
    "boxed_format": boxed_format,
    ENVIRONMENT: environment,
    REASONING: reasoning_gym,
}

# Rules that score below 0, each with what a wrong response gets.
LEAST_SCORE = {"math_dapo": -1.0}

# The rules that `auto` uses for a data_source that is not itself a rule's name. Keys are those in verl's prepared files
# and of `mrl data`.
RULE_OF_DATA_SOURCE: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo_reasoning": "math_dapo",
    "hiyouga/geometry3k": "math",
}
# aime2024, aime_2025, dianjin/cflue_mcq, ...
RULE_OF_PREFIX: dict[str, str] = {"aime": "math_dapo", "dianjin": "multiple_choice", SOURCE: REASONING}


def rule_name(data_source: str) -> str:
    """Returns the rule that `auto` uses for a data source, or the source's own name if none is known."""
    if data_source in RULES or data_source in RULE_OF_DATA_SOURCE:
        return RULE_OF_DATA_SOURCE.get(data_source, data_source)
    return next((rule for prefix, rule in RULE_OF_PREFIX.items() if data_source.startswith(prefix)), data_source)
