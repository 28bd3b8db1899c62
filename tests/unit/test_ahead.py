"""Generation ahead of training with engines of no fixed speed:
the same rollouts whatever the order in which answers come.
"""

import json
import random
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import numpy as np
import pytest
from replicas import InMemory

from mrl.checkpoint.group_files import read_group, write_group
from mrl.checkpoint.manifest import file_facts
from mrl.cluster.engine_answers import EngineAnswers
from mrl.cluster.group_writer import record_of
from mrl.cluster.kept_tokens import going_on, with_kept
from mrl.cluster.request_streams import Arrived
from mrl.config.load import load_config
from mrl.config.schedule_rules import schedule_of
from mrl.data.batch import Prompt
from mrl.data.order import PromptStream
from mrl.data.samples import Sample, packed
from mrl.errors import DataError, Interrupted
from mrl.record.metrics import PhaseTimer
from mrl.reward.items import OK, RAISED, RewardResult
from mrl.schedule.ledger import Fingerprint
from mrl.schedule.rate import Observation
from mrl.schedule.request_routing import RequestRouting
from mrl.schedule.segments import token_versions
from mrl.train import ahead, drawn_groups, kept_groups
from mrl.train.ahead import Ahead, GenerationAhead
from mrl.train.generation import InTurn
from mrl.train.kept_groups import read_kept
from mrl.train.lost_engines import LostEngines
from mrl.train.resume import TrainState
from mrl.train.rollouts import Responder
from mrl.train.spool import Spool
from mrl.vllm.requests import Sampling

LONGEST, BATCH, N, PROMPTS = 12, 3, 2, 9
SIZES = [
    f"data.train_batch_size={BATCH}", f"rollout.n={N}", f"data.max_response_length={LONGEST}",
    "data.max_prompt_length=4",
    "actor.ppo_mini_batch_size=3", "trainer.total_training_steps=6",
]  # fmt: skip
MADE_BY = Fingerprint("data", "model")
TINY = "parallel_configs/tiny-moe/cpu.yaml"


class Engines:
    """Two engines whose answers come in any order; tokens are a function of seed, place and version."""

    names = ("engine 0", "engine 1")
    places = 4

    def __init__(self, seed: int):
        self._rng, self.version = random.Random(seed), 0
        self.under_way: list[Arrived] = []
        self.sent = 0
        self.is_dead = False

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
            self.under_way.append(Arrived(InMemory.whole(one), engine))
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
        time.sleep(0.003 * self._rng.random())  # the loop is sometimes first and sometimes second
        self._rng.shuffle(self.under_way)
        count = self._rng.randrange(min(4, len(self.under_way)) + 1)
        taken, self.under_way = self.under_way[:count], self.under_way[count:]
        return taken

    def answers(self, sampling):
        return EngineAnswers(self.streams(), RequestRouting(self.names, self.places), sampling, lambda: None)

    def generate(self, requests, sampling, on_arrival):
        """As the synchronous loop has it."""
        asked = [replace(request, max_tokens=LONGEST) for request in requests]
        parts = [InMemory.whole(one) for one in map(self.answer, asked)]
        on_arrival([Arrived(part, self.names[0]) for part in parts])
        return InMemory.joined(parts)


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

    def withdraw(self, sample_ids):
        self._waiting = deque(result for result in self._waiting if result.sample_id not in sample_ids)

    def forward(self): ...

    def collect(self, at_once):
        return [self._waiting.popleft() for _ in range(self._rng.randrange(len(self._waiting) + 1))]

    def drain(self, poll, limit):
        return [self._waiting.popleft() for _ in range(len(self._waiting))]


class Files:
    """Writes groups at once."""

    def begin(self, path, parts):
        return write_group(path, record_of(parts))

    def facts(self, begun):
        return dict(begun)


class Display:
    def progress(self, phase, done, total): ...


@pytest.fixture(autouse=True)
def in_memory(monkeypatch):
    for module in (ahead, drawn_groups, kept_groups):
        monkeypatch.setattr(module, "StoredSamples", InMemory)
    monkeypatch.setattr(ahead, "WAIT_S", 0.001)
    monkeypatch.setattr(ahead, "POLL_S", 0.01)
    sampling = lambda config: Sampling(1.0, LONGEST, ())  # noqa: E731
    monkeypatch.setattr(ahead, "training_sampling", sampling)
    for module in ("rollouts", "drawn_groups"):
        monkeypatch.setattr(f"mrl.train.{module}.training_sampling", sampling)


class World:
    """A run whose updates change nothing but the version."""

    def __init__(
        self, seed=0, overrides=(), state=None, score=None, spool=None, engines=Engines, prompts=PROMPTS, lost=None
    ):
        self.config = load_config(TINY, None, [*SIZES, *overrides]).config
        self.engines, self.rewards = engines(seed), Rewards(seed, **({"score": score} if score else {}))
        stream = PromptStream([Prompt(p, (1, p + 1), "test", "x") for p in range(prompts)], BATCH, seed=0)
        responder = Responder(self.engines, self.rewards, self.config.reward, Display(), lambda: None)
        self.state = state or TrainState()
        self.engines.version = self.state.step
        schedule = schedule_of(self.config)
        if schedule is None:
            self.generation = InTurn(self.config, responder, stream)
        else:
            self.spool = spool or Spool(Path(mkdtemp()) / "spool", Files())
            lost = lost or LostEngines(Path(mkdtemp()) / "lost")
            given = Ahead(schedule, MADE_BY, self.spool, lost, lost.suspects())
            self.generation = GenerationAhead(self.config, responder, stream, self.state, given)
        self.generation.begin()

    def step(self):
        rollouts = self.generation.take(self.state, PhaseTimer())
        self.generation.settle(PhaseTimer(), saves=False)
        assert not self.engines.under_way
        self.engines.version += 1
        self.state = self.generation.advanced(self.state.advanced(rollouts.cursor))
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


@pytest.mark.parametrize("seed", range(2))
def test_without_staleness_dynamic_sampling_is_that_of_the_synchronous_loop(seed):
    ahead_of = World(seed, ["trainer.schedule=bounded", *FILTERING]).steps(5)
    in_turn = World(seed + 9, FILTERING).steps(5)
    assert sum(rollouts.metrics["train/num_gen_batches"] for rollouts in in_turn) > 6
    assert_same(ahead_of, in_turn, among=in_turn[0].metrics.__contains__)


def test_without_staleness_it_is_the_synchronous_order():
    ahead_of = World(1, ["trainer.schedule=bounded"]).steps(5)
    in_turn = World(2).steps(5)
    assert_same(ahead_of, in_turn, among=in_turn[0].metrics.__contains__)


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
        state = TrainState(first.state.step, first.state.cursor, read_kept(folder, said, spool))
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
