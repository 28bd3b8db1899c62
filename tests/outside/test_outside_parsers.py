"""Calls in XML and GLM form give the values that vLLM's own parsers give, over schemas with every form of a type."""

import json
from collections import Counter

import pytest
from golden import differences, golden
from jsonschema import Draft202012Validator

from mrl.acting import dialects
from mrl.data.parameter_types import typed_parameters

READ = {"xml": dialects._read_functions, "glm": dialects._read_pairs}
CASES = [case for case in golden("parsers") if case["value"] is not None]


def read(case: dict) -> dialects.ToolCall:
    inside = case["text"].removeprefix("<tool_call>").removesuffix("</tool_call>").strip()
    return READ[case["form"]](inside, {"f": typed_parameters(case["root"])})


def equal(one, other) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def kind_of(case: dict, call: dialects.ToolCall) -> str | None:
    """The row of differences.yaml that a case belongs to; None where the values are equal."""
    schema = json.dumps(case["root"]["properties"]["a"])
    if call.problem is not None:
        return "no_type_fits"
    if equal(call.arguments["a"], case["gave"]["a"]):
        return None
    if "$ref" in schema or "const" in schema:
        return "resolved"
    if case["value"] == "None":
        return "python_none"
    if "type" not in schema and "enum" not in schema:
        return "untyped"
    return "text_stays_text"


def test_values_are_vllms_and_what_differs_is_what_the_table_says():
    counts = Counter()
    for case in CASES:
        call = read(case)
        kind = kind_of(case, call)
        counts[kind] += 1
        judge = Draft202012Validator({**case["root"]["properties"]["a"], "$defs": case["root"]["$defs"]})
        if kind == "no_type_fits":
            assert not judge.is_valid(case["gave"]["a"]), case
        elif kind == "text_stays_text":
            assert call.arguments["a"] == case["value"], (case["root"]["properties"], case["value"], call)
        elif kind is not None:
            assert judge.is_valid(call.arguments["a"]) or not judge.is_valid(case["gave"]["a"]), case
    assert counts.pop(None) > 2500
    assert counts == {name: row["cases"] for name, row in differences("parsers").items() if name != "unclosed"}


@pytest.mark.parametrize("case", [case for case in golden("parsers") if case["value"] is None])
def test_an_argument_without_its_end_is_a_told_problem(case):
    """vLLM takes such a call as if it were closed, or puts the next argument into the value, or drops both."""
    assert read(case).problem
