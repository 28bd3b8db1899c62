"""The built-in rules that score as verl does, and the stand-ins of verl's modules, against verl's own functions."""

from collections import Counter
from importlib.util import find_spec

import pytest
from golden import differences, golden

from mrl.reward.builtin_rules import gsm8k, math_dapo, normalised
from mrl.reward.math_verifier import math
from mrl.reward.verl_modules import SCORES

VERL = "verl.utils.reward_score"


def of(rule: str) -> list[dict]:
    return [case for case in golden("rules") if case["rule"] == rule]


def stand_in(module: str, name: str):
    return SCORES[f"{VERL}.{module}" if module else VERL](name)


def test_the_dapo_rule_gives_verls_score_and_answer():
    plain = [case for case in of("math_dapo") if not case["strict"] and case["pause"] is None]
    assert len(plain) > 2500
    right = sum(case["gave"]["acc"] for case in plain)
    assert 450 < right < len(plain) - 450
    for case in plain:
        found = math_dapo("math_dapo", case["text"], case["truth"])
        assert {key: found[key] for key in ("score", "acc", "pred")} == case["gave"], case


def test_a_box_is_the_answer_where_no_line_states_one():
    boxed_alone = [c for c in of("math_dapo") if "answer" not in c["text"].lower() and c["gave"]["score"] == 1]
    assert len(boxed_alone) > 100


def test_the_stand_in_for_math_dapo_gives_all_three_values():
    score = stand_in("math_dapo", "compute_score")
    for case in of("math_dapo"):
        assert score(case["text"], case["truth"], case["strict"], case["pause"]) == case["gave"], case


def test_dapos_normalisation_is_verls():
    for case in of("normalised"):
        assert normalised(case["text"]) == case["gave"], case


def test_the_gsm8k_rule_is_verls_strict_form():
    """But for a truth with thousands commas, which verl never finds."""
    differing = []
    for case in of("gsm8k"):
        if case["method"] == "strict" and case["scores"] == [0.0, 1.0]:
            found = gsm8k("openai/gsm8k", case["text"], case["truth"])
            assert found["answered"] == (case["answer"] is not None)
            if found["score"] != case["gave"]:
                differing.append(case)
    assert {case["truth"] for case in differing} == {"1,234"}
    assert len(differing) == differences("rules")["gsm8k_comma_in_truth"]["cases"]


def test_the_stand_in_for_gsm8k_gives_verls_score_and_answer():
    score = stand_in("gsm8k", "compute_score")
    extract = stand_in("gsm8k", "extract_solution")
    for case in of("gsm8k"):
        assert extract(case["text"], case["method"]) == case["answer"], case
        assert score(case["text"], case["truth"], case["method"], *case["scores"]) == case["gave"], case


def test_the_stand_in_for_math_reward_gives_verls_score():
    score = stand_in("math_reward", "compute_score")
    cases = of("math_reward")
    assert 300 < sum(case["gave"] for case in cases) < len(cases) - 300
    for case in cases:
        assert score(case["text"], case["truth"]) == case["gave"], case


def test_the_stand_in_by_data_source_gives_verls_score():
    score = stand_in("", "default_compute_score")
    for case in of("by_source"):
        if case["gave"] is None:
            with pytest.raises(NotImplementedError):
                score(case["source"], case["text"], case["truth"])
        else:
            assert score(case["source"], case["text"], case["truth"]) == case["gave"], case


@pytest.mark.skipif(not find_spec("math_verify"), reason="math-verify is not installed")
def test_the_math_rule_differs_from_math_verify_where_math_verify_is_wrong():
    """Answers are right or wrong by construction; the rule finds all, and Math-Verify differs as listed."""
    differing = Counter()
    cases = of("math_verify")
    assert len(cases) >= 700
    for case in cases:
        found = math("math", case["text"], case["truth"])["score"] == 1
        assert found == case["right"], case
        differing[f"math_{case['kind']}"] += found != case["gave"]
    table = {name: row["cases"] for name, row in differences("rules").items() if row["peer"] == "math-verify"}
    assert +differing == table
