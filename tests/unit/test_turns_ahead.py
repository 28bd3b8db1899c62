"""Conversations in runs that generate ahead of training: the same rows whatever the order in which answers come, and
what was under way goes on from a checkpoint.
"""

import asyncio
import json
import random
import threading
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase

import environment_classes
import numpy as np
import pytest
from dialect_templates import tokenizer
from generations import Files, origin_in
from replicas import InMemory
from segment_checks import token_versions
from seldom import seldom
from test_generation import BATCH, Engines, N, World, assert_same
from test_generation import in_memory as in_memory  # for all tests here

from mrl.acting.builtin import GuessTheNumber, calculator
from mrl.acting.dialects import dialect_of
from mrl.acting.tool import ToolsSpec, TurnsSpec
from mrl.cluster.request_streams import FinishedResponses
from mrl.data.samples import CALL_REASONS, STOP_REASONS, Sample, Samples, packed
from mrl.engine.conversations import Conversations
from mrl.engine.requests import Sampling
from mrl.errors import LostProcess
from mrl.generate.kept_groups import read_kept
from mrl.generate.spool import Spool
from mrl.generate.train_state import TrainState
from mrl.record.metrics import PhaseTimer
from mrl.reward.items import LEFT_OUT, OK, RewardResult

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
HELD = [*BOUNDED, "trainer.partial_rollouts=true"]
PARTIAL = [*HELD, "trainer.segment_tokens=45"]
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
        response = self.rest(request)
        yield sample(request, response, [self.version] * len(response))

    def rest(self, request) -> list[int]:
        """Of the turn that it is at."""
        begun = self.begun(list(request.prompt_ids))
        drawn = random.Random(f"{request.seed}/{self.version}").choice(ascii_lowercase)
        letter = TOKENS.decode(begun)[0] if begun else drawn
        ids = TOKENS.encode(self.said(letter) + "<|im_end|>", add_special_tokens=False)
        assert ids[: len(begun)] == begun
        return ids[len(begun) :][: request.max_tokens]

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


def sample(request, response: list[int], versions: list[int]) -> Samples:
    """A log-prob tells the version of its token."""
    stop = "stop" if response[-1:] == [END] else "length"
    log_probs = [-1.0 - version - i / 1000 for i, version in enumerate(versions)]
    starts = [i for i, version in enumerate(versions) if i and versions[i - 1] != version]
    given = (request.prompt_id, request.group_id, request.sample_id, request.seed, request.prompt_ids)
    later = tuple((i, versions[i]) for i in starts)
    return packed([Sample(*given, response, log_probs, stop, (versions or [0])[0], later_versions=later)])


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
    return TrainState(first.state.step, first.state.cursor, read_kept(folder, said, spool, origin_in(said))), spool


def check_answers(rows: Samples) -> None:
    """All context is what the calls before it bring in one environment from the beginning, however often it was begun
    anew.
    """
    dialect = dialect_of(TOKENS, {})
    for number in range(len(rows)):
        one = rows.rows(slice(number, number + 1))
        game = GuessTheNumber()
        game.reset({"extra_info": {}}, int(one.prompt_id[0]))
        (response,) = one.responses()
        starts = one.turn_starts.tolist()
        for start, end in pairwise(starts):
            own = one.sampled[start:end]
            turn, context = response[start:end][own], response[start:end][~own]
            answers = [ACTIONS[call.name](game, **call.arguments) for call in dialect.calls(turn, {})]
            assert answers and context.tolist() == dialect.context(turn.tolist(), answers)
        made = np.sum((one.call_names == b"guess") & (one.call_reasons == CALL_REASONS.index("ok")))
        assert dict(zip(one.part_names.tolist(), one.part_values.tolist(), strict=True))[b"guesses"] == made


ACTIONS = {
    "guess": lambda game, number: game.guess(number).text,
    "calculator": lambda game, expression: calculator(expression),
}


@pytest.mark.parametrize("schedule", seldom(SCHEDULES, "in order, partial"))
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
        check_answers(each)
    spans = [int(each.span_counts.max()) for each in rows]
    assert max(spans) == (3 if schedule == "in order, partial" else 1)


class Dying(Model):
    """Answers some requests of a conversation, and is lost at the next."""

    def __init__(self, version: int, turns: int):
        super().__init__(version)
        self.turns = turns

    async def generate(self, requests, sampling):
        if not self.turns:
            raise LostProcess("engine-0 died")
        self.turns -= 1
        async for batch in super().generate(requests, sampling):
            yield batch


class TalkingUntilLost(Talking):
    """Every other request is lost in its first, second or third turn; what is held of it comes back."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.held = self.continued = 0

    def talked(self, request, kept):
        self.continued += bool(kept)
        lost = self.sent % 2 and self._until_lost(request, kept)
        if not lost:
            return super().talked(request, kept)
        self.held += bool(lost[0].truncated[0])
        return replace(lost[0], call_seconds=0 * lost[0].call_seconds, turn_seconds=0 * lost[0].turn_seconds)

    def _until_lost(self, request, kept) -> list[Samples]:
        made = []

        async def until_lost():
            sampling = Sampling(1.0, LONGEST, (END,))
            async for batch in self.talks.generate(Dying(self.version, self.sent // 2 % 3), [request], sampling, kept):
                made.append(batch)

        with suppress(LostProcess):
            asyncio.run(until_lost())
        return made


@pytest.mark.parametrize("schedule", seldom(["synchronous", *SCHEDULES], "synchronous", "in order, partial"))
def test_lost_engines_cost_turns_and_no_bit(schedule):
    """Without partial rollouts a response that would outlive its step begins again."""
    lost = World(0, [*TALKS, *SCHEDULES.get(schedule, [])], engines=TalkingUntilLost)
    whole = World(0, [*TALKS, *SCHEDULES.get(schedule, [])], engines=Talking)
    assert_same(lost.steps(4), whole.steps(4))
    assert lost.engines.held >= 6
    goes_on = schedule in ("synchronous", "in order, partial")
    assert lost.engines.continued >= lost.engines.held if goes_on else lost.engines.continued == 0


@pytest.mark.parametrize("schedule", seldom(SCHEDULES, "in order, partial"))
def test_a_resumed_run_goes_on_with_what_was_under_way(schedule, tmp_path):
    whole = world(0, schedule).steps(6)
    for step in (1, 4):
        first = world(1, schedule)
        begun = first.steps(step)
        state, spool = resumed(first, tmp_path / str(step))
        assert any(parts.responses for parts in state.ahead.groups.values()), "conversations were under way"
        assert bool(held_in(state)) == (schedule == "in order, partial")
        second = world(2, schedule, state, spool)
        assert_same([*begun, *second.steps(6 - step)], whole)


def held_in(state: TrainState) -> list[Samples]:
    """Rows that are to go on."""
    rows = [row.read() for parts in state.ahead.groups.values() for row in parts.responses.values()]
    return [row for row in rows if row.truncated[0] and row.response_lengths[0] < LONGEST]


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


class Live(Talking):
    """One engine that makes tokens one by one, and holds what it is at over an update, or gives it back."""

    names = ("engine 0",)

    def __init__(self, seed: int):
        super().__init__(seed)
        self.paused = self.gives_back = False
        self.unfinished = 0
        self._ended: set[int] = set()
        self._lock = threading.Lock()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    @property
    def waiting_for(self):
        return list(self.names) if self.unfinished or self.under_way else []

    def send(self, engine, requests, sampling, kept=()):
        before = {number: replace(row.read(), sample_id=np.array([number])) for number, row in dict(kept).items()}
        for request in requests:
            self.unfinished += 1
            asyncio.run_coroutine_threadsafe(self._talked(request, before), self.loop)

    async def _talked(self, request, kept):
        async for made in self.talks.generate(self, [request], Sampling(1.0, LONGEST, (END,)), kept):
            clockless = replace(made, call_seconds=0 * made.call_seconds, turn_seconds=0 * made.turn_seconds)
            with self._lock:
                self.under_way.append(FinishedResponses(InMemory.whole(clockless), "engine 0"))
        self.unfinished -= 1

    async def generate(self, requests, sampling):
        """What the engine is asked by a conversation."""
        (request,) = requests
        made: list[int] = []
        versions: list[int] = []
        rest: list[int] = []
        while made[-1:] != [END] and len(made) < request.max_tokens:
            await asyncio.sleep(0.0002)
            if self.gives_back or request.handle in self._ended:
                break
            if not self.paused:
                rest = rest or Model(self.version).rest(request)
                made.append(rest[len(made)])
                versions.append(self.version)
        yield sample(request, made, versions)

    def take(self, timeout_s):
        time.sleep(0.001)
        with self._lock:
            self._rng.shuffle(self.under_way)
            taken, self.under_way = self.under_way[:3], self.under_way[3:]
        return taken

    def pause_for_update(self, give_back):
        self.gives_back = give_back
        self.paused = True
        return give_back

    def end_requests(self, handles):
        for numbers in handles.values():
            self._ended |= set(numbers)
            asyncio.run_coroutine_threadsafe(self.talks.end(numbers), self.loop).result()


class Flight(World):
    """A run in which whatever is ready first is trained on, one prompt a number."""

    def __init__(self, seed: int, state=None, spool=None):
        overrides = [*TALKS, *HELD, "trainer.order=ready_first"]
        super().__init__(seed, overrides, state, spool=spool, engines=Live, prompts=1000)
        self.prompts: list[int] = []
        self.rows: list[tuple[int, Samples]] = []

    def step(self):
        """Every second one is saved: engines give back what they are at."""
        rollouts = self.generation.next_batch(PhaseTimer())
        step = self.state.step
        self.rows.append((step, rollouts.samples.read()))
        self.prompts += self.rows[-1][1].prompt_id[::N].tolist()
        self.generation.drain(PhaseTimer(), saves=step % 2 == 1)
        self.engines.version += 1
        self.engines.gives_back = self.engines.paused = False
        self.state = self.generation.resume(self.state.advanced(rollouts.cursor))


def check_conversations(rows: list[tuple[int, Samples]]) -> None:
    """Each token is of the weights that its row names, none too old; no environment failed."""
    for step, each in rows:
        versions = token_versions(each)[each.sampled]
        np.testing.assert_array_equal(np.floor(-each.rollout_log_probs[each.sampled] - 1).astype(int), versions)
        assert step - 2 <= versions.min() and versions.max() <= step
        assert STOP_REASONS.index(LEFT_OUT) not in each.stop_reason.tolist()
        check_answers(each)


def test_ready_first_conversations_that_engines_hold_or_give_back_go_on(tmp_path):
    spans, turns, held = 0, 0, []
    for seed in range(2):
        first = Flight(seed)
        first.steps(4)
        state, spool = resumed(first, tmp_path / str(seed))
        held += held_in(state)
        second = Flight(seed + 10, state, spool)
        second.steps(2)
        check_conversations([*first.rows, *second.rows])
        prompts = [*first.prompts, *second.prompts]
        assert len(set(prompts)) == len(prompts) == 6 * BATCH
        spans = max(spans, *(int(each.span_counts.max()) for _, each in first.rows))
        turns = max(turns, *(int(each.turn_counts.max()) for _, each in first.rows))
    assert spans > 1 and turns > 2
    assert any(row.turn_counts[0] > 1 for row in held), "a checkpoint has conversations that engines gave back"
