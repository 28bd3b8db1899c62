"""Rules as their sources define them: DAPO-Math of verl, multiple choice of the Ascend guide, format rewards,
and rules added up.
"""

import time

import pytest

from mrl.errors import ConfigError
from mrl.reward.builtin_rules import (
    boxed_format,
    letters,
    math_dapo,
    multiple_choice,
    normalised,
    rule_name,
    think_format,
)
from mrl.reward.items import RewardSpec
from mrl.reward.resolve import check_data_sources, resolve
from mrl.reward.worker import score_one


@pytest.mark.parametrize(
    ("response", "score", "pred"),
    [
        ("Answer: 34", 1, "34"),
        ("answer : 34", 1, "34"),
        ("Answer: $34$", 1, "34"),
        ("Answer: 1\nAnswer: 34", 1, "34"),  # the last one
        ("Answer: 34\nAnswer: 1", -1, "1"),
        ("Answer: x = 34", 1, "34"),  # behind the last equals sign
        ("Answer: 34 degrees", 1, "34"),
        ("Answer: \\boxed{34}", 1, "34"),
        ("Answer: 34.0", -1, "34.0"),  # compared as text
        ("Answer: 34.", -1, "34."),  # a quirk of the original
        ("\\boxed{34}", 1, "34"),  # no line states an answer
        ("\\boxed{ 34}", -1, " 34"),  # a box is compared to the letter
        ("\\boxed{34}" + "x" * 95, -1, "[INVALID]"),  # begins before the last 100 characters
        ("\\boxed{34}\nAnswer: 1", -1, "1"),
        ("", -1, "[INVALID]"),
    ],
)
def test_dapo_math_scores_one_or_minus_one(response, score, pred):
    result = math_dapo("math_dapo", response, "34")
    assert (result["score"], result["acc"], result["pred"]) == (score, score == 1, pred)
    verdicts = {(True, pred): "match", (False, "[INVALID]"): "no_answer"}
    assert result["verdict"] == verdicts.get((score == 1, pred), "wrong")


def test_dapo_math_sees_the_last_300_characters_only():
    answer = "Answer: 34"
    assert math_dapo("math_dapo", answer + "\n" + "x" * (300 - len(answer) - 1), "34")["score"] == 1
    assert math_dapo("math_dapo", answer + "\n" + "x" * (300 - len(answer)), "34")["score"] == -1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1,234", "1234"),
        ("\\frac12", "\\frac{1}{2}"),
        ("\\sqrt2", "\\sqrt{2}"),
        ("5 \\text{ cm}", "5"),
        ("a dog", "dog"),
        ("3^\\circ", "3"),
    ],
)
def test_dapo_maths_normalisation(answer, expected):
    assert normalised(answer) == expected


@pytest.mark.parametrize(
    ("content", "truth", "score", "verdict"),
    [
        ("D", "D", 1, "match"),
        ("\\text{D}", "D", 1, "match"),
        ("D. 780万元", "D", 1, "match"),
        ("ACD", "ACD", 1, "match"),
        ("D、C、A", "ACD", 1, "match"),
        ("A, C and D", ["A", "C", "D"], 1, "match"),
        ("AC", "ACD", 0, "wrong"),  # one missing
        ("ABCD", "ACD", 0, "wrong"),  # one too many
        ("ABCDEFG", "D", 0, "wrong"),
        ("None", "D", 0, "no_answer"),
        ("ALL", "A", 0, "no_answer"),
        ("the first", "A", 0, "no_answer"),
        ("", "A", 0, "no_answer"),
    ],
)
def test_multiple_choice_wants_exactly_the_right_letters(content, truth, score, verdict):
    result = multiple_choice(
        "dianjin", f"<think>\\boxed{{B}}</think> so \\boxed{{B}}, rather \\boxed{{{content}}}", truth
    )
    assert (result["score"], result["verdict"]) == (score, verdict)


def test_multiple_choice_needs_a_box_and_a_truth():
    assert multiple_choice("dianjin", "the answer is D", "D") == {
        "score": 0.0,
        "acc": 0.0,
        "verdict": "no_answer",
        "pred": "",
    }
    with pytest.raises(ValueError, match="names no choice"):
        multiple_choice("dianjin", "\\boxed{D}", "")


def test_a_box_full_of_separators_is_read_in_no_time():
    begin = time.process_time()
    assert letters("A" + ", and" * 100_000 + "x") is None
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think>b", 1),
        ("a</think>b", 1),  # the template opened it
        ("<think>a</think>", 0),
        ("<think></think>b", 0),
        ("<think>a", 0),
        ("b", 0),
        ("x<think>a</think>b", 0),
        ("<think>a</think>b</think>c", 0),
        ("<think><think>a</think>b", 0),
    ],
)
def test_the_form_of_thinking(response, score):
    assert think_format("", response, None) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (r"\boxed{1}", 1),
        (r"\boxed{1}\boxed{1}", 0),
        (r"\boxed{}", 0),
        ("1", 0),
        (r"<think>\boxed{1}</think>\boxed{2}", 1),
    ],
)
def test_the_form_of_a_box(response, score):
    assert boxed_format("", response, None) == score


def test_bonus_rules_add_up_and_every_part_is_kept():
    function = resolve(RewardSpec("math_dapo", bonus_rules={"think_format": 0.5, "boxed_format": 0.25}))
    reason, score, parts, _ = score_one(function, "", "<think>a</think>Answer: \\boxed{3}", "3", {})
    assert (reason, score) == ("ok", 1 + 0.5 + 0.25)
    assert {k: parts[k] for k in ("main", "acc", "think_format", "boxed_format")} == {
        "main": 1, "acc": 1, "think_format": 1, "boxed_format": 1,
    }  # fmt: skip


def test_a_bonus_makes_no_answer_more_right(tmp_path):
    (tmp_path / "mine.py").write_text("def compute_score(**_): return -1.0")
    function = resolve(RewardSpec(path=str(tmp_path / "mine.py"), bonus_rules={"boxed_format": 0.25}))
    parts = {"acc": -1.0, "main": -1.0, "boxed_format": 1.0}
    assert score_one(function, "", "\\boxed{3}", "4", {}) == ("ok", -0.75, parts, "")


def test_a_bonus_does_not_hide_a_function_of_the_wrong_type(tmp_path):
    (tmp_path / "mine.py").write_text("def compute_score(**_): return 'good'")
    function = resolve(RewardSpec(path=str(tmp_path / "mine.py"), bonus_rules={"think_format": 1.0}))
    assert score_one(function, "", "", "", {})[0] == "wrong_type"


def test_an_unknown_bonus_rule_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"reward\.bonus_rules: 'think_fromat' is unknown \(nearest: think_format\)"):
        resolve(RewardSpec("gsm8k", bonus_rules={"think_fromat": 1.0}))


@pytest.mark.parametrize(
    ("source", "rule"),
    [("openai/gsm8k", "gsm8k"), ("math_dapo", "math_dapo"), ("aime2024", "math_dapo"),
        ("HuggingFaceH4/MATH-500", "math"),
     ("dianjin/cflue_mcq", "multiple_choice"), ("toy", "toy")],
)  # fmt: skip
def test_the_rule_of_a_data_source(source, rule):
    assert rule_name(source) == rule
    if source != "toy":
        check_data_sources(RewardSpec(), {source})
