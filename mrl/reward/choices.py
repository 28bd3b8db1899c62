"""Multiple choice, one right letter or several: the letters of the last box against those of the truth."""

import re
from collections.abc import Mapping
from typing import Any

from mrl.reward.answers import boxed, conclusion
from mrl.reward.latex import clean

LETTERS = "ABCDEFGHIJ"
LONGEST = 500  # characters; a box with more is an essay
# A, (A), AB, "A, C and D"; then perhaps the option's own text behind a period, colon or bracket: "D. 780"
_CHOICE = re.compile(rf"\(?([{LETTERS}](?:[\s,;/&{LETTERS}]|and|和|与)*)\)?(?:\s*[.:)].*)?", re.DOTALL)


def letters(text: str) -> str | None:
    """The letters that a text chooses, in the order of the alphabet, each once; None where it is no choice ("ALL", "the first")."""
    match = _CHOICE.fullmatch(clean(text[:LONGEST]))
    if match is None:
        return None
    return "".join(sorted({c for c in match[1] if c in LETTERS}))


def multiple_choice(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """1 if the last `\\boxed{}` after the reasoning chooses exactly the right letters, order and separators aside, else 0.

    Parts: `acc`, `verdict`, `pred`. Unlike a search for letters anywhere in the box, `\\boxed{CAB}` as a word of letters counts and
    `\\boxed{None}` does not. Raises ValueError for a truth that is no choice.
    """
    truth = letters("".join(ground_truth) if isinstance(ground_truth, list) else str(ground_truth))
    if truth is None:
        raise ValueError(f"ground_truth {ground_truth!r} names no choice; expected letters of {LETTERS}")
    boxes = boxed(conclusion(solution_str))
    pred = letters(boxes[-1]) if boxes else None
    correct = float(pred == truth)
    verdict = "match" if correct else ("no_answer" if pred is None else "wrong")
    return {"score": correct, "acc": correct, "verdict": verdict, "pred": pred or ""}
