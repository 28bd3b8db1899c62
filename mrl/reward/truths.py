"""Tells before any response is made whether a built-in rule can find a row's truth in one.

A rule is asked about a response that says the truth. Where it does not find that right, it never finds any right, and
every response to the row would score alike.
"""

import json
from typing import Any

from mrl.reward.answers import truth_text
from mrl.reward.builtin_rules import RULES, rule_name
from mrl.reward.reasoning_rule import REASONING

AUTO = "auto"
# how a response says the truth, by the rules that compare with one; `_WANTED` has those that do so by themselves
SAID: dict[str, tuple[str, ...]] = {
    "exact_match": ("{}",),
    "gsm8k": ("#### {}",),
    "math": (r"\boxed{{{}}}", "{}"),  # the second for a truth that has its own box
    "math_dapo": ("Answer: {}", r"\boxed{{{}}}"),
    "multiple_choice": (r"\boxed{{{}}}",),
    REASONING: ("<answer>{}</answer>",),
}
_WANTED = {
    "gsm8k": "a number, such as 42; mrl data gsm8k takes it out of a whole solution",
    "math": "one answer such as \\frac{1}{2}, or a list of alternatives",
    "math_dapo": "one line of text, as the model is to write it behind `Answer:`",
    "multiple_choice": "letters, such as A or ACD",
    "exact_match": "the text of the whole response",
}
_LISTS = ("math", "multiple_choice")  # rules with a meaning for lists


def rule_of(function: str, data_source: str) -> str:
    """Returns the rule that judges a row under `reward.function`."""
    if function == AUTO:
        return rule_name(data_source)
    return function


def unmatched(function: str, data_source: str, truth: Any) -> str | None:
    """Returns why no response to a row can be right under `reward.function`; None if one can, or no truth is read."""
    rule = rule_of(function, data_source)
    if rule not in _WANTED:
        return None
    why = _why_not(rule, data_source, truth)
    if why is None:
        return None
    return f"rule {rule} finds no response right: ground_truth {str(truth)[:100]!r} {why}; it takes {_WANTED[rule]}"


def right_responses(function: str, data_source: str, truth: Any) -> list[str]:
    """Returns responses that say the truth as the rule under `reward.function` wants it said."""
    rule = rule_of(function, data_source)
    if rule not in SAID:
        return [str(truth)]
    values = truth if isinstance(truth, list) else [truth]
    return _responses(rule, list(map(truth_text, values)))


def _responses(rule: str, truths: list[str]) -> list[str]:
    texts = ["".join(truths)] if rule == "multiple_choice" else truths
    return [form.format(text) for text in texts for form in SAID[rule]]


def _why_not(rule: str, data_source: str, truth: Any) -> str | None:
    values = truth if isinstance(truth, list) and rule in _LISTS else [truth]
    try:
        texts = list(map(truth_text, values))
    except ValueError:
        return f"is {type(truth).__name__}"
    if not "".join(texts).strip():
        return "is empty"
    if rule in ("math", "math_dapo") and any(map(_is_list_of_texts, texts)):
        return "is a list written as text"
    if rule in ("math", "math_dapo") and any("####" in text for text in texts):
        return "is a whole solution"
    try:
        if any(_is_right(rule, data_source, said, truth) for said in _responses(rule, texts)):
            return None
    except ValueError:
        pass  # the rule itself says that the truth is none
    return "is of another form"


def _is_list_of_texts(text: str) -> bool:
    """Tells whether a text is JSON of a list with texts, such as '["34"]'. '[1, 2]' may be an interval."""
    if not text.lstrip().startswith("["):
        return False
    try:
        values = json.loads(text)
    except ValueError:
        return False
    return any(isinstance(value, str) for value in values)


def _is_right(rule: str, data_source: str, response: str, truth: Any) -> bool:
    score = RULES[rule](data_source, response, truth)
    return (score["score"] if isinstance(score, dict) else score) == 1
