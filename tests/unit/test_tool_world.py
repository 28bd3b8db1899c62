"""The tool world: what it is warm-started on is, token for token, what a run makes of a call and its answer."""

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest
import torch

from mrl.acting.builtin import BUILTIN_TOOLS
from mrl.acting.dialects import ToolCall, dialect_of
from mrl.config.load import load_config
from mrl.model.registry import stop_token_ids

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = BUILTIN_TOOLS["calculator"].schema


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("make_tool_world", ROOT / "scripts" / "make_tool_world.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(ROOT / "scripts"))


def test_what_it_is_started_on_is_what_a_run_makes_of_it(script):
    tokenizer = script.make_tokenizer()
    dialect = dialect_of(tokenizer, {"tools": [SCHEMA]})
    config = load_config(ROOT / "parallel_configs" / "tool-moe" / "cpu.yaml").config
    for product in (script.Product(100, 100), script.Product(123, 456), script.Product(999, 999)):
        (prompt, _), (call, _), (told, _), (answer, _) = script.Answers(tokenizer).calling(product)
        messages = [{"role": "user", "content": f"{product.left}*{product.right}="}]
        text = tokenizer.apply_chat_template(messages, tools=[SCHEMA], tokenize=False, add_generation_prompt=True)
        assert tokenizer.encode(text, add_special_tokens=False) == prompt
        (made,) = dialect.calls(call, {"calculator": SCHEMA["function"]["parameters"]["properties"]})
        assert made == ToolCall("calculator", {"expression": f"{product.left}*{product.right}"})
        assert BUILTIN_TOOLS["calculator"].function(**made.arguments) == product.answer
        assert dialect.context(call, [product.answer]) == told
        assert len(prompt) <= config.data.max_prompt_length
        assert len(call) + len(told) + len(answer) < config.data.max_response_length / 2
        assert config.data.max_sample_length <= script.POSITIONS


def test_held_out_products_are_never_trained_on(script):
    train, held_out = script.split_products(0)
    assert not set(train) & set(held_out) and (len(train), len(held_out)) == (script.TRAIN, script.HELD_OUT)
    assert script.split_products(0) == (train, held_out) != script.split_products(1)
    assert all(100 <= p.left <= 999 and 100 <= p.right <= 999 for p in train)


def test_what_the_calculator_says_is_not_trained_on(script):
    answers = script.Answers(script.make_tokenizer())
    product = script.Product(123, 456)
    rows = [answers.calling(product), answers.guessing(product, random.Random(0))]
    ids, labels = script.batch_of(rows, answers.tokenizer.pad_token_id)
    trained = answers.tokenizer.decode(ids[0][labels[0] != -100])
    assert trained == script.CALL.format(123, 456) + "56088<|im_end|>"
    assert (labels[1] != -100).sum() == 6 and ids.shape == labels.shape


def test_a_started_model_is_saved_with_the_end_of_its_turns(script, tmp_path):
    tokenizer, model = script.make_tokenizer(), script.make_model(0, script.POSITIONS)
    before = model.lm_head.weight.clone()
    train, _ = script.split_products(0)
    script.warm_up(model, script.Answers(tokenizer), train, script.Calling(steps=2, batch=4), seed=0)
    assert not torch.equal(before, model.lm_head.weight)
    script.write_model(model, tokenizer, tmp_path / "model")
    assert stop_token_ids(str(tmp_path / "model")) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"] >= len(tokenizer)


def test_the_reward_looks_at_what_was_said_last(script):
    names: dict = {}
    exec(script.REWARD, names)
    said = 'calculator", ...\nuser\n<tool_response>\n56088\n</tool_response>\nassistant\n'
    assert names["compute_score"]("", "56088", "56088") == names["compute_score"]("", said + "56088", "56088") == 1.0
    assert names["compute_score"]("", said + "56089", "56088") == names["compute_score"]("", said, "56088") == 0.0
