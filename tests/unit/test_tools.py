"""Tools: schemas of typed functions, calls in processes that can be killed, and the calculator."""

import time
from pathlib import Path

import pytest
import tool_functions
from seldom import seldom

from mrl.acting.builtin import calculator
from mrl.acting.environment import LONGEST
from mrl.acting.environment_pool import EnvironmentPool, check_tools
from mrl.acting.offer import name_of
from mrl.acting.tool import LONGEST_NAME, Tool, ToolsSpec
from mrl.data.row_columns import NAME
from mrl.errors import ConfigError

FILE = str(Path(tool_functions.__file__))


def test_the_schema_is_what_the_function_says_of_itself():
    schema = Tool.of(tool_functions.lookup, "lookup").schema["function"]
    assert (schema["name"], schema["description"]) == ("lookup", "Finds a word in the dictionary.")
    assert schema["parameters"] == {
        "type": "object",
        "properties": {
            "word": {"type": "string", "description": "in lower case"},
            "most": {"type": "integer", "description": "how many meanings"},
            "where": {"type": "string", "enum": ["top", "all"]},
            "exact": {"type": "boolean", "nullable": True},
        },
        "required": ["word"],
    }
    numbers = Tool.of(tool_functions.count, "count").schema["function"]["parameters"]["properties"]["numbers"]
    assert numbers == {"type": "array", "items": {"type": "integer"}}
    things = Tool.of(tool_functions.counts_any, "counts_any").schema["function"]["parameters"]["properties"]["things"]
    assert things == {"type": "array"}


@pytest.mark.parametrize(
    ("name", "why"),
    [("says_nothing", "no docstring"), ("has_no_type", "'word' has no type"), ("takes_all", "by name"),
     ("takes_bytes", "no schema for the type of 'word'"), ("takes_odd_words", "no schema for the type of 'word'")],
)  # fmt: skip
def test_a_function_that_says_too_little_is_refused(name, why):
    with pytest.raises(ConfigError, match=why):
        Tool.of(getattr(tool_functions, name), name)


def test_a_name_that_no_column_holds_is_refused():
    """64 bytes, whatever letters they are of."""
    for name in ("a" * 64, "ü" * 32):
        assert Tool.of(tool_functions.count, name).schema["function"]["name"] == name
    for name in ("a" * 65, "a" + "ü" * 32):
        with pytest.raises(ConfigError, match=r"a tool is named .*; a name is at most 64 bytes"):
            Tool.of(tool_functions.count, name)
    assert NAME.itemsize == LONGEST_NAME


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"word": "a"}, None),
        ({"word": "a", "most": 2, "where": "all", "exact": None}, None),
        ({}, "'word' is missing; it takes word, most, where, exact"),
        ({"word": "a", "size": 1}, "'size' is unknown"),
        ({"word": 1}, "'word' is not of the kind string: 1"),
        ({"word": "a", "most": True}, "'most' is not of the kind integer"),
        ({"word": "a", "most": None}, "'most' is not of the kind integer"),
        ({"word": "a", "where": "here"}, "'where' is not of the kind 'top' or 'all'"),
    ],
)
def test_arguments_are_held_against_the_schema(arguments, why):
    problem = Tool.of(tool_functions.lookup, "lookup").problem(arguments)
    assert (problem is None) == (why is None) and (why is None or why in problem)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*34", "408"),
        (" (1+2)*-3 ", "-9"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("2**10 % 1000", "24"),
        ("123*456", "56088"),
    ],
)
def test_the_calculator_computes(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "a+1", "True+1", "'a'*9", "9**9**9", "(-8)**0.5", "1/0", "[1][0]", "1+" * 600 + "1",
     "(lambda: 1)()", "", "1 if 1 else 2"],
)  # fmt: skip
def test_the_calculator_evaluates_nothing_but_arithmetic(expression):
    began = time.monotonic()
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError)):
        calculator(expression)
    assert time.monotonic() - began < 1.0


NAMES = ("lookup", "count", "hangs", "raises", "leaves", "dies", "floods", "prints", "calculator")


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with EnvironmentPool(ToolsSpec(NAMES, FILE), 2, 5.0, tmp_path_factory.mktemp("logs") / "tools.log") as pool:
        yield pool


def test_tools_answer_and_a_file_is_loaded_once_a_process(pool):
    answers = [pool.call("lookup", {"word": f"{i}"}) for i in range(8)]
    reasons, texts = zip(*(answer.result(30)[:2] for answer in answers), strict=True)
    assert set(reasons) == {"ok"} and all(f'"word": "{i}"' in text for i, text in enumerate(texts))
    assert pool.call("calculator", {"expression": "12*34"}).result(30)[:2] == ("ok", "408")
    assert [name_of(schema) for schema in pool.offer.tools] == list(NAMES)


FAULTS = {
    "raises": ("raised", "Error: raises: KeyError: 'no such word'"),
    "leaves": ("raised", "Error: leaves: SystemExit: 3"),
    "dies": ("died", "Error: dies: the scoring process was killed by SIGKILL"),
    "prints": ("ok", "said"),
    "nowhere": ("refused", "Error: there is no tool 'nowhere'"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_whatever_a_tool_does_the_call_is_answered_and_the_next_one_too(pool, name):
    reason, said = FAULTS[name]
    answer = pool.call(name, {}).result(30)
    assert answer.reason == reason and answer.text.startswith(said)
    assert pool.call("calculator", {"expression": "1+1"}).result(30)[:2] == ("ok", "2")


def test_arguments_that_do_not_fit_are_answered(pool):
    answer = pool.call("count", {"numbers": ["a"]}).result(30)
    assert answer[:2] == ("refused", "Error: count: 'numbers' is not of the kind array: ['a']")


def test_a_flood_is_cut(pool):
    reason, text = pool.call("floods", {}).result(60)[:2]
    assert reason == "ok" and len(text) == LONGEST


def test_a_tool_that_hangs_is_killed_and_holds_up_no_other():
    with EnvironmentPool(ToolsSpec(("hangs", "calculator"), FILE), 2, 0.5) as pool:
        pool.call("calculator", {"expression": "1"}).result(60)
        hanging = pool.call("hangs", {})
        assert pool.call("calculator", {"expression": "1+1"}).result(60)[:2] == ("ok", "2")
        assert hanging.result(60)[:2] == ("timeout", "Error: hangs: no answer within 0.5 s")


def test_closing_ends_what_is_under_way():
    pool = EnvironmentPool(ToolsSpec(("hangs",), FILE), 1, 3600.0)
    hanging = pool.call("hangs", {})
    time.sleep(0.5)
    (process,) = (slot.process for slot in pool._slots)
    pool.close()
    assert hanging.result(10).reason == "died" and not process.alive()
    pool.close()


LATER = {
    "later": ({"word": "a"}, "ok", "aa"),
    "later_hidden": ({"word": "c"}, "ok", "cc"),
    "later_raises": ({}, "raised", "Error: later_raises: KeyError: 'no such word'"),
    "later_leaves": ({}, "raised", "Error: later_leaves: SystemExit: 3"),
    "later_hangs": ({}, "timeout", "Error: later_hangs: no answer within 2 s"),
    "gives_parts": ({"word": "ab"}, "wrong_type", "Error: gives_parts: it has a generator, which is no answer yet"),
}


def test_asynchronous_tools_are_awaited():
    with EnvironmentPool(ToolsSpec((*LATER, "calculator"), FILE), 1, 2.0) as pool:
        for name, (arguments, reason, said) in LATER.items():
            answer = pool.call(name, arguments).result(30)
            assert (answer.reason, answer.text[: len(said)]) == (reason, said)
            assert pool.call("calculator", {"expression": "1+1"}).result(30)[:2] == ("ok", "2")


@pytest.mark.parametrize("name", ["parts_by_part", "later_by_part"])
def test_a_tool_that_is_a_generator_is_refused(name):
    with pytest.raises(ConfigError, match=f"tool '{name}' is a generator, whose call runs nothing: return instead"):
        Tool.of(getattr(tool_functions, name), name)


@pytest.mark.parametrize("end", seldom(["\n", ""], ""))
def test_stray_lines_on_the_channel_of_results_cost_their_call_alone(end):
    """However many they are, and whether they come before the answer, with it or behind it."""
    with EnvironmentPool(ToolsSpec(("strays", "calculator"), FILE), 1, 20.0) as pool:
        for before, after in ((1, 0), (3, 0), (0, 1), (0, 3), (2, 2), (0, 0)):
            answer = pool.call("strays", {"before": before, "after": after, "end": end}).result(30)
            assert answer[:2] == ("ok", "said") if not before else answer.reason == "died"
            (process,) = (slot.process for slot in pool._slots)
            while after and process is not None and process.alive():
                time.sleep(0.01)
            for _ in range(2):
                assert pool.call("calculator", {"expression": "1+1"}).result(30)[:2] == ("ok", "2")


def test_functions_under_verls_decorator_are_tools_without_verl():
    path = str(Path(tool_functions.__file__).with_name("verl_functions.py"))
    with EnvironmentPool(ToolsSpec(("add", "twice"), path), 1, 20.0) as pool:
        assert pool.call("add", {"left": 1, "right": 2}).result(60)[:2] == ("ok", "3")
        assert pool.call("twice", {"number": 4}).result(60)[:2] == ("ok", "8")


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (ToolsSpec(("compass",)), "'compass' is not shipped; shipped: calculator"),
        (ToolsSpec(("lookup",), "/nowhere.py"), "rollout.turns.path: /nowhere.py: no such file"),
        (ToolsSpec(("compass",), FILE), "no function 'compass'"),
        (ToolsSpec(("has_no_type",), FILE), "'word' has no type"),
    ],
)
def test_tools_that_cannot_be_loaded_are_refused_by_key(spec, why):
    with pytest.raises(ConfigError, match=why):
        check_tools(spec)


def test_a_function_that_is_named_for_verl_stands_before_a_shipped_tool_of_that_name(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from verl.tools.function_tool import function_tool\n"
        '@function_tool("calculator")\n'
        'def evaluate(words: str) -> str:\n    """Is mine."""\n    return words.upper()\n'
    )
    (schema,) = check_tools(ToolsSpec(("calculator",), str(file))).tools
    assert schema["function"]["description"] == "Is mine."
