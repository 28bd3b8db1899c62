"""Random schedules in random worlds, and what must hold of each run: numbers,
versions and lengths by books beside the machines'.
"""

import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import mul

from fleet import EngineKind, Fleet, World

from mrl.schedule.rate import Rate, RateRules
from mrl.schedule.staleness import Schedule, violations


@dataclass(frozen=True)
class Case:
    """One run. `elsewhere` has the same lengths and verdicts, and nothing else in common with `world`."""

    schedule: Schedule
    world: World
    elsewhere: World
    steps: int


def number_of(*key: object) -> float:
    """In [0, 1), a function of its key."""
    return random.Random("/".join(map(str, key))).random()


def heavy_tailed(seed: int, mean: float):
    """Response lengths from 1 on, a few of them many times the mean."""

    def length(number: int, index: int) -> int:
        return 1 + int(mean * random.Random(f"{seed}/{number}/{index}").paretovariate(1.5) / 3)

    return length


def verdicts(seed: int, failed: float, filtered: float):
    """Which groups have no rewards, and which teach nothing."""

    def verdict(number: int) -> str:
        drawn = number_of(seed, "verdict", number)
        return "failed" if drawn < failed else "filtered" if drawn < failed + filtered else "finished"

    return verdict


def reward_seconds(most: float, number: int) -> float:
    """Of a group; short ones may come after long ones."""
    return most * number_of("reward", number)


def random_schedule(rng: random.Random) -> Schedule:
    """One that is allowed."""
    batch, staleness = rng.randint(1, 4), rng.choice((0, 1, 1, 2, 3))
    order = rng.choice(("in_order", "ready_first"))
    admitted = (staleness + 1) * batch
    max_tokens = rng.choice((20, 100, 400))
    schedule = Schedule(
        batch, rng.randint(1, 3), max_tokens, staleness, order,
        partial_rollouts=staleness > 0 and rng.random() < 0.7,
        on_stale=rng.choice(("requeue", "drop")),
        segment_tokens=rng.choice((None, 1 + max_tokens // rng.randint(1, 9))),
        buffer_groups=rng.choice((None, rng.randint(batch, admitted))) if order == "ready_first" else None,
        concurrency=rng.choice((None, None, 1, rng.randint(1, 12))),
        whole_batches=rng.random() < 0.5,
    )  # fmt: skip
    assert not list(violations(schedule))
    return schedule


def random_world(rng: random.Random, groups: int) -> World:
    """Engines of different speeds that die, hang and come back; groups that fail, teach nothing or kill."""
    engines = rng.randint(1, 3)
    seconds = rng.choice((20.0, 100.0))

    def times(most: int) -> tuple[tuple[float, int], ...]:
        return tuple((rng.uniform(0, seconds), rng.randrange(engines)) for _ in range(rng.randint(0, most)))

    poison = frozenset(rng.randrange(groups) for _ in range(rng.choice((0, 0, 0, 1, 2))))
    return World(
        tuple(
            EngineKind(rng.uniform(0.005, 0.1), 0.001, rng.choice((0.0, 0.002)), rng.choice((1, 4, 1000)), 600)
            for _ in range(engines)
        ),
        heavy_tailed(rng.randrange(1 << 30), rng.choice((10, 60))),
        rng.randint(1, 30),
        partial(mul, rng.choice((0.0, 0.005, 0.05))),
        rng.choice((0.0, 0.5)),
        partial(reward_seconds, rng.choice((0.0, 0.3, 5.0))),
        verdicts(rng.randrange(1 << 30), rng.choice((0.0, 0.1)), rng.choice((0.0, 0.3, 0.7))),
        poison,
        times(rng.choice((0, 0, 4))),
        times(rng.choice((0, 0, 1))),
        tuple(rng.uniform(0, seconds) for _ in range(rng.choice((0, 0, 1, 3)))),
        keeps_requests=rng.random() < 0.5,
        rate=RateRules(1, 12) if rng.random() < 0.3 else None,
        restart_limit=rng.choice((1, 3, 1000)),
    )


def random_case(number: int) -> Case:
    """The `number`-th case, always the same."""
    rng = random.Random(number)
    schedule, steps = random_schedule(rng), rng.randint(2, 5)
    world, other = (random_world(rng, steps * schedule.batch) for _ in range(2))
    elsewhere = replace(other, length=world.length, verdict=world.verdict, poison=frozenset())
    return Case(schedule, world, elsewhere, steps)


def run(case: Case) -> Fleet:
    """Raises Deadlock, or AssertionError where something does not hold."""
    fleet = Fleet(case.schedule, case.world).run(case.steps)
    check_numbers(fleet, case.steps)
    check_versions(fleet)
    check_counts(fleet)
    assert fleet.largest_buffer <= case.schedule.max_groups
    assert fleet.most_under_way <= (case.schedule.concurrency or fleet.most_under_way)
    check_order(case, fleet)
    if fleet.rate:
        rate = Rate.start(case.world.rate)
        for seen, window in fleet.rate_log:  # it follows from what was seen alone
            assert (rate := rate.after(seen)).window == window
    return fleet


def check_numbers(fleet: Fleet, steps: int) -> None:
    """Each step has its batch; every number issued is trained on once, dropped, or on its way."""
    trained = [number for _, number, _, _ in fleet.books.trained]
    assert Counter(step for step, *_ in fleet.books.trained) == dict.fromkeys(range(steps), fleet.schedule.batch)
    everywhere = Counter([*trained, *fleet.books.dropped, *fleet.buffer.groups])
    assert everywhere == dict.fromkeys(range(fleet.buffer.next_number), 1)
    for _, number, _, lengths in fleet.books.trained:
        wanted = [
            min(fleet.world.length(number, k), fleet.schedule.max_tokens) for k in range(fleet.schedule.responses)
        ]
        assert list(lengths) == wanted, "a token is lost, or a response got a second budget"


def borders(begun: int, trained: int, quota: int, length: int) -> tuple[tuple[int, int], ...]:
    """(first token, version) of each span, token by token: `quota` of each version, and all the rest of the last."""
    versions = [min(trained, begun + token // quota) for token in range(length)]
    return tuple(
        (token, version) for token, version in enumerate(versions) if token == 0 or version != versions[token - 1]
    )


def check_versions(fleet: Fleet) -> None:
    """No token is staler than allowed, or of weights that were not there;
    in_order each border is where the rule has it.
    """
    schedule = fleet.schedule
    for step, number, spans, lengths in fleet.books.trained:
        for response, length in zip(spans, lengths, strict=True):
            assert response[0][0] == 0 and all(a < b for (a, _), (b, _) in pairwise(response))
            versions = [version for _, version in response]
            assert step - schedule.max_staleness <= min(versions) and max(versions) <= step, (
                f"group {number} of step {step}: {spans}"
            )
            assert schedule.partial_rollouts or len(versions) == 1
            if schedule.order == "in_order":
                assert response == borders(versions[0], step, schedule.quota, length)


def check_order(case: Case, fleet: Fleet) -> None:
    """in_order another world trains on the same groups, made by the same versions,
    but for what lost engines take away.
    """
    if case.schedule.order == "in_order" and not fleet.seen["quarantined"]:
        other = Fleet(case.schedule, case.elsewhere).run(case.steps)
        fleet.seen["the same elsewhere"] = not other.seen["quarantined"]
        assert other.seen["quarantined"] or other.books.trained == fleet.books.trained


def check_counts(fleet: Fleet) -> None:
    """What the machines counted is what the books have."""
    counts = fleet.buffer.counts
    lengths = [length for *_, lengths in fleet.books.trained for length in lengths]
    assert (counts.kept.groups, counts.kept.responses, counts.kept.tokens) == (
        len(fleet.books.trained),
        len(lengths),
        sum(lengths),
    )
    assert {cause: tally.groups for cause, tally in counts.dropped.items()} == Counter(fleet.books.dropped.values())
