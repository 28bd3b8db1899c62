"""The repair world: its options name what is there, its tests tell the right sign from others, and its warm start says
what a run makes of a call.
"""

import importlib
import random
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from sandbox_images import BWRAP

from mrl.acting.dialects import ToolCall, dialect_of
from mrl.acting.environment import Action, actions_of
from mrl.acting.sandboxes.broker import Broker
from mrl.acting.sandboxes.repository import repository
from mrl.acting.sandboxes.sandbox import SandboxSpec
from mrl.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
PRESET = ROOT / "parallel_configs" / "tool-moe" / "cpu.yaml"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("make_repair_world")
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def world(script, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("repair") / "world"
    tiny = importlib.import_module("make_tiny_world")
    tiny.make(out, 0, False, script.Repairing(steps=1, batch=2), script.build, script.options)
    return out


@pytest.fixture(scope="module")
def config(world):
    given = (world / "options").read_text().split()
    assert given[::2] == ["--set"] * (len(given) // 2)
    return load_config(PRESET, None, given[1::2]).config


@pytest.fixture(scope="module")
def kind(config):
    named = config.rollout.turns.sandbox
    spec = SandboxSpec(image=named.image, max_memory_gib=0.2, max_disk_mib=named.max_disk_mib, max_test_seconds=5.0)
    return repository(Broker(spec))


def test_its_options_name_what_is_there(world, config):
    assert (Path(config.model.path) / "config.json").is_file()
    assert Path(config.rollout.turns.sandbox.image) == world / "image" and (world / "image/bin/busybox").is_file()
    for path in (*config.data.train_files, *config.data.val_files):
        for row in pq.read_table(path).to_pylist():
            task = row["extra_info"]["task"]
            folder = world / "image" / task["folder"].lstrip("/")
            name = row["prompt"][0]["content"].split()[-1]
            assert (folder / name).is_file() and task["test"] == f"sh {task['folder']}/tests/check {name}"


def test_the_control_has_the_tests_of_other_repositories(world):
    rows = pq.read_table(world / "data/shuffled.parquet").to_pylist()
    tasks = [row["extra_info"]["task"] for row in rows]
    own = [task["test"].split("/tests/")[0].endswith(task["folder"]) for task in tasks]
    assert sum(own) < 5 and len({task["test"].split()[1] for task in tasks}) == len(rows)


def test_other_tests_fail_as_own_ones_do_while_nothing_is_mended(script):
    """A control that would be rewarded for leaving the sign alone would unlearn calls."""
    repairs, _ = script.split_repairs(0)
    others = script.others_tests(repairs, 1)
    assert sorted(others) == list(range(len(repairs)))
    wanted = [script.SIGNS[repairs[other][0]] for other in others]
    standing = [sign for _, sign, _ in repairs]
    own = [script.SIGNS[word] for word, _, _ in repairs]
    assert not any(sign == want for sign, want in zip(standing, wanted, strict=True))
    right = sum(mine == want for mine, want in zip(own, wanted, strict=True))
    assert 0.2 < right / len(repairs) < 0.47  # one in three, by chance


def test_its_tests_tell_each_sign_from_each_other(script):
    for numbers in script.TRIED:
        assert len({script.computed(sign, *numbers) for sign in script.SIGNS.values()}) == len(script.SIGNS)


def test_what_it_is_started_on_is_what_a_run_makes_of_it(script, config, kind):
    tokenizer = script.make_tokenizer(script.WORDS, script.POSITIONS)
    schema = actions_of(kind, "repository")["run"].schema
    dialect = dialect_of(tokenizer, {"tools": [schema]})
    answers = script.Repairs(tokenizer)
    for share, wanted in ((1.0, {"+"}), (0.0, {"+", "*", "%"})):
        picker = random.Random(0)
        signs = set()
        for _ in range(20):
            (prompt, _), (call, _), (told, _), (last, _) = answers.replacing(("sum", "-", "f"), picker, share)
            (made,) = dialect.calls(call, {"run": schema["function"]["parameters"]["properties"]})
            sign = made.arguments["command"].split("/")[2]
            assert made == ToolCall("run", {"command": f"sed -i s/-/{sign}/ f"})
            signs.add(sign)
        assert signs == wanted
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "sum - f"}], tools=[schema], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.encode(text, add_special_tokens=False) == prompt
    assert dialect.context(call, ["(it printed nothing)"]) == told
    assert len(prompt) <= config.data.max_prompt_length
    assert len(call) + len(told) + len(last) < config.data.max_response_length


@BWRAP
@pytest.mark.parametrize("file, is_own", [("train", True), ("shuffled", False)])
def test_the_right_sign_alone_passes(script, world, kind, file, is_own):
    row = pq.read_table(world / "data" / f"{file}.parquet").to_pylist()[0]
    word, sign, name = row["prompt"][0]["content"].split()
    other = row["extra_info"]["task"]["test"].split()[1]
    readme = ((world / "image" / other.lstrip("/")).parents[1] / "README").read_text()
    assert is_own == (readme == f"{name}: the {word} of two numbers\n")
    right = script.SIGNS[readme.split(" the ")[1].split()[0]]
    rewards = {}
    for each in (right, "-" if right == "+" else "+"):
        environment = kind()
        environment.reset(row, 0)
        said = environment.step(Action("run", {"command": f"sed -i s/{sign}/{each}/ {name}"}))
        assert said.text == "(it printed nothing)"
        rewards[each == right] = environment.judge().reward
        environment.close()
    assert rewards == {True: 1.0, False: 0.0}
