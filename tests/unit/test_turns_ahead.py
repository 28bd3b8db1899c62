"""Conversations in runs that generate ahead of training: the same rows whatever the order in which answers come, and
what was under way goes on from a checkpoint.
"""

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase

import environment_classes
import numpy as np
import pytest
from dialect_templates import tokenizer
from generations import Files
from replicas import InMemory
from test_generation import Engines, World, assert_same
from test_generation import in_memory as in_memory  # for all tests here

from mrl.data.samples import STOP_REASONS, Sample, packed
from mrl.environments.tool import ToolsSpec, TurnsSpec
from mrl.flow.conversations import Conversations
from mrl.flow.request_streams import FinishedResponses
from mrl.reward.items import LEFT_OUT, OK, RewardResult
from mrl.schedule.segments import token_versions
from mrl.train.kept_groups import read_kept
from mrl.train.resume import TrainState
from mrl.train.spool import Spool
from mrl.vllm.requests import Sampling

TOKENS = tokenizer("hermes")
FILE = str(Path(environment_classes.__file__))
END = TOKENS.convert_tokens_to_ids("<|im_end|>")
START, ROLE = TOKENS.convert_tokens_to_ids("<|im_start|>"), TOKENS.encode("assistant\n", add_special_tokens=False)
PROMPT = 2  # tokens, as of World
LONGEST = 500
SPEC = TurnsSpec(
    ToolsSpec(("calculator",), FILE, environments=("guess_the_number",)),
    max_turns=4, max_calls=2, max_seconds=600.0, max_answer_characters=60, timeout_s=60.0, num_workers=2,
)  # fmt: skip
TALKS = ["rollout.turns={tools: [calculator], environments: [guess_the_number]}", f"data.max_response_length={LONGEST}"]
BOUNDED = ["trainer.schedule=bounded", "trainer.max_staleness=2"]
PARTIAL = [*BOUNDED, "trainer.partial_rollouts=true", "trainer.segment_tokens=45"]
SCHEDULES = {"one step off": ["trainer.schedule=one_step_off"], "in order": BOUNDED, "in order, partial": PARTIAL}


@pytest.fixture(scope="module", autouse=True)
def talks():
    Talking.talks = Conversations(SPEC, TOKENS)
    yield
    Talking.talks.close()


class Model:
    """The first letter of a turn is a function of seed and weights, the rest of the turn one of that letter."""

    def __init__(self, version: int):
        self.version = version

    async def generate(self, requests, sampling):
        (request,) = requests
        begun = self.begun(list(request.prompt_ids))
        drawn = random.Random(f"{request.seed}/{self.version}").choice(ascii_lowercase)
        letter = TOKENS.decode(begun)[0] if begun else drawn
        ids = TOKENS.encode(self.said(letter) + "<|im_end|>", add_special_tokens=False)
        assert ids[: len(begun)] == begun
        response = ids[len(begun) :][: request.max_tokens]
        stop = "stop" if response[-1] == END else "length"
        log_probs = [-1.0 - self.version - i / 1000 for i in range(len(response))]
        given = (request.prompt_id, request.group_id, request.sample_id, request.seed, request.prompt_ids)
        yield packed([Sample(*given, response, log_probs, stop, self.version)])

    @staticmethod
    def said(letter: str) -> str:
        rng = random.Random(letter)
        calls = [
            {"name": "guess", "arguments": {"number": rng.randrange(1, 101)}},
            {"name": "calculator", "arguments": {"expression": f"{rng.randrange(99)}*{rng.randrange(99)}"}},
        ]
        made = "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls if rng.random() < 0.5)
        return letter + "".join(rng.choices("abc ", k=rng.randrange(12))) + made

    @staticmethod
    def begun(prompt: list[int]) -> list[int]:
        """What is there of the turn: all behind the prompt, or behind the newest context."""
        if START not in prompt:
            return prompt[PROMPT:]
        opened = len(prompt) - prompt[::-1].index(START)
        return prompt[opened + len(ROLE) :]


class Talking(Engines):
    """Two engines that hold conversations."""

    talks: Conversations

    def send(self, engine, requests, sampling, kept=()):
        before = {number: replace(row.read(), sample_id=np.array([number])) for number, row in dict(kept).items()}
        for request in requests:
            self.under_way.append(FinishedResponses(InMemory.whole(self.talked(request, before)), engine))
            self.sent += 1

    def talked(self, request, kept):
        async def whole():
            sampling = Sampling(1.0, LONGEST, (END,))
            return [batch async for batch in self.talks.generate(Model(self.version), [request], sampling, kept)]

        (made,) = asyncio.run(whole())
        return replace(made, call_seconds=0 * made.call_seconds, turn_seconds=0 * made.turn_seconds)  # a clock's


def world(seed: int, schedule: str, state=None, spool=None, more=()) -> World:
    return World(seed, [*TALKS, *SCHEDULES[schedule], *more], state, spool=spool, engines=Talking)


def resumed(first: World, folder: Path) -> tuple[TrainState, Spool]:
    """From a checkpoint of now."""
    spool = Spool(folder.parent / "spool", Files())
    folder.mkdir()
    said = json.loads(json.dumps(first.state.ahead.write(folder)))
    return TrainState(first.state.step, first.state.cursor, read_kept(folder, said, spool)), spool


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_speed_changes_no_bit_and_each_token_is_of_the_weights_that_its_row_names(schedule):
    runs = [world(seed, schedule).steps(6) for seed in range(2)]
    assert_same(*runs)
    rows = [rollouts.samples.read() for rollouts in runs[0]]
    turns = np.concatenate([each.turn_counts for each in rows])
    stops = {STOP_REASONS[reason] for each in rows for reason in each.stop_reason.tolist()}
    assert turns.max() == 4 and turns.mean() > 1.5 and {"stop", "turns"} <= stops
    for step, each in enumerate(rows):
        own = each.rollout_log_probs[each.sampled]
        np.testing.assert_array_equal(np.floor(-own - 1).astype(int), token_versions(each)[each.sampled])
        assert step - each.weight_version.min() <= 2
    spans = [int(each.span_counts.max()) for each in rows]
    assert max(spans) == (3 if schedule == "in order, partial" else 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_resumed_run_goes_on_with_what_was_under_way(schedule, tmp_path):
    whole = world(0, schedule).steps(6)
    for step in (1, 4):
        first = world(1, schedule)
        begun = first.steps(step)
        state, spool = resumed(first, tmp_path / str(step))
        assert any(parts.responses for parts in state.ahead.groups.values()), "conversations were under way"
        rows = [row.read() for parts in state.ahead.groups.values() for row in parts.responses.values()]
        held = [row for row in rows if row.truncated[0] and row.response_lengths[0] < LONGEST]
        assert bool(held) == (schedule == "in order, partial")
        second = world(2, schedule, state, spool)
        assert_same([*begun, *second.steps(6 - step)], whole)


def test_a_checkpoint_knows_responses_that_nobody_judges(tmp_path):
    """They are no failed rewards, which are asked for again: their group stays finished."""
    first = world(1, "one step off", more=["reward.max_failure_share=1.0"])
    first.rewards.collect = lambda at_once: [left_out(result) for result in first.rewards.drain(None, 0)]
    first.steps(2)
    state, _ = resumed(first, tmp_path / "2")
    told = {number: dict(parts.results) for number, parts in state.ahead.groups.items()}
    assert told == {number: dict(parts.results) for number, parts in first.state.ahead.groups.items()}
    assert {LEFT_OUT, OK} == {result.reason for results in told.values() for result in results.values()}


def left_out(result: RewardResult) -> RewardResult:
    return RewardResult(result.sample_id, 0.0, {}, LEFT_OUT, "act: died") if result.sample_id % 5 == 0 else result
