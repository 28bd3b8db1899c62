"""Requests of one call: each sent once, none waits while an engine is free, and no clock decides where one must not."""

import heapq
import random

import numpy as np
import pytest
from generations import SteadyFleet
from replicas import InMemory

from mrl.cluster import request_streams as engine_progress
from mrl.cluster.request_streams import EngineProgress, FinishedResponses, FleetChange
from mrl.cluster.rollout_group import request_limit
from mrl.config.deployment import Deployment
from mrl.config.load import load_config
from mrl.data.samples import Sample, packed
from mrl.engine.requests import EngineReading, Request, Sampling
from mrl.errors import Interrupted
from mrl.generate import rollouts
from mrl.schedule.buffer import GroupBuffer
from mrl.schedule.dispatch import Dispatcher
from mrl.schedule.rate import Observation
from mrl.schedule.staleness import Schedule

ENGINES = ("a", "b", "c")


class Routing:
    """Requests of one call: groups of `n` responses, prompts of so many tokens each."""

    def __init__(self, engines, max_requests, prompts, n, longest=100):
        self.buffer = GroupBuffer(Schedule(len(prompts), n, longest))
        self.dispatcher = Dispatcher(self.buffer, list(engines), max_requests)
        self.unanswered = len(prompts) * n
        for group, tokens in zip(self.buffer.reserve(), prompts, strict=True):
            group.prompt_tokens = tokens
            self.dispatcher.admit(group)

    def assignments(self):
        """(request, group, engine), in their order."""
        return [(sent.request, sent.number, sent.engine) for sent in self.dispatcher.assignments()]

    def answered(self, request, length=1):
        assert self.dispatcher.answered(request, length, True)
        self.unanswered -= 1


def answered_in_any_order(routing: Routing, rng: random.Random, check=lambda under_way: None) -> dict[int, str]:
    """By which engine each request was answered."""
    made_by, under_way = {}, []
    while routing.unanswered:
        sent = [(request, engine) for request, _, engine in routing.assignments()]
        assert not made_by.keys() & {request for request, _ in sent}
        made_by |= sent
        under_way += sent
        check(under_way)
        rng.shuffle(under_way)
        for _ in range(rng.randint(1, len(under_way))):
            routing.answered(under_way.pop()[0])
    return made_by


@pytest.mark.parametrize("seed", range(30))
def test_every_request_is_sent_once_and_none_waits_while_an_engine_is_free(seed):
    rng = random.Random(seed)
    n, max_requests, engines = rng.randint(1, 6), rng.choice((1, 2, 5, None)), rng.randint(1, 3)
    prompts = [rng.randint(1, 50) for _ in range(rng.randint(1, 12))]
    routing = Routing(ENGINES[:engines], max_requests, prompts, n)
    every = routing.unanswered

    def check(under_way):
        held = [sum(engine == name for _, engine in under_way) for name in ENGINES[:engines]]
        queued = routing.unanswered - len(under_way)
        assert max(held) <= (max_requests or every)
        assert queued == 0 or min(held) == max_requests

    assert len(answered_in_any_order(routing, rng, check)) == every
    loads = routing.dispatcher.loads
    assert set(loads.tokens.values()) == {0} == set(loads.requests.values())
    assert routing.dispatcher.answered(1, 1, True) is None, "nobody waits for it"


def test_without_places_all_is_decided_before_the_first_answer():
    prompts = [5, 40, 17, 3, 22]
    found = [answered_in_any_order(Routing(ENGINES, None, prompts, 4), random.Random(seed)) for seed in range(3)]
    assert found[0] == found[1] == found[2] and len(set(found[0].values())) == 3
    routing = Routing(ENGINES, None, prompts, 4)
    assert len(routing.assignments()) == 20 and routing.assignments() == []


def test_responses_of_a_prompt_stay_together_and_a_lone_prompt_is_spread():
    together = Routing(ENGINES, None, [10] * 6, 4).assignments()
    engines_of = [{engine for _, number, engine in together if number == group} for group in range(6)]
    assert all(len(engines) == 1 for engines in engines_of)
    assert [sum(engine == name for *_, engine in together) for name in ENGINES] == [8, 8, 8]
    alone = [engine for *_, engine in Routing(ENGINES, None, [10], 12).assignments()]
    assert [alone.count(name) for name in ENGINES] == [7, 5, 0]


def seconds(max_requests: int | None, lengths: list[int], seats: int) -> int:
    """Until the last answer; an engine makes a token of each of `seats` responses a second."""
    routing = Routing(ENGINES, max_requests, [10] * (len(lengths) // 4), 4, longest=1000)
    waiting, running, now = {engine: [] for engine in ENGINES}, [], 0
    wanted = dict(enumerate(lengths, start=1))
    while routing.unanswered:
        for request, _, engine in routing.assignments():
            waiting[engine].append(request)
        for engine in ENGINES:
            while waiting[engine] and sum(name == engine for *_, name in running) < seats:
                request = waiting[engine].pop(0)
                heapq.heappush(running, (now + wanted[request], request, engine))
        now, request, _ = heapq.heappop(running)
        routing.answered(request, wanted[request])
    return now


def test_where_lengths_have_a_heavy_tail_engines_end_sooner_together():
    """No seat is empty while a request waits, so Graham's bound holds."""
    rng, ratios = random.Random(0), []
    for _ in range(20):
        lengths = [min(1000, int(rng.lognormvariate(4.5, 1.2)) + 1) for _ in range(96)]
        free, spread = seconds(4, lengths, seats=4), seconds(None, lengths, seats=4)
        assert free <= sum(lengths) / 12 + max(lengths)
        ratios.append(free / spread)
    assert np.mean(ratios) < 1


@pytest.mark.parametrize(
    ("device", "deterministic", "limit"),
    [("cpu", True, 10), ("cpu", False, 10), ("cuda", True, None), ("cuda", False, 10)],
)
def test_where_neighbours_change_bits_a_run_that_repeats_leaves_nothing_to_a_clock(device, deterministic, limit):
    settings = ["rollout.max_num_seqs=8", f"cluster.device={device}"]
    config = load_config("parallel_configs/tiny-moe/cpu.yaml", None, settings).config
    assert request_limit(Deployment.of(config), deterministic) == limit
    talks = load_config("parallel_configs/tiny-moe/cpu.yaml", None, [*settings, "rollout.turns={tools: [calculator]}"])
    more = limit and 4 * limit
    assert request_limit(Deployment.of(talks.config), deterministic) == more, "others are sampled while tools work"


class Streams:
    """Engines that answer one request a call, the newest first."""

    def __init__(self, names, max_requests):
        self.names, self.max_requests = names, max_requests
        self.sent, self.most = [], 0
        self.fleet = SteadyFleet()

    def follow(self):
        return FleetChange([], [])

    def streams(self):
        return self

    def send(self, engine, requests, sampling):
        self.sent += [(engine, request) for request in requests]
        self.most = max(self.most, sum(name == engine for name, _ in self.sent))

    @property
    def waiting_for(self):
        return [engine for engine, _ in self.sent]

    def take(self, timeout_s):
        _, r = self.sent.pop()
        one = packed(
            [Sample(r.prompt_id, r.group_id, r.sample_id, r.seed, r.prompt_ids, (r.seed,), (-1.0,), "stop", 3)]
        )
        return [FinishedResponses(InMemory.whole(one), "a")]


def groups_of(n, *requests):
    return [requests[first : first + n] for first in range(0, len(requests), n)]


def test_a_call_has_all_its_responses_in_the_order_of_their_numbers(monkeypatch):
    monkeypatch.setattr(rollouts, "ResponseStore", InMemory)
    engines = Streams(["a", "b"], 2)
    requests = [Request(i, (i // 3,), 50 + i) for i in range(15)]
    found = rollouts.generate(engines, groups_of(3, *requests), Sampling(1.0, 4, ())).read()
    assert found.sample_id.tolist() == list(range(15)) and [int(r[0]) for r in found.responses()] == list(range(50, 65))
    assert engines.most == 2


def test_requests_that_no_engine_has_end_the_run():
    class Losing(Streams):
        def take(self, timeout_s):
            self.sent.clear()
            return []

    requests = [Request(i, (7,), 0) for i in range(2)]
    with pytest.raises(Interrupted, match="2 requests are unanswered, and no engine has them"):
        rollouts.generate(Losing(["a"], 2), groups_of(2, *requests), Sampling(1.0, 4, ()))


# ---------------------------------------------------------------- who stands still


class Fleet:
    """Engines by name, with the tokens that each has made; None: it does not answer. Time is that of the test.

    Their caches are as full as `share` says, and lose `preemptions` requests in all.
    """

    def __init__(self, monkeypatch, **made):
        self.made, self.now, self.asked = made, 0.0, 0
        self.share, self.preemptions, self.acts = 0.0, 0, False
        monkeypatch.setattr(
            engine_progress.ray, "wait", lambda refs, timeout: ([r for r in refs if self.made[r] is not None], [])
        )
        monkeypatch.setattr(engine_progress.ray, "get", self.reading)
        self.progress = EngineProgress(self.ask, 10.0, lambda: self.now)

    def reading(self, engine):
        return EngineReading(self.made[engine], self.share, 1.0, self.preemptions, self.acts)

    def ask(self, engine):
        self.asked += 1
        return engine

    def pass_time(self, until, *holding):
        while self.now < until:
            self.now += 1.0
            self.made = {name: tokens and tokens + name.startswith("long") for name, tokens in self.made.items()}
            self.progress.check(holding)


def test_a_long_response_is_not_late_and_an_engine_that_stands_still_is_named(monkeypatch):
    fleet = Fleet(monkeypatch, long=1, stopped=7, silent=None)
    fleet.pass_time(100, "long")
    assert fleet.asked < 50, "now and then"
    with pytest.raises(Interrupted, match=r"no token within 10 s from stopped$"):
        fleet.pass_time(200, "long", "stopped")
    assert fleet.now <= 100 + 10 + 6, "its first answer is a sign of life, and comes within 6 s"
    fleet = Fleet(monkeypatch, long=1, silent=None)
    with pytest.raises(Interrupted, match=r"no token within 10 s from silent$"):
        fleet.pass_time(20, "long", "silent")


def test_an_engine_whose_responses_all_wait_for_tools_does_not_stand_still(monkeypatch):
    """Nothing is asked of it; once it is, its time begins."""
    fleet = Fleet(monkeypatch, sound=7)
    fleet.acts = True
    fleet.pass_time(100, "sound")
    fleet.acts = False
    fleet.pass_time(106, "sound")
    with pytest.raises(Interrupted, match=r"no token within 10 s from sound$"):
        fleet.pass_time(130, "sound")


def test_meters_are_told_once_and_preemptions_are_those_since(monkeypatch):
    fleet = Fleet(monkeypatch, long=1, also_long=1, silent=None)
    assert fleet.progress.observed(5) is None, "nobody was asked"
    fleet.share, fleet.preemptions = 0.5, 3
    fleet.pass_time(6, "long", "also_long")
    assert fleet.progress.observed(7) == Observation(0.5, 6, 7), "of two engines"
    assert fleet.progress.observed(7) is None
    fleet.share, fleet.preemptions = 0.9, 4
    fleet.pass_time(12, "long", "also_long")
    assert fleet.progress.observed(8) == Observation(0.9, 2, 8)


def test_a_full_cache_counts_once_a_round_and_not_when_its_engine_has_nothing_more(monkeypatch):
    engines = [f"long_{i}" for i in range(8)]
    fleet = Fleet(monkeypatch, **dict.fromkeys(engines, 1))
    fleet.share, told = 0.9, []
    for second in range(1, 31):
        fleet.pass_time(second, *engines[: 1 + second])  # they begin one by one, and so are asked at different times
        told += [fleet.progress.observed(8)]
    assert 0 < sum(each is not None for each in told) <= 30 / 2.5, "a quarter of the limit of 10 s lies between two"
    fleet.pass_time(34, *engines)
    fleet.share = 0.1
    fleet.pass_time(38, engines[0])
    assert fleet.progress.observed(1).kv_use == 0.1, "of the engine that has requests"


def test_time_without_requests_and_time_that_is_excused_do_not_count(monkeypatch):
    fleet = Fleet(monkeypatch, stopped=7)
    fleet.pass_time(8, "stopped")
    fleet.pass_time(100)
    fleet.pass_time(108, "stopped")
    fleet.progress.pause()
    fleet.progress.resume()
    fleet.pass_time(116, "stopped")
    fleet.now = 300.0
    fleet.progress.begin("stopped")
    fleet.pass_time(308, "stopped")
    with pytest.raises(Interrupted):
        fleet.pass_time(330, "stopped")
