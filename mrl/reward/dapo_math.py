"""DAPO-Math as verl scores it: 1 or -1 for the last `Answer:` line of the response's end, compared as text after one normalisation.

Behaviour of verl's math_dapo (itself Minerva's normalisation), so that scores are comparable with published runs, its quirks included.
The layered verifier of mrl.reward.math_verifier is the better judge; this one is the reference.
"""

import re
from collections.abc import Mapping
from typing import Any

TAIL = 300  # characters
ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
NOTHING = "[INVALID]"

# applied in this order, each to the result of the one before
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points", "feet", "minutes",
    "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples", "\\text{s}",
    "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!",
    "{,}", '"', "\\dots",
)  # fmt: skip
_PATTERNS = tuple(
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


def normalised(answer: str) -> str:
    """What follows the last `=`, without units, dressing and shorthand; whole numbers without thousands commas."""
    text = answer.rpartition("=")[2]
    for before, after in (*_REPLACED, *((word, "") for word in _REMOVED)):
        text = text.replace(before, after)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def math_dapo(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`score` 1 or -1, `acc` 1 or 0, `pred` the normalised answer, `[INVALID]` where there is no `Answer:` in the last 300 characters."""
    found = ANSWER.findall(solution_str[-TAIL:])
    pred = normalised(found[-1] if found else NOTHING)
    correct = pred == normalised(str(ground_truth))
    verdict = "match" if correct else ("wrong" if found else "no_answer")
    return {"score": 1.0 if correct else -1.0, "acc": float(correct), "verdict": verdict, "pred": pred}
