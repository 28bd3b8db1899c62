"""A run whose responses call a calculator, a tool to some prompts and an environment's action to others: every token is
what the engine sampled or read, and context is not trained on.
"""

import importlib.util
import itertools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_runs import finish, wait_for_step
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from world import ROOT, metrics, succeeded

from mrl.checkpoint.group_files import read_group
from mrl.record.sample_files import read_samples
from mrl.tools.compare_runs import checkpoint_difference, metrics_difference

pytestmark = pytest.mark.real

PRESET = ROOT / "parallel_configs" / "tool-moe" / "cpu.yaml"
PROMPTS, N = 4, 4
ENVIRONMENT = '''"""The calculator as an environment that knows the answer."""

from mrl.acting.builtin import calculator
from mrl.acting.environment import Environment, Reply


class Sum(Environment):
    actions = ("calculator",)
    repeatable = True

    def reset(self, row, seed):
        self.truth = row["ground_truth"]

    def calculator(self, expression: str) -> Reply:
        """Computes.

        Args:
            expression: a product
        """
        try:
            text = calculator(expression)
        except (ValueError, SyntaxError, ZeroDivisionError):
            text = "?"
        right = text == self.truth
        return Reply(text, 0.5 + 0.5 * right, {"right": right}, end=right)
'''
AGENT = '''"""Knows of a chat endpoint alone: calls the calculator itself, asks some turns again, edits its history."""

import json
import os
import random
import urllib.request

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def ask(messages):
    body = {"model": "policy", "messages": messages, "tools": [TOOL], "temperature": 0.5}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        said = json.load(answer)
    return said["choices"][0]["message"], [said["usage"]["prompt_tokens"], said["usage"]["completion_tokens"]]


def told(call):
    left, _, right = json.loads(call["function"]["arguments"]).get("expression", "").partition("*")
    text = "?"
    if left.isdecimal() and right.isdecimal():
        text = str(int(left) * int(right))
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def run(url, key, row, seconds):
    index = row["extra_info"]["index"]
    messages = list(row["prompt"])
    message, used = ask(messages)
    if index % 3 == 1:
        message, used = ask(messages)
    line = [used]
    for turn in range(2):
        messages.append(message)
        if not message.get("tool_calls"):
            break
        before = len(messages)
        messages += [told(call) for call in message["tool_calls"]]
        message, used = ask(messages)
        if index % 3 == 2 and turn == 0:
            line.append(used)
            messages[before:] = [messages[before] | {"content": "17"}, *messages[before + 1 :]]
            message, used = ask(messages)
        line.append(used)
    with open(os.path.join(FOLDER, f"{random.getrandbits(64)}.json"), "w") as file:
        json.dump([row["prompt"][0]["content"], line], file)
'''
LAST_WORDS = '''"""Right is what was said last."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.rsplit("assistant\\n", 1)[-1].strip() == ground_truth)
'''
REWARD = '''"""The environment's, where there is one."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["environment"]:
        return {"score": extra_info["outcome"]["reward"], "turns": extra_info["num_turns"]}
    return float(solution_str.rsplit("assistant\\n", 1)[-1].strip() == ground_truth)
'''


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A tool world whose warm start is short and calls nearly always."""
    folder = tmp_path_factory.mktemp("world")
    sys.path.insert(0, str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("make_tool_world", ROOT / "scripts" / "make_tool_world.py")
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    sys.path.remove(str(ROOT / "scripts"))
    train, held_out = script.split_products(seed=0)
    tokenizer, model = script.make_tokenizer(), script.make_model(0, script.POSITIONS)
    plan = script.Calling(steps=60, batch=16, share=0.9, label_smoothing=0.02)
    script.warm_up(model, script.Answers(tokenizer), train, plan, seed=0)
    script.write_model(model, tokenizer, folder / "model")
    (folder / "data").mkdir()
    for name, products in (("train", train[:32]), ("val", held_out[:4])):
        rows = script.data_rows(products, name)
        for number, row in enumerate(rows):  # turn about: the tool, and the environment, whose action has its name
            row["extra_info"] |= {
                "environment": ("", "Sum")[number % 2],
                "tool_selection": [["calculator"], []][number % 2],
            }
        pq.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{name}.parquet")
    (folder / "reward.py").write_text(REWARD)
    (folder / "environments.py").write_text(ENVIRONMENT)
    return folder


@pytest.fixture(scope="module")
def run(world, tmp_path_factory) -> Path:
    """Turns are credited one by one, which changes nothing of what is sampled in a first step."""
    folder = tmp_path_factory.mktemp("run") / "run"
    by_turn = {"algorithm__adv_estimator": "gigpo", "algorithm__gamma": 0.9}
    by_turn["algorithm__policy_loss__loss_mode"] = "gspo-token"
    succeeded("train", str(PRESET), *given(world, folder, **by_turn))
    return folder


def given(world: Path, folder: Path, **more) -> list[str]:
    """Options of a run of two steps, or of what `more` says."""
    values = {
        "model.path": world / "model", "data.train_files": world / "data" / "train.parquet",
        "data.val_files": world / "data" / "val.parquet", "reward.custom_reward_function.path": world / "reward.py",
        "data.train_batch_size": PROMPTS, "actor.ppo_mini_batch_size": PROMPTS, "rollout.n": N,
        "actor.ppo_micro_batch_size_per_gpu": 8, "trainer.total_training_steps": 2, "trainer.save_freq": -1,
        "trainer.test_freq": 2, "rollout.val_kwargs.n": 1, "trainer.run_dir": folder, "data.shuffle": False,
        "rollout.turns.environments": ["Sum"], "rollout.turns.path": world / "environments.py",
    } | {key.replace("__", "."): value for key, value in more.items()}  # fmt: skip
    return [text for key, value in values.items() for text in ("--set", f"{key}={json.dumps(value, default=str)}")]


def test_it_trains_on_responses_of_several_turns(run):
    rows = [row for row in metrics(run) if row["training/global_step"]]
    assert [row["training/global_step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["turns/mean"] > 1.2 and row["turns/context_tokens"] > 4
        assert row["training/rollout_log_probs_abs_diff_max"] < 1e-3
        assert row["actor/updates"] == 1 or row["critic/score/max"] == row["critic/score/min"]
        assert row["critic/advantages/max"] > 0 > row["critic/advantages/min"]


def test_each_answer_is_the_calculators_and_stands_where_it_was_called(run, world):
    decode = Tokenizer.from_file(str(world / "model" / "tokenizer.json")).decode
    called = 0
    for row in (row for step in (1, 2) for row in read_samples(run / "samples", step)):
        sampled = np.array(row["sampled"])
        starts = [turn["first_token"] for turn in row["turns"]]
        assert sampled[-1] and sampled[0] and starts == [0, *(np.flatnonzero(np.diff(sampled.astype(int)) == 1) + 1)]
        for turn, (start, end) in zip(row["turns"], zip(starts, [*starts[1:], len(sampled)], strict=True), strict=True):
            own = np.arange(start, end)
            said = decode([row["response_ids"][i] for i in own[sampled[own]]], skip_special_tokens=False)
            told = decode([row["response_ids"][i] for i in own[~sampled[own]]], skip_special_tokens=False)
            assert said.count("<tool_call>") == turn["calls"] or not told
            product = re.fullmatch(
                r'<tool_call>\n\{"name": "calculator", "arguments": \{"expression": "(\d+)\*(\d+)"\}\}\n</tool_call>'
                r"<\|im_end\|>", said,
            )  # fmt: skip
            if told and product:
                called += 1
                answer = int(product[1]) * int(product[2])
                assert told == (
                    f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n"
                    "<|im_start|>assistant\n"
                )
    assert called >= 4


def test_what_the_environment_gave_is_the_reward(run):
    """By the row's own calls: it ends where the product is right, and is worth 1 there, 1/2 for each other call."""
    closed = 0
    for row in (row for step in (1, 2) for row in read_samples(run / "samples", step)):
        given = sum(turn["reward"] for turn in row["turns"])
        is_closed = row["stop_reason"] == "closed"
        acted = sum(call["name"] == "calculator" and call["reason"] == "ok" for call in row["calls"])
        if "turns" in row["reward"]:  # of the environment
            assert row["reward"]["score"] == given == 0.5 * acted + 0.5 * is_closed
            assert row["reward"]["turns"] == len(row["turns"])
        else:
            assert not given and not is_closed
        closed += is_closed
    assert closed >= 4
    for row in (row for row in metrics(run) if row["training/global_step"]):
        assert 0 <= row["tools/calculator/failed"] < row["tools/calculator/calls"] >= 4  # it raises for what is no sum
        assert row["turns/ended/environment"] == 0 < row["turns/ended/closed"]


def test_transformers_says_of_what_was_sampled_what_the_engine_said(run, world):
    check_log_probs(run, world)


def check_log_probs(run: Path, world: Path) -> None:
    """Over whole rows, each branch by itself, by the weights of the first step; what was read in between is computed as
    the engine did.
    """
    model = AutoModelForCausalLM.from_pretrained(world / "model", dtype=torch.float32).eval()
    several = 0
    for row in read_samples(run / "samples", 1):
        ids = torch.tensor(row["prompt_ids"] + row["response_ids"])
        sampled = torch.tensor([False] * len(row["prompt_ids"]) + row["sampled"])
        given = torch.tensor([0.0] * len(row["prompt_ids"]) + row["rollout_log_probs"])
        for part in branches_of(row):
            with torch.no_grad():
                log_probs = model(ids[None, part]).logits.log_softmax(-1)[0, :-1]
            expected = log_probs.gather(-1, ids[part][1:, None])[:, 0]
            assert (expected - given[part][1:])[sampled[part][1:]].abs().max() < 1e-4
        assert not given[~sampled].any()
        several += not all(row["sampled"])
    assert several >= 4


def branches_of(row: dict) -> list[slice]:
    """Where each sequence of a row stands among its tokens, prompt and response."""
    before = len(row["prompt_ids"])
    begins = [branch["first_token"] for branch in row.get("branches") or []][1:]
    places = [0, *(before + begin for begin in begins), before + len(row["response_ids"])]
    return [slice(*pair) for pair in itertools.pairwise(places)]


AHEAD = {
    "trainer__schedule": "one_step_off", "trainer__total_training_steps": 3, "trainer__save_freq": 1,
    "trainer__max_actor_ckpt_to_keep": 3, "trainer__deterministic": True,
}  # fmt: skip
ROUTED = {"actor__router_replay": "R3", "rollout__enable_prefix_caching": False}


def started(world: Path, run_dir: Path, schedule: dict, *more: str) -> subprocess.Popen:
    command = ["mrl", "train", str(PRESET), *given(world, run_dir, **schedule), *more]
    log = run_dir.with_suffix(".log").open("a")
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def stopped_and_resumed(world: Path, folder: Path, schedule: dict) -> list[dict]:
    """Lines of a run, after it was held against one that a signal ended and that went on: no bit is another."""
    whole, stopped = folder / "whole", folder / "stopped"
    ends = [(whole, 0, ()), (stopped, 5, ()), (stopped, 0, ("--resume",))]
    for run_dir, code, more in ends:
        process = started(world, run_dir, schedule, *more)
        if code:
            wait_for_step(process, run_dir, 1)
            process.send_signal(signal.SIGTERM)
        assert finish(process, run_dir) == code, run_dir.with_suffix(".log").read_text()[-3000:]
    last = f"step-{schedule['trainer__total_training_steps']}"
    assert metrics_difference(metrics(stopped), metrics(whole)) is None
    assert checkpoint_difference(*(each / "checkpoints" / last for each in (stopped, whole))) is None
    rows = [row for row in metrics(whole) if row["training/global_step"]]
    assert all(row["turns/mean"] > 1.2 and row["turns/ended/environment"] == 0 for row in rows)
    return rows


@pytest.mark.long
def test_ahead_of_training_conversations_go_on_after_a_signal_bit_by_bit(world, tmp_path):
    """The checkpoint of the signal has conversations of the step after it, whole, with what each turn called and where
    the engine's routers sent each token.
    """
    rows = stopped_and_resumed(world, tmp_path, AHEAD | ROUTED)
    assert [row["training/off_policy/trajectory_staleness/max"] for row in rows] == [0, 1, 1]
    assert all(row["router/missing_routes"] == 0 for row in rows)
    check_routes(tmp_path / "whole" / "checkpoints" / "step-1", world)


def check_routes(checkpoint: Path, world: Path) -> None:
    """Of groups on their way at a checkpoint, by the weights of the start: every token goes where Transformers sends
    it, those of prompts and of context too. The last one was sampled, and never computed.
    """
    model = AutoModelForCausalLM.from_pretrained(world / "model", dtype=torch.float32).eval()
    groups = [read_group(file).samples for file in sorted(checkpoint.glob("group-*.npz"))]
    groups = [samples for samples in groups if not samples.span_versions.any()]
    assert len(groups) >= PROMPTS, "all of the next step"
    rows = [samples.rows(slice(number, number + 1)) for samples in groups for number in range(len(samples))]
    for row in rows:
        with torch.no_grad():
            found = model(torch.from_numpy(row.token_ids.astype(np.int64))[None], output_router_logits=True)
        chosen = [layer.topk(model.config.num_experts_per_tok).indices for layer in found.router_logits]
        expected = np.stack([experts.sort(-1).values.numpy() for experts in chosen], axis=1)
        assert np.array_equal(np.sort(row.routes[:-1], -1), expected[:-1])
        assert (row.routes[-1] == -1).all()
    assert sum(np.count_nonzero(~row.is_sampled) for row in rows) >= PROMPTS * N, "tokens that tools wrote"


@pytest.fixture(scope="module", params=["sync", "one_step_off"])
def agents_run(request, world, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "notes").mkdir()
    (folder / "agent.py").write_text(AGENT.replace("FOLDER", repr(str(folder / "notes"))))
    (folder / "reward.py").write_text(LAST_WORDS)
    agent = {
        "trainer__schedule": request.param, "rollout__endpoint": True, "rollout__agent": {"path": folder / "agent.py"},
        "rollout__turns": {
            "tools": [], "environments": [], "path": None, "network": True, "num_workers": 4, "timeout_s": 100,
            "folders": [folder / "notes"], "max_turns": 6,
        },
        "rollout__turns__environments": [], "rollout__turns__path": None,
        "reward__custom_reward_function__path": folder / "reward.py",
        "data__max_response_length": 104,  # all that the model has positions for: branches have room
    }  # fmt: skip
    succeeded("train", str(PRESET), *given(world, folder / "run", **agent))
    return folder


@pytest.mark.long
def test_a_strangers_agent_is_trained_over_the_endpoint(agents_run, world):
    """Each request that is trained had as many tokens as its branch of the stored row up to there, and those tokens:
    the log-probs of what was sampled behind them are Transformers' of the branch. What the agent left is trained too.
    """
    run = agents_run / "run"
    rows = [row for row in metrics(run) if row["training/global_step"]]
    assert [row["training/global_step"] for row in rows] == [1, 2]
    assert rows[0]["training/rollout_log_probs_abs_diff_max"] < 1e-3  # ahead, the second step is of the weights before
    for row in rows:
        assert row["turns/mean"] > 1.2
        assert row["turns/ended/closed"] + row["turns/ended/length"] + row["turns/ended/context"] == 1
        assert row["endpoint/overridden"] >= PROMPTS * N
    assert sum(row.get("endpoint/retries", 0) for row in rows) >= N
    assert sum(row.get("endpoint/branches", 0) for row in rows) >= 1
    check_log_probs(run, world)
    noted = sorted(json.loads(file.read_text()) for file in (agents_run / "notes").glob("*.json"))
    decode = Tokenizer.from_file(str(world / "model" / "tokenizer.json")).decode
    stored = []
    for row in (row for step in (1, 2) for row in read_samples(run / "samples", step)):
        prompt = decode(row["prompt_ids"], skip_special_tokens=False)
        assert prompt.startswith("<|im_start|>system\ncalculator<|im_end|>\n"), "the agent's tools are in it"
        starts = [turn["first_token"] for turn in row["turns"]]
        sampled = np.array(row["sampled"])
        ends = [*starts[1:], len(sampled)]
        before = len(row["prompt_ids"])
        parts = branches_of(row)
        used = []
        for start, end in zip(starts, ends, strict=True):
            own = next(part for part in parts if part.start <= before + start < part.stop)
            used.append([before + start - own.start, int(sampled[start:end].sum())])
        has_all = not any(call["reason"] == "untrained" for call in row["calls"])
        if row["stop_reason"] == "closed" and has_all:
            stored.append([prompt.rpartition("user\n")[2].partition("<|im_end|>")[0], used])
    assert len(stored) >= PROMPTS * N // 2
    for each in stored:
        noted.remove(each)
