"""The machines of `mrl.schedule` drive a simulated fleet: nothing is lost or trained twice, no token is stale,
none waits for ever.
"""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from fleet import Deadlock, EngineKind, Fleet, World
from fleet_cases import heavy_tailed, random_case, random_schedule, random_world, run, verdicts
from fleet_speed import SOURCE_000, phases, speed_of
from seldom import seldom

from mrl.schedule.staleness import Schedule, violations

CASES = 200


@pytest.mark.parametrize("cases", seldom([CASES, 10_000], CASES))
def test_random_schedules_lose_nothing_and_keep_every_bound(cases):
    seen = Counter()
    for number in range(cases):
        seen.update(what for what, times in run(random_case(number)).seen.items() if times)
    for what in (
        "lost",
        "hung and lost",
        "killed",
        "stale",
        "failed",
        "filtered",
        "quarantined",
        "brought back",
        "too few left",
        "nobody left",
        "the same elsewhere",
    ):
        assert seen[what] >= 5, f"{what}: {seen}"


SLOW, FAST = EngineKind(0.05, 0.002), EngineKind(0.005, 0.0001)
DISTURBED = {
    "one engine is ten times slower": dict(engines=(SLOW, FAST)),
    "one engine": dict(engines=(SLOW,)),
    "four engines of two seats": dict(engines=(replace(FAST, seats=2),) * 4),
    "slow rewards": dict(reward_s=lambda number: 20.0),
    "rewards of groups that are not needed yet are slow": dict(reward_s=lambda number: 50.0 * (number in (8, 17, 25))),
    "a slow trainer": dict(train_s=lambda tokens: 60.0),
    "a slow sync": dict(sync_s=30.0),
    "an engine dies": dict(deaths=((3.0, 0),)),
    "killed three times": dict(kills=(2.0, 17.0, 40.0)),
    "requests are given back": dict(keeps_requests=False),
}


def in_order(staleness: int, **rules) -> Schedule:
    return Schedule(3, 2, 300, staleness, "in_order", partial_rollouts=staleness > 0, **rules)


def plain_world() -> World:
    return World((FAST, FAST), heavy_tailed(1, 250), verdict=verdicts(2, 0.05, 0.25))


IN_ORDER = {
    "sync": (in_order(0), 1),
    "one step off": (in_order(1), 1),
    "S1, borders at 80": (in_order(1, segment_tokens=80), 2),
    "S2": (in_order(2), 2),
    "S4, borders at 40": (in_order(4, segment_tokens=40), 4),
}


@pytest.mark.parametrize(("schedule", "versions"), IN_ORDER.values(), ids=IN_ORDER)
def test_in_order_speed_changes_nothing(schedule, versions):
    """What each step trains on, and by which version each token was made, under delays, deaths and kills."""
    expected = Fleet(schedule, plain_world()).run(6).books.trained
    assert max(len(response) for _, _, spans, _ in expected for response in spans) == versions
    for name, disturbance in DISTURBED.items():
        fleet = Fleet(schedule, replace(plain_world(), **disturbance)).run(6)
        assert fleet.books.trained == expected, name


def by_whole_batches(verdict, batch: int, steps: int) -> list[tuple[int, int]]:
    """(step, group) as a synchronous loop has them that draws whole batches and drops what it has too many."""
    found, first = [], 0
    for step in range(steps):
        kept: list[int] = []
        while len(kept) < batch:
            kept += [number for number in range(first, first + batch) if verdict(number) == "finished"]
            first += batch
        found += [(step, number) for number in kept[:batch]]
    return found


def test_at_staleness_0_whole_batches_are_those_of_the_synchronous_loop_at_every_speed():
    schedule, verdict = replace(in_order(0), whole_batches=True), verdicts(2, 0.05, 0.45)
    for name, disturbance in DISTURBED.items():
        fleet = Fleet(schedule, replace(plain_world(), verdict=verdict, **disturbance)).run(8)
        assert [(step, number) for step, number, *_ in fleet.books.trained] == by_whole_batches(verdict, 3, 8), name
        assert fleet.seen["surplus"] and fleet.largest_buffer <= 5


def test_ready_first_speed_does_change_it():
    """So that the test above could have failed."""
    schedule = replace(in_order(2), order="ready_first")
    expected = Fleet(schedule, plain_world()).run(6).books.trained
    assert Fleet(schedule, replace(plain_world(), engines=(SLOW, FAST))).run(6).books.trained != expected


def test_at_staleness_0_requests_are_those_of_the_synchronous_loop_in_its_order():
    schedule = in_order(0)
    fleet = Fleet(schedule, replace(plain_world(), verdict=lambda number: "finished")).run(4)
    assert fleet.books.sent == [(number // 3, number, index, 0) for number in range(12) for index in range(2)]
    assert {spans for *_, each, _ in fleet.books.trained for spans in each} == {((0, version),) for version in range(4)}


def test_what_validate_refuses_does_deadlock_and_what_it_allows_does_not():
    rng, outcomes = random.Random(5), Counter()
    for _ in range(120):
        schedule = replace(
            random_schedule(rng), order="ready_first", buffer_groups=rng.randint(1, 6), concurrency=rng.randint(0, 2)
        )
        world = replace(random_world(rng, 1), rate=None, hangs=(), deaths=(), kills=(), poison=frozenset())
        refused = bool(list(violations(schedule)))
        try:
            Fleet(schedule, world).run(3)
        except Deadlock:
            assert refused, schedule
        else:
            assert not refused, schedule
        outcomes[refused] += 1
    assert min(outcomes.values()) > 20


def test_a_group_that_kills_two_engines_is_set_aside_and_its_neighbours_go_on():
    world = World((FAST, FAST), heavy_tailed(3, 50), poison=frozenset({4}), restart_s=0.5)
    fleet = Fleet(replace(in_order(1), concurrency=1), world).run(4)
    assert fleet.books.dropped == {4: "quarantined"}
    assert [number for _, number, *_ in fleet.books.trained] == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12]


# ---------------------------------------------------------------- speeds


def test_the_fitted_lengths_have_the_mean_and_the_clipped_share_that_were_asked_for():
    drawn = np.exp(np.random.default_rng(0).normal(SOURCE_000.mu, SOURCE_000.sigma, 400_000))
    assert np.minimum(drawn, 20480).mean() == pytest.approx(7385, rel=0.005) and (
        drawn > 20480
    ).mean() == pytest.approx(0.039, rel=0.03)
    assert SOURCE_000.share_below(1190) < 0.01 < SOURCE_000.share_below(1300), "the shortest of some hundred"
    own = [SOURCE_000.length(0, number, 0) for number in range(4000)]
    assert np.minimum(own, 20480).mean() == pytest.approx(7385, rel=0.03)


def one_group(staleness: int, **rules) -> Schedule:
    return Schedule(1, 2, 1000, staleness, partial_rollouts=staleness > 1, **rules)


def test_seconds_of_a_step_are_those_worked_by_hand():
    """100 and 50 tokens: 50 steps of two responses and 50 of one, rewards, training, sync."""
    world = World(
        (EngineKind(0.01, 0.005),),
        lambda number, index: 100 - 50 * index,
        0,
        lambda tokens: tokens * 0.02,
        0.5,
        lambda number: 0.25,
    )
    generation = 50 * 0.02 + 50 * 0.015
    assert phases(one_group(0), world) == (pytest.approx(generation + 0.25), pytest.approx(3.0))
    assert speed_of(one_group(0), world).step_s == pytest.approx(generation + 0.25 + 3.0 + 0.5)
    assert speed_of(one_group(1), world).step_s == pytest.approx(3.0 + 0.5), "generation is done while the step trains"
    assert speed_of(one_group(0), world).tokens_per_s == pytest.approx(150 / (generation + 3.75))


def test_overlap_gains_nothing_where_generation_is_all_and_parts_of_responses_do():
    """One response of 1000 beside one of 100, in a step that trains at once: only borders keep the engine full."""
    world = World(
        (EngineKind(0.01, 0.0),),
        lambda number, index: 1000 if index else 100,
        0,
        lambda tokens: 0.0,
        0.0,
        lambda number: 0.0,
    )
    step = {staleness: speed_of(one_group(staleness), world, 12, 6).step_s for staleness in (0, 1, 2, 5)}
    assert (step[0], step[1]) == (pytest.approx(10.0), pytest.approx(10.0))
    assert (step[2], step[5]) == (pytest.approx(5.0), pytest.approx(2.0))
