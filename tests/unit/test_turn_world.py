"""The turn world: it is warm-started on what a run makes of a call, and its environment rewards as it says."""

import importlib
import random
import statistics
import sys
from pathlib import Path

import pytest

from mrl.acting.dialects import ToolCall, dialect_of
from mrl.acting.environment import Action, actions_of
from mrl.acting.named import resolve_environments
from mrl.acting.tool import ToolsSpec
from mrl.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
PRESET = ROOT / "parallel_configs" / "tool-moe" / "cpu.yaml"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("make_turn_world")
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def kind(script, tmp_path_factory):
    file = tmp_path_factory.mktemp("turns") / "environment.py"
    file.write_text(script.ENVIRONMENT)
    return resolve_environments(ToolsSpec((), str(file), environments=("Picks",)), None)["Picks"]


def test_what_it_is_started_on_is_what_a_run_makes_of_it(script, kind, tmp_path):
    given = {name: value for name, value in script.options(tmp_path).items() if name.startswith(("data.", "rollout."))}
    config = load_config(PRESET, None, [f"{name}={value}" for name, value in given.items()]).config
    tokenizer = script.make_tokenizer(script.WORDS, script.POSITIONS)
    schema = actions_of(kind, "Picks")["pick"].schema
    dialect = dialect_of(tokenizer, {"tools": [schema]})
    words = ["sum", "north", "product", "west"]
    parts = script.Picks(tokenizer).picking(words, random.Random(0), 1.0)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "sum"}], tools=[schema], tokenize=False, add_generation_prompt=True
    )
    assert parts[0] == (tokenizer.encode(text, add_special_tokens=False), False)
    signs = []
    for number in range(script.TURNS):
        call, is_trained = parts[2 * number + 1]
        (made,) = dialect.calls(call, {"pick": schema["function"]["parameters"]["properties"]})
        signs.append(made.arguments["sign"])
        assert is_trained and made == ToolCall("pick", {"sign": signs[-1]})
        if number < script.TURNS - 1:
            assert parts[2 * number + 2] == (dialect.context(call, [words[number + 1]]), False)
    assert signs[0] == "+" and signs[2] == "*" and len(parts) == 2 * script.TURNS
    assert len(parts[0][0]) <= config.data.max_prompt_length
    assert sum(len(ids) for ids, _ in parts[1:]) < config.data.max_response_length
    assert config.data.max_sample_length <= script.POSITIONS and config.rollout.turns.max_turns > script.TURNS


def test_a_right_sign_is_worth_one_and_a_lottery_what_is_drawn(kind):
    lots = []
    for signs, wanted in (("+%", [1.0, 0.0]), ("-*", [0.0, 1.0])):
        for _ in range(50):
            environment = kind()
            environment.reset({"extra_info": {"words": "sum north product"}}, 0)
            replies = [environment.step(Action("pick", {"sign": sign})) for sign in (signs[0], "-", signs[1])]
            assert [replies[0].reward, replies[2].reward] == wanted
            assert [reply.text for reply in replies] == ["north", "product", "done"]
            assert [reply.end for reply in replies] == [False, False, True]
            assert replies[2].parts == {"right": sum(wanted) / 2}
            lots.append(replies[1].reward)
    assert abs(statistics.mean(lots)) < 4.0 and 5.0 < statistics.stdev(lots) < 11.0


def test_each_training_row_has_as_many_lotteries_as_words_that_are_worth_something(script):
    picker = random.Random(0)
    rows = [script.mixed(picker) for _ in range(100)]
    assert all(sum(word in script.LOTTERIES for word in row) == script.TURNS // 2 for row in rows)
    assert {word for row in rows for word in row} == {*script.SIGNS, *script.LOTTERIES}
    assert {row[0] in script.LOTTERIES for row in rows} == {True, False}
