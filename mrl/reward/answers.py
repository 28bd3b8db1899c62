"""Finds the answer in a response.

Plain scans in linear time, because a response is untrusted text. Standard library only.
"""

import math
import re
from decimal import Decimal
from typing import Any

TAIL = 2000  # characters of the conclusion that are searched, as an answer is near the end
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
STATED = re.compile(r"(?i)\banswer\s*(?:is\s*:?|:)\s*")


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


def stated(text: str) -> str | None:
    """Returns the text after the last `Answer:` or `answer is` on its line, without asterisks and the final period.

    Returns None if there is none.
    """
    matches = list(STATED.finditer(text))
    if not matches:
        return None
    line = text[matches[-1].end() :].split("\n", 1)[0].replace("**", "").strip()
    return line.removesuffix(".").strip() or None


def answers(response: str) -> list[str]:
    """Returns the response's answers as written: those in boxes, else the stated one; empty if there is none."""
    text = conclusion(response)
    in_boxes = [content.strip() for content in boxed(text) if content.strip()]
    if in_boxes:
        return in_boxes
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


def plain_number(number: Decimal) -> str:
    """Returns a finite decimal without an exponent, and without zeros at the end of its fraction."""
    text = format(number, "f")
    if "." in text:
        text = text.rstrip("0").removesuffix(".")
    return "0" if text == "-0" else text
