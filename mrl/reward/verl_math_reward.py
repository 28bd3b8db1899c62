"""verl 0.9.1's own score for MATH: texts compared after the normalisation of Hendrycks et al. (arXiv:2103.03874).

Only for users' files that import it. The rule `math` (mrl.reward.math_verifier) judges better. Each quirk is kept,
since the point is the same number.
"""

import re
from typing import Any

from mrl.reward.answers import verls_box

_OPEN_BOX = "\\boxed "  # a box without braces goes on to the next dollar
# applied in this order, each to the former result
_BEFORE_UNITS = (
    ("\n", ""), (r"\!", ""), (r"\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), (r"\left", ""), (r"\right", ""),
    (r"^{\circ}", ""), (r"^\circ", ""), (r"\$", ""),
)  # fmt: skip
_UNIT = r"\text{ "
_BEHIND_UNITS = ((r"\\%", ""), (r"\%", ""), (" .", " 0."), ("{.", "{0."))
_LONGEST_NAME = 2  # characters before an equals sign that is left out
_WHOLE_RATIO = re.compile(r"(0|-?[1-9]\d*)/(0|-?[1-9]\d*)", re.ASCII)


def math_reward_score(solution_str: str, ground_truth: Any) -> float:
    """Returns 1 if the last box has the truth, else 0."""
    answer = _boxed(solution_str)
    if answer is None:
        return 0.0
    try:
        return float(_stripped(answer) == _stripped(ground_truth))
    except (AttributeError, IndexError, ValueError):  # a truth that is no text, or a command without its argument
        return float(answer == ground_truth)


def _boxed(text: str) -> str | None:
    if _OPEN_BOX in text:
        return text.rpartition(_OPEN_BOX)[2].partition("$")[0]
    return verls_box(text[max(text.rfind(r"\boxed"), 0) :])


def _stripped(text: str) -> str:
    """Raises IndexError and ValueError where verl's normalisation fails, which then compares the texts as they are."""
    text = _replaced(text, _BEFORE_UNITS)
    if _UNIT in text:
        text, _ = text.split(_UNIT)  # several are an error
    text = _replaced(text, _BEHIND_UNITS)
    if text.startswith("."):
        text = f"0{text}"
    name, *values = text.split("=")
    if len(values) == 1 and len(name) <= _LONGEST_NAME:
        text = values[0]
    text = _long_fractions(_long_roots(text).replace(" ", ""))
    if text == "0.5":
        return r"\frac{1}{2}"
    return _WHOLE_RATIO.sub(r"\\frac{\1}{\2}", text) if _WHOLE_RATIO.fullmatch(text) else text


def _replaced(text: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for before, after in pairs:
        text = text.replace(before, after)
    return text


def _long_roots(text: str) -> str:
    done, *rest = text.split(r"\sqrt")
    for part in rest:
        done += r"\sqrt" + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}")
    return done


def _long_fractions(text: str) -> str:
    done, *rest = text.split(r"\frac")
    for part in rest:
        if part[0] != "{":
            if len(part) == 1:
                return text
            below = part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
            part = f"{{{part[0]}}}{below}"
        done += rf"\frac{part}"
    return done
