"""Generation ahead of training with engines of no fixed speed:
the same rollouts whatever the order in which answers come.
"""

import json
import random
import threading
import time
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from generations import Files, SteadyFleet, generation_of, new_folder, origin_in
from replicas import InMemory
from segment_checks import token_versions

from mrl.checkpoint.group_files import read_group
from mrl.checkpoint.manifest import file_facts
from mrl.cluster.request_streams import FinishedResponses, FleetChange
from mrl.config.load import load_config
from mrl.config.schedule_rules import schedule_of
from mrl.data.batch import Prompt
from mrl.data.order import DataCursor, PromptStream
from mrl.data.samples import Sample, Samples, packed
from mrl.engine.kept_tokens import going_on, with_kept
from mrl.engine.requests import Request
from mrl.errors import DataError, Interrupted
from mrl.generate import generation, judged_groups, kept_groups
from mrl.generate import rollouts as rollouts_module
from mrl.generate.kept_groups import read_kept
from mrl.generate.rollouts import Responder, sample_seed
from mrl.generate.spool import Spool
from mrl.generate.train_state import TrainState
from mrl.record.metrics import PhaseTimer
from mrl.reward.items import OK, RAISED, RewardResult
from mrl.schedule.rate import Observation

LONGEST, BATCH, N, PROMPTS = 12, 3, 2, 9
SIZES = [
    f"data.train_batch_size={BATCH}", f"rollout.n={N}", f"data.max_response_length={LONGEST}",
    "data.max_prompt_length=4",
    "actor.ppo_mini_batch_size=3", "trainer.total_training_steps=6",
]  # fmt: skip
TINY = "parallel_configs/tiny-moe/cpu.yaml"


class Engines:
    """Two engines whose answers come in any order; tokens are a function of seed, place and version."""

    names = ("engine 0", "engine 1")
    max_requests = 4

    def __init__(self, seed: int):
        self._rng, self.version = random.Random(seed), 0
        self.under_way: list[FinishedResponses] = []
        self.sent = 0
        self.is_dead = False
        self.fleet = SteadyFleet()

    def follow(self):
        return FleetChange([], [])

    @property
    def progress(self):
        return SimpleNamespace(pause=lambda: None, resume=lambda: None, observed=self.observed)

    def observed(self, under_way):
        return None

    def streams(self) -> "Engines":
        return self

    @property
    def waiting_for(self):
        return list(self.names) if self.under_way else []

    def send(self, engine, requests, sampling, kept=()):
        before = {number: replace(row.read(), sample_id=np.array([number])) for number, row in dict(kept).items()}
        for request in requests:
            one = with_kept(before, self.answer(going_on(request, before.get(request.sample_id))))
            self.under_way.append(FinishedResponses(InMemory.whole(one), engine))
            self.sent += 1

    def answer(self, request):
        """Until an end that comes sooner or later."""
        rng = random.Random(f"{request.seed}/{self.version}")
        ids = []
        while len(ids) < (request.max_tokens or LONGEST) and (not ids or ids[-1]):
            ids.append(rng.randrange(9))
        reason = "length" if ids[-1] else "stop"
        log_probs = tuple(-1.0 - self.version - i / 100 for i in range(len(ids)))
        sample = Sample(
            request.prompt_id,
            request.group_id,
            request.sample_id,
            request.seed,
            request.prompt_ids,
            ids,
            log_probs,
            reason,
            self.version,
        )
        return packed([sample])

    def take(self, timeout_s):
        if self.is_dead:
            raise Interrupted("generation: engine 1 died")
        time.sleep(0.0003 * self._rng.random())  # the loop is sometimes first and sometimes second
        self._rng.shuffle(self.under_way)
        count = self._rng.randrange(min(4, len(self.under_way)) + 1)
        taken, self.under_way = self.under_way[:count], self.under_way[count:]
        return taken

    def end_requests(self, handles):
        ended = {number for numbers in handles.values() for number in numbers}
        self.under_way = [part for part in self.under_way if int(part.samples.rows.sample_id[0]) not in ended]


class Rewards:
    """Scores that come late."""

    def __init__(self, seed: int, score=lambda item: float(len(item.response_text) % 3)):
        self._rng, self._score, self._waiting, self.reason = random.Random(seed), score, deque(), OK

    def submit(self, samples, questions, engine, held_s):
        for question, response in zip(questions, samples.read().responses(), strict=True):
            item = question.answered(" ".join(map(str, response)))
            self._waiting.append(RewardResult(item.sample_id, self._score(item), {}, self.reason))

    def for_another(self):
        return self

    def withdraw_all(self):
        self._waiting = deque()

    def withdraw(self, sample_ids):
        self._waiting = deque(result for result in self._waiting if result.sample_id not in sample_ids)

    def forward(self): ...

    def collect(self, at_once):
        return [self._waiting.popleft() for _ in range(self._rng.randrange(len(self._waiting) + 1))]

    def wait(self, seconds): ...

    def drain(self, poll, limit):
        return [self._waiting.popleft() for _ in range(len(self._waiting))]


class Display:
    def progress(self, phase, done, total): ...


@pytest.fixture(autouse=True)
def in_memory(monkeypatch):
    for module in (judged_groups, kept_groups, rollouts_module):
        monkeypatch.setattr(module, "ResponseStore", InMemory)
    monkeypatch.setattr(generation, "WAIT_S", 0.0003)
    monkeypatch.setattr(generation, "REWARD_WAIT_S", 0.0003)
    monkeypatch.setattr(generation, "POLL_S", 0.002)


class World:
    """A run whose updates change nothing but the version."""

    def __init__(
        self, seed=0, overrides=(), state=None, score=None, spool=None, engines=Engines, prompts=PROMPTS, lost=None,
        left=None, groups_again=lambda groups: None,
    ):  # fmt: skip
        self.config = load_config(TINY, None, [*SIZES, *overrides]).config
        self.engines, self.rewards = engines(seed), Rewards(seed, **({"score": score} if score else {}))
        stream = PromptStream([Prompt(p, (1, p + 1), "test", "x") for p in range(prompts)], BATCH, seed=0)
        mend = getattr(self.engines, "mend", lambda: None)
        responder = Responder(self.engines, self.rewards, self.config.reward, Display(), lambda: None, mend)
        self.state = state or TrainState()
        self.engines.version = self.state.step
        self.spool = spool or Spool(new_folder() / "spool", Files())
        self.generation = generation_of(
            self.config, responder, stream, self.state, self.spool, lost, left, groups_again
        )
        self.generation.begin()

    def step(self, saves=False):
        rollouts = self.generation.next_batch(PhaseTimer())
        self.generation.drain(PhaseTimer(), saves)
        assert not self.engines.under_way
        self.engines.version += 1
        self.state = self.generation.resume(self.state.advanced(rollouts.cursor))
        return rollouts

    def steps(self, count):
        try:
            return [self.step() for _ in range(count)]
        finally:
            self.generation.close()


def facts(rollouts):
    """All that a step takes, and what it says of rewards and groups."""
    return [
        (r.samples.read().arrays, r.rewards.tolist(), [x.score for x in r.results], r.cursor,
            counted(r.metrics)) for r in rollouts
    ]  # fmt: skip


def counted(metrics):
    return {
        name: value for name, value in metrics.items() if name.startswith(("train/", "reward/", "training/", "async/"))
    }


def assert_same(found, expected, among=lambda name: True):
    for (arrays, *rest), (others, *other) in zip(facts(found), facts(expected), strict=True):
        *rest, metrics = rest
        *other, expected_metrics = other
        assert rest == other and arrays.keys() == others.keys()
        assert {k: v for k, v in metrics.items() if among(k)} == {k: v for k, v in expected_metrics.items() if among(k)}
        for name, column in arrays.items():
            np.testing.assert_array_equal(column, others[name], err_msg=name)


AHEAD = {
    "one step off": ["trainer.schedule=one_step_off"],
    "two, partial": ["trainer.schedule=bounded", "trainer.max_staleness=2", "trainer.partial_rollouts=true",
        "trainer.segment_tokens=3"],
    "filtered": [
        "trainer.schedule=bounded", "trainer.max_staleness=1", "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=0", "algorithm.filter_groups.on_exhausted=error",
    ],
}  # fmt: skip


FILTERING = AHEAD["filtered"][2:]


def in_turn(overrides, steps):
    """What the synchronous schedule is, said as a loop: (columns, rewards, place in the data) of each step.

    Prompts draw by draw, each answered and judged, until a batch of groups differs; what is more is dropped.
    """
    config = load_config(TINY, None, [*SIZES, *overrides]).config
    engines = Engines(0)
    stream = PromptStream([Prompt(p, (1, p + 1), "test", "x") for p in range(PROMPTS)], BATCH, seed=0)
    cursor, draw, found = DataCursor(), 0, []
    for step in range(steps):
        engines.version, kept = step, []
        while len(kept) < BATCH:
            prompts, cursor = stream.next_batch(cursor)
            draw += 1
            for prompt in prompts:
                seeds = [sample_seed(config.trainer.seed, "train", draw, prompt.prompt_id, k) for k in range(N)]
                group = [engines.answer(Request(0, prompt.token_ids, seed, prompt.prompt_id)) for seed in seeds]
                scores = [float(len(" ".join(map(str, next(one.responses())))) % 3) for one in group]
                if len(set(scores)) > 1 or not config.algorithm.filter_groups.enable:
                    kept.append((group, scores))
        groups, scores = zip(*kept[:BATCH], strict=True)
        samples = Samples.joined([one for group in groups for one in group])
        ids = {"group_id": np.repeat(np.arange(BATCH), N), "sample_id": np.arange(BATCH * N)}
        found.append((replace(samples, **ids).arrays, [score for own in scores for score in own], cursor))
    return found


@pytest.mark.parametrize("schedule", [[], ["trainer.schedule=bounded"]], ids=["sync", "bounded at staleness 0"])
@pytest.mark.parametrize("filtering", [[], FILTERING], ids=["", "filtered"])
def test_without_staleness_it_is_the_synchronous_loop_at_every_speed(schedule, filtering):
    expected = in_turn(filtering, 5)
    for seed in range(3):
        steps = World(seed, [*schedule, *filtering]).steps(5)
        for rollouts, (columns, rewards, cursor) in zip(steps, expected, strict=True):
            assert (rollouts.rewards.tolist(), rollouts.cursor) == (rewards, cursor)
            for name, column in rollouts.samples.read().arrays.items():
                np.testing.assert_array_equal(column, columns[name], err_msg=name)
        assert not any(name.startswith("async/") for name in steps[0].metrics)


@pytest.mark.parametrize("filtering", [[], FILTERING], ids=["", "filtered"])
def test_a_synchronous_run_goes_on_from_a_checkpoint_of_its_place_in_the_data_alone(filtering, tmp_path):
    """As checkpoints were before they had a ledger; and from one of today."""
    whole = World(0, filtering).steps(6)
    first = World(1, filtering)
    begun = first.steps(2)
    old = TrainState(2, first.state.cursor)
    said = json.loads(json.dumps(first.state.ahead.write(tmp_path)))
    assert not list(tmp_path.iterdir()), "nothing is kept of groups"
    new = TrainState(
        2, first.state.cursor, read_kept(tmp_path, said, Spool(tmp_path / "spool", Files()), origin_in(said))
    )
    for state in (old, new):
        assert_same([*begun, *World(2, filtering, state).steps(4)], whole)


class HeldInSend(Engines):
    """One request each. What is sent once the step's batch is complete is held on its way until `go`."""

    max_requests = 1

    def __init__(self, seed):
        super().__init__(seed)
        self.buffer = None
        self.knows_buffer, self.holds, self.go = threading.Event(), threading.Event(), threading.Event()
        self.said = []

    def send(self, engine, requests, sampling, kept=()):
        self.knows_buffer.wait(60.0)
        if self.buffer._batch():
            self.holds.set()
            self.go.wait(60.0)
            self.said.append("sent")
        super().send(engine, requests, sampling, kept)

    def end_requests(self, handles):
        self.said.append("ended")


def test_the_end_of_a_request_does_not_overtake_it(monkeypatch):
    """Of six groups the first is filtered. When the next three are there, requests of the last two are on their way."""

    def score(item):
        return float(item.sample_id % N) if item.sample_id >= N else 0.0

    def collect(rewards, at_once):
        return [rewards._waiting.popleft() for _ in list(rewards._waiting)]

    monkeypatch.setattr(Rewards, "collect", collect)
    world = World(0, FILTERING, score=score, engines=HeldInSend)
    buffer = world.engines.buffer = world.generation._buffer
    world.engines.knows_buffer.set()
    assert world.engines.holds.wait(60.0)
    batch = threading.Thread(target=world.generation.next_batch, args=(PhaseTimer(),), daemon=True)
    batch.start()
    while not buffer.is_training:
        time.sleep(0.001)
    time.sleep(0.05)  # in which it would be ended
    world.engines.go.set()
    batch.join(60.0)
    world.generation.close()
    assert world.engines.said == ["sent", "ended"]


@pytest.mark.parametrize("overrides", [[], FILTERING, *AHEAD.values()], ids=["in turn", "in turn, filtered", *AHEAD])
def test_progress_is_of_the_responses_of_the_steps_groups_and_of_those_filtered_for_it(overrides, monkeypatch):
    shown, summed = [], []

    def progress(self, phase, done, total):
        made = world.generation
        groups = list(made._buffer.groups.values())
        if not made._rules.schedule.is_synchronous:
            groups = groups[:BATCH]
        filtered = N * len(made._groups.filtered)
        shown.append((done, total))
        summed.append((filtered + sum(sum(group.ended) for group in groups), filtered + N * len(groups)))

    monkeypatch.setattr(Display, "progress", progress)
    world = World(overrides=overrides)
    world.steps(3)
    assert shown == summed and max(done for done, _ in shown) >= N * BATCH


def test_what_is_closed_asks_for_no_reward_any_more():
    world = World(0, AHEAD["one step off"])
    world.rewards.collect = lambda at_once: []
    while not world.rewards._waiting:
        time.sleep(0.001)
    world.generation.close()
    assert not world.rewards._waiting


@pytest.mark.parametrize("name", AHEAD)
def test_speed_changes_no_bit(name):
    runs = [World(seed, AHEAD[name]).steps(6) for seed in range(4)]
    for other in runs[1:]:
        assert_same(other, runs[0])
    oldest = [int(rollouts.samples.read().span_versions.min()) for rollouts in runs[0]]
    ages = [step - version for step, version in enumerate(oldest)]
    assert (
        min(ages) >= 0
        and max(ages) == schedule_of(load_config(TINY, None, [*SIZES, *AHEAD[name]]).config).max_staleness
    )


def test_a_response_of_several_versions_has_each_tokens_own_log_prob():
    rollouts = World(0, AHEAD["two, partial"]).steps(5)
    samples = rollouts[4].samples.read()
    assert rollouts[4].metrics["async/versions_per_sample"] > 1.5
    assert samples.span_counts.max() == 3
    np.testing.assert_array_equal(token_versions(samples), np.floor(-samples.rollout_log_probs - 1).astype(int))


@pytest.mark.parametrize("name", AHEAD)
def test_a_resumed_run_goes_on_with_what_was_under_way(name, tmp_path):
    whole = World(0, AHEAD[name]).steps(6)
    for step in range(1, 6):
        first = World(1, AHEAD[name])
        begun = first.steps(step)
        folder, spool = tmp_path / str(step), Spool(tmp_path / "spool", Files())
        folder.mkdir()
        said = json.loads(json.dumps(first.state.ahead.write(folder)))
        state = TrainState(first.state.step, first.state.cursor, read_kept(folder, said, spool, origin_in(said)))
        second = World(2, AHEAD[name], state, spool=spool)
        assert state.ahead.groups, "something was under way"
        assert_same([*begun, *second.steps(6 - step)], whole)


class Crowded(Engines):
    """Caches that are always short of room."""

    most = 0

    def observed(self, under_way):
        self.most = max(self.most, len(self.under_way))
        return Observation(0.9, 1, under_way)

    def take(self, timeout_s):
        assert self.under_way
        return super().take(timeout_s)


@pytest.mark.parametrize("order", ["ready_first", "in_order"])
def test_engines_that_are_short_of_cache_get_fewer_requests_but_not_in_order(order):
    settings = ["trainer.schedule=bounded", "trainer.max_staleness=1", f"trainer.order={order}"]
    world = World(0, settings, engines=Crowded)
    rows = [rollouts.metrics for rollouts in world.steps(6)]
    every = 2 * BATCH * N
    if order == "in_order":
        assert "async/window" not in rows[-1] and world.engines.most == 0, "nobody asked"
    else:
        assert rows[-1]["async/window"] == len(Engines.names) < every and world.engines.most <= every


def test_nothing_is_issued_past_the_last_step():
    world = World(0, AHEAD["two, partial"])
    world.steps(6)
    assert len(world.state.ahead.ledger.groups) == 0 and world.state.ahead.ledger.next_number == 6 * BATCH


def test_groups_without_a_difference_are_replaced_and_too_many_end_the_run():
    replaced = World(0, AHEAD["filtered"]).steps(4)
    assert sum(r.metrics["train/num_gen_batches"] for r in replaced) > 4
    for rollouts in replaced:
        assert all(
            rollouts.rewards[g * N : g * N + N].min() < rollouts.rewards[g * N : g * N + N].max() for g in range(BATCH)
        )
    limited = [*AHEAD["filtered"][:3], "algorithm.filter_groups.max_num_gen_batches=2", AHEAD["filtered"][4]]
    with pytest.raises(DataError, match="responses that do not differ in"):
        World(0, limited, score=lambda item: 1.0).steps(1)


def test_what_ends_the_thread_ends_the_loop():
    world = World(0, AHEAD["one step off"])
    world.step()
    world.engines.is_dead = True
    with pytest.raises(Interrupted, match="engine 1 died"):
        world.steps(2)


@pytest.mark.parametrize("more", [[], AHEAD["filtered"][2:]], ids=["", "filtered"])
def test_a_reward_that_fails_ends_the_run_with_its_own_reason(more):
    world = World(0, [*AHEAD["one step off"], *more], score=None)
    world.rewards.reason = RAISED
    with pytest.raises(DataError, match="the reward failed on"):
        world.steps(1)


@pytest.mark.parametrize("name", AHEAD)
def test_what_is_kept_is_the_same_tokens_whatever_the_speed(name, tmp_path):
    """And the same bytes, where weights wait for rewards."""
    said = []
    for seed in range(3):
        world = World(seed, AHEAD[name])
        world.steps(3)
        (folder := tmp_path / str(seed)).mkdir()
        said.append(world.state.ahead.write(folder)["files"])
        assert all(file_facts(folder / file) == facts for file, facts in said[-1].items())
    assert said[0].keys() == said[1].keys() == said[2].keys() and said[0]
    if name == "filtered":
        assert said[0] == said[1] == said[2]
    for file in said[0]:
        first, *others = [read_group(tmp_path / str(seed) / file) for seed in range(3)]
        for other in others:
            assert_columns(first.samples, other.samples)
            both = first.results.keys() & other.results.keys()
            assert {index: first.results[index] for index in both} == {index: other.results[index] for index in both}


def assert_columns(samples, expected):
    for column, values in samples.arrays.items():
        np.testing.assert_array_equal(values, expected.arrays[column], err_msg=column)
