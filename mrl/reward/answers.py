"""Finds the answer in a response.

Plain scans in linear time, because a response is untrusted text. Standard library only.
"""

import math
import re
from decimal import Decimal
from typing import Any

from mrl.units import plain_number

TAIL = 2000  # characters of the conclusion that are searched, as an answer is near the end
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARKS = r"[*_`]*"  # of Markdown
_FILLED = r"(?:(?:therefore|thus|hence|then|simply|just|exactly|given by|equal to)\s+)*"
STATED = re.compile(
    rf"(?i)(?:(?<![a-z\\])answers?|答案){_MARKS}\s*"
    rf"(?:(?:is|are|equals|是|为)(?![a-z]){_MARKS}\s*{_FILLED}[:\uff1a]?|[:\uff1a=])\s*{_MARKS}\s*"
)
HEADING = re.compile(r"(?im)^[ \t#*_]*(?:the\s+)?(?:final\s+)?answer[ \t#*_]*(?:\n\s*|(?=\$|\\[\[(]))")
OPEN_BOX = re.compile(r"\\boxed(?![a-zA-Z]|\s*\{)\s*")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}|\A[.,;:!?)]")
OPEN_BOX_END = re.compile(r"\$|\\[)\]]|\n|\\[bf]?box(?:ed)?(?![a-zA-Z])")
_DISPLAY = {"$$": "$$", "\\[": "\\]"}
# what may stand behind a stated answer: a sentence that states nothing else, a reason
_LATER = re.compile(r"[.。]\s+(?=[A-Z])|。")
_REASON = re.compile(r",\s*(?:since|because|as|where|for)\s")
# what follows takes something back, or adds something
_HEDGE = re.compile(
    r"(?i)\b(?:or|and|but|not|no|wait|unless|except|actually|however|instead|rather|if|otherwise|alternatively|"
    r"maybe|perhaps|wrong|incorrect|also|another|mistake|correction|n't)\b|n't"
)


def behind_reasoning(response: str) -> str:
    """Returns the text after the last `</think>`; nothing when a `<think>` is not closed."""
    rest = response.rpartition("</think>")[2]
    if "<think>" in rest:
        return ""
    return rest


def conclusion(response: str) -> str:
    """Returns the last TAIL characters of the text after the reasoning."""
    return behind_reasoning(response)[-TAIL:]


def closing_brace(text: str, start: int) -> int | None:
    """Returns the index of the `}` that closes the group whose content begins at `start`; None if it never closes.

    Escaped braces do not count.
    """
    depth = 1
    i = start
    while i < len(text):
        if text[i] == "\\":
            i += 1
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if not depth:
                return i
        i += 1
    return None


def boxed(text: str) -> list[str]:
    """Returns the contents of all outermost `\\boxed{...}` and `\\fbox{...}` in order. Unclosed ones do not count."""
    contents = []
    position = 0
    while match := BOX.search(text, position):
        end = closing_brace(text, match.end())
        if end is None:
            break
        contents.append(unboxed(text[match.end() : end]))
        position = end + 1
    return contents


def verls_box(text: str) -> str | None:
    """Returns the content of the last `\\boxed{}` as verl 0.9.1 has it; None if there is none, or if it never closes.

    Counts escaped braces too, and never looks at an earlier box.
    """
    begin = text.rfind(r"\boxed{")
    if begin < 0:
        return None
    start = text.index("{", begin) + 1
    depth = 1
    for i, char in enumerate(text[start:], start):
        depth += (char == "{") - (char == "}")
        if not depth:
            return text[start:i]
    return None


def unboxed(content: str) -> str:
    """Replaces a box that contains only a box by the inner one, at most three times.

    More nested boxes are no form of an answer and stay.
    """
    for _ in range(3):
        match = BOX.match(content.strip())
        if match is None or closing_brace(content.strip(), match.end()) != len(content.strip()) - 1:
            return content
        content = content.strip()[match.end() : -1]
    return content


def open_boxes(text: str) -> list[str]:
    """Returns what stands behind each `\\boxed` that has no braces, up to the end of its formula or line.

    It ends before words: the text may speak about boxes.
    """
    contents = []
    for match in OPEN_BOX.finditer(text):
        end = OPEN_BOX_END.search(text, match.end())
        content = text[match.end() : end.start() if end else len(text)]
        contents.append(_PROSE.split(content, maxsplit=1)[0].strip().rstrip(",;:."))
    return contents


def stated(text: str) -> str | None:
    """Returns the text after the last `Answer:`, `answer is` or heading `Answer`, without Markdown's marks; None if
    there is none.

    It goes to the end of the line, or of a formula that is displayed on lines of its own. A reason, or a further
    sentence, is left out if it states nothing else.
    """
    matches = [*STATED.finditer(text), *HEADING.finditer(text)]
    if not matches:
        return None
    rest = text[max(match.end() for match in matches) :]
    formula = ""
    if closing := _DISPLAY.get(rest[:2]):
        formula, _, rest = rest[2:].partition(closing)
        formula = " ".join(formula.split())
    line = formula + rest.partition("\n")[0]
    line = _alone(line.replace("**", "")).strip().strip("*_`").strip()
    return line.removesuffix(".").removesuffix("。").strip() or None


def _alone(line: str) -> str:
    """Returns a stated answer without what follows it, where that is words that neither take back nor add."""
    reason = _REASON.search(line)
    if reason and not _HEDGE.search(line, reason.end()):
        line = line[: reason.start()]
    later = _LATER.search(line)
    if later and not _HEDGE.search(line, later.end()) and not re.search(r"[\d\\$]", line[later.end() :]):
        line = line[: later.start()]
    return line


def answers(response: str) -> list[str]:
    """Returns the response's answers as written: those in boxes, else the stated one.

    It is empty if there is none, or the last of several boxes holds nothing.
    """
    text = conclusion(response)
    in_boxes = [content.strip() for content in boxed(text) or open_boxes(text)]
    if any(in_boxes):
        return [content for content in in_boxes if content] if in_boxes[-1] else []
    line = stated(text)
    if line is None:
        return []
    return [line]


def truth_text(truth: Any) -> str:
    """Returns a row's truth as text. A table has whole numbers as doubles as soon as one is missing: 42.0 is `42`.

    Numbers are written without exponents. Raises ValueError for what is no single text or number: lists, mappings,
    infinities.
    """
    if isinstance(truth, float) and math.isfinite(truth):
        return plain_number(Decimal(repr(truth)))
    if isinstance(truth, str | int):
        return str(truth)
    raise ValueError(f"ground_truth {truth!r} is no text and no finite number")
