"""Finds the answer in a response.

Plain scans in linear time, because a response is untrusted text. Standard library only.
"""

import re

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
