"""Converts rows of public data sets, in the form of their authors, to verl's schema. The data is the user's own
copy.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from mrl.units import plain_number

GSM8K_ASK = 'Let\'s think step by step and output the final answer after "####".'
BOX_ASK = "Let's think step by step and output the final answer within \\boxed{}."
DAPO_ASK = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) "
    "where $Answer is the answer to the problem.\n\n{problem}\n\nRemember to put your answer on its "
    'own line after "Answer:".'
)
# as the data set writes it: \boxed{D}, \boxed{A, C}, \boxed{\text{B}}
BOXED_LETTERS = re.compile(r"\\boxed\{\s*(?:\\text\{)?([A-J](?:[\s,、;；]*[A-J])*)\}?\s*\}")  # noqa: RUF001
TAGGED_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class BadSourceRow(Exception):
    """A row that lacks what its data set promises; the message says what."""


@dataclass(frozen=True)
class SourceRow:
    """One row of verl's schema, but for its number."""

    data_source: str
    prompt: list[dict[str, str]]
    ability: str
    style: str
    ground_truth: str
    solution: str = ""  # the data set's own worked answer, for people
    images: list[Any] = field(default_factory=list)  # as the row has them (mrl.data.images)


def _text(row: Mapping[str, Any], *names: str) -> str:
    """Returns the first of the named fields that has a value, whatever its capitals; numbers become text.

    Raises BadSourceRow where there is none.
    """
    fields = {key.lower(): value for key, value in row.items()}
    value = next((fields[name] for name in names if fields.get(name) is not None), None)
    # tables have NaN where a value is missing
    if not isinstance(value, str | int | float) or value != value or not str(value).strip():
        raise BadSourceRow(f"no text under {' or '.join(names)}; found: {', '.join(row)}")
    if isinstance(value, float) and math.isfinite(value):  # tables have whole numbers so beside a missing one
        return plain_number(Decimal(repr(value)))
    return str(value).strip()


def _ask(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def gsm8k(row: Mapping[str, Any], file_stem: str) -> SourceRow:
    """Reads a row of GSM8K: `question`, and `answer` with the number behind `####`."""
    question = _text(row, "question")
    solution = _text(row, "answer")
    _, mark, number = solution.rpartition("####")
    truth = number.strip().replace(",", "")
    if not mark or not re.fullmatch(r"-?\d+(\.\d+)?", truth, re.ASCII):
        raise BadSourceRow(f"the answer has no number behind ####: {solution[-80:]!r}")
    return SourceRow("openai/gsm8k", _ask(f"{question} {GSM8K_ASK}"), "math", "rule", truth, solution)


def math500(row: Mapping[str, Any], file_stem: str) -> SourceRow:
    """Reads a row of MATH-500: `problem`, `answer`, `solution`."""
    problem = _text(row, "problem")
    truth = _text(row, "answer")
    return SourceRow(
        "HuggingFaceH4/MATH-500", _ask(f"{problem} {BOX_ASK}"), "math", "rule", truth, str(row.get("solution") or "")
    )


def aime(row: Mapping[str, Any], file_stem: str) -> SourceRow:
    """Reads a row of AIME: `problem` (or `question`), and `answer`, an integer from 0 to 999.

    Rows that are in verl's schema already stay as they are.
    """
    if "reward_model" in row:
        return ready_made(row, file_stem)
    problem = _text(row, "problem", "question")
    truth = _text(row, "answer")
    if not re.fullmatch(r"\d{1,3}", truth, re.ASCII):
        raise BadSourceRow(f"the answer {truth[:40]!r} is no integer from 0 to 999")
    year = re.search(r"20\d\d", file_stem)
    source = "aime"
    if year:
        source = f"aime{year[0]}"
    return SourceRow(source, _ask(DAPO_ASK.format(problem=problem)), "math", "rule", str(int(truth)))


def dapo_math(row: Mapping[str, Any], file_stem: str) -> SourceRow:
    """Reads a row of DAPO-Math-17k in verl's schema, or of its processed copy: `prompt` as text, `solution` as the
    answer.
    """
    if "reward_model" in row:
        return ready_made(row, file_stem)
    problem = _text(row, "prompt", "problem")
    truth = _text(row, "solution", "answer")
    return SourceRow("math_dapo", _ask(DAPO_ASK.format(problem=problem)), "math", "rule", truth)


def geo3k(row: Mapping[str, Any], file_stem: str) -> SourceRow:
    """Reads a row of Geometry3K: `problem` with a mark for each of `images`, and `answer`."""
    problem = _text(row, "problem", "question")
    images = _images(row)
    if not images:
        raise BadSourceRow("no images: this is not the data set with pictures")
    asked = _ask(f"{problem} {BOX_ASK}")
    return SourceRow("hiyouga/geometry3k", asked, "math", "rule", _text(row, "answer"), images=images)


def _images(row: Mapping[str, Any]) -> list[Any]:
    found = row.get("images")
    if found is not None and not isinstance(found, list):
        raise BadSourceRow(f"images is {type(found).__name__}, expected a list")
    return found or []


def ready_made(row: Mapping[str, Any], file_stem: str) -> SourceRow:
    """Reads a row that is in verl's schema already."""
    reward = row.get("reward_model")
    prompt = row.get("prompt")
    truth = None
    if isinstance(reward, Mapping):
        truth = reward.get("ground_truth")
    if not isinstance(truth, str | int | float) or truth != truth:
        raise BadSourceRow("reward_model.ground_truth is no text")
    well_formed = (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(m, Mapping) and isinstance(m.get("content"), str) for m in prompt)
    )
    if not well_formed:
        raise BadSourceRow("prompt is no list of {role, content}")
    messages = [{"role": str(m.get("role", "user")), "content": m["content"]} for m in prompt]
    style = str(reward.get("style") or "rule")
    ability = str(row.get("ability") or "math")
    return SourceRow(_text(row, "data_source"), messages, ability, style, str(truth), images=_images(row))


def dianjin(row: Mapping[str, Any], file_stem: str) -> SourceRow:
    """Reads a multiple-choice row of DianJin-R1: `instruction`, and `output` whose `<answer>` boxes the letters."""
    question = _text(row, "instruction")
    output = _text(row, "output")
    tagged = TAGGED_ANSWER.findall(output)
    chosen = set(re.findall("[A-J]", " ".join(BOXED_LETTERS.findall(tagged[-1] if tagged else output))))
    if not chosen:
        raise BadSourceRow(
            "the output's answer boxes no letter; only the multiple-choice files (cflue_mcq.json) can be scored by rule"
        )
    return SourceRow(f"dianjin/{file_stem}", _ask(question), "financial", "rule", "".join(sorted(chosen)), output)


@dataclass(frozen=True)
class Source:
    """A data set under its name on the command line."""

    name: str
    title: str
    convert: Callable[[Mapping[str, Any], str], SourceRow]


SOURCES = {
    source.name: source
    for source in (
        Source("gsm8k", "GSM8K: question, answer (parquet or jsonl)", gsm8k),
        Source(
            "dapo-math-17k", "DAPO-Math-17k: verl's schema, 1.79 million rows of some 17 thousand prompts", dapo_math
        ),
        Source("math-500", "MATH-500: problem, answer (jsonl)", math500),
        Source("aime", "AIME, any year: problem, answer (parquet or jsonl), or verl's aime-2024.parquet", aime),
        Source("geo3k", "Geometry3K: images, problem, answer (parquet of the datasets library)", geo3k),
        Source("dianjin-r1", "DianJin-R1 multiple choice: instruction, output (cflue_mcq.json)", dianjin),
        Source("verl", "any file that is in verl's schema already: checked and without duplicates", ready_made),
    )
}
