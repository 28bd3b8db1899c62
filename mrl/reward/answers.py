"""Where a response says its answer.

Plain scans in linear time: a response is a stranger's text. Standard library only.
"""

import re

TAIL = 2000  # characters of the conclusion that are looked at; an answer stands at the end
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
STATED = re.compile(r"(?i)\banswer\s*(?:is\s*:?|:)\s*")


def behind_reasoning(response: str) -> str:
    """The text after the last `</think>`; nothing when a `<think>` never closes."""
    rest = response.rpartition("</think>")[2]
    if "<think>" in rest:
        return ""
    return rest


def conclusion(response: str) -> str:
    """The last TAIL characters of what follows the reasoning."""
    return behind_reasoning(response)[-TAIL:]


def closing_brace(text: str, start: int) -> int | None:
    """Index of the `}` that closes the group whose content begins at `start`; None if it never closes.

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
    """Contents of all outermost `\\boxed{...}` and `\\fbox{...}`, in order; one that never closes is none."""
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
    """A box whose only content is a box is that box; more than three of them, one in another,
    are no answer's form and stay.
    """
    for _ in range(3):
        match = BOX.match(content.strip())
        if match is None or closing_brace(content.strip(), match.end()) != len(content.strip()) - 1:
            return content
        content = content.strip()[match.end() : -1]
    return content


def stated(text: str) -> str | None:
    """What follows the last `Answer:` or `answer is` on its line, without asterisks and the final period;
    None where there is none.
    """
    matches = list(STATED.finditer(text))
    if not matches:
        return None
    line = text[matches[-1].end() :].split("\n", 1)[0].replace("**", "").strip()
    return line.removesuffix(".").strip() or None


def answers(response: str) -> list[str]:
    """The response's answers as it writes them: those in boxes, else the stated one; empty when it gives none."""
    text = conclusion(response)
    in_boxes = [content.strip() for content in boxed(text) if content.strip()]
    if in_boxes:
        return in_boxes
    line = stated(text)
    if line is None:
        return []
    return [line]
