"""What a schedule is worth in tokens a second, by the simulated fleet: the same work, engines and trainer under each
schedule.

Of G seconds of generation and T of training in a synchronous step, a schedule that only overlaps the two gains at
most (G + T) / max(G, T). One that also lets the longest responses go on over several steps shortens G itself, in
which engines wait for them with few responses inside.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist

from fleet import Fleet, World

from mrl.schedule.staleness import Schedule

NORMAL = NormalDist()


@dataclass(frozen=True)
class Lognormal:
    """Lengths of responses, cut off at `longest`."""

    mu: float
    sigma: float
    longest: int

    @property
    def mean(self) -> float:
        """Of the lengths after they are cut off."""
        reach = (math.log(self.longest) - self.mu) / self.sigma
        below = math.exp(self.mu + self.sigma**2 / 2) * NORMAL.cdf(reach - self.sigma)
        return below + self.longest * (1 - NORMAL.cdf(reach))

    def share_below(self, length: float) -> float:
        """Of the responses."""
        return NORMAL.cdf((math.log(length) - self.mu) / self.sigma)

    def length(self, seed: int, number: int, index: int) -> int:
        """Of one response, always the same; longer than `longest` where it will be cut off."""
        drawn = random.Random(f"{seed}/{number}/{index}").gauss(self.mu, self.sigma)
        return max(1, round(math.exp(min(drawn, 40.0))))


def fitted(mean: float, longest: int, clipped: float) -> Lognormal:
    """The lognormal of which a share `clipped` is longer than `longest`, and whose mean after the cut is `mean`."""
    reach = NORMAL.inv_cdf(1 - clipped)

    def of(sigma: float) -> Lognormal:
        return Lognormal(math.log(longest) - reach * sigma, sigma, longest)

    narrow, wide = 1e-6, 10.0  # the wider, the shorter the mean
    while wide - narrow > 1e-12:
        middle = (narrow + wide) / 2
        narrow, wide = (middle, wide) if of(middle).mean > mean else (narrow, middle)
    return of(narrow)


SOURCE_000 = fitted(mean=7385, longest=20480, clipped=0.039)  # lengths reported for the first of the sources


def schedules(batch: int, responses: int, max_tokens: int, staleness: int = 2, **rules) -> dict[str, Schedule]:
    """Those that are compared, by name."""
    make = partial(Schedule, batch, responses, max_tokens, **rules)
    return {
        "sync": make(),
        "one_step_off": make(max_staleness=1),
        "bounded in_order": make(max_staleness=staleness, partial_rollouts=True),
        "bounded ready_first": make(max_staleness=staleness, order="ready_first", partial_rollouts=True),
    }


@dataclass(frozen=True)
class Speed:
    """Of the steps after the first ones, in which engines and trainer are not both at work yet."""

    tokens_per_s: float
    step_s: float
    versions: float  # of a response, mean
    recomputed: float  # kept tokens that engines computed again, of those trained on
    dropped: float  # tokens of stale groups, of those trained on


def speed_of(schedule: Schedule, world: World, steps: int = 8, warm_up: int = 3) -> Speed:
    """`world` in the same hands for each schedule."""
    fleet = Fleet(schedule, world).run(steps)
    seconds = fleet.books.step_ends[-1] - fleet.books.step_ends[warm_up - 1]
    trained = [(spans, lengths) for step, _, spans, lengths in fleet.books.trained if step >= warm_up]
    versions = [len(response) for spans, _ in trained for response in spans]
    everything, counts = sum(sum(lengths) for *_, lengths in fleet.books.trained), fleet.buffer.counts
    lost = counts.requeued.tokens + sum(tally.tokens for tally in counts.dropped.values())
    return Speed(
        tokens_per_s=sum(sum(lengths) for _, lengths in trained) / seconds,
        step_s=seconds / (steps - warm_up),
        versions=sum(versions) / len(versions),
        recomputed=fleet.books.recomputed / everything,
        dropped=lost / everything,
    )


def phases(schedule: Schedule, world: World) -> tuple[float, float]:
    """(G, T): seconds of generation and of training in a synchronous step, means of three."""
    alone = replace(world, train_s=lambda tokens: 0.0, sync_s=0.0)
    fleet = Fleet(replace(schedule, max_staleness=0, partial_rollouts=False, order="in_order"), alone).run(3)
    tokens = [sum(sum(lengths) for step, _, _, lengths in fleet.books.trained if step == which) for which in range(3)]
    return fleet.books.step_ends[-1] / 3, sum(map(world.train_s, tokens)) / 3


def balanced(world: World, schedule: Schedule, over: float = 1.0) -> World:
    """The world with a trainer that takes `over` times as long as generation in a synchronous step."""
    generation, _ = phases(schedule, world)
    mean_tokens = (
        generation * speed_of(schedule, replace(world, train_s=lambda tokens: 0.0, sync_s=0.0), 3, 1).tokens_per_s
    )
    each: Callable[[int], float] = partial(_per_token, over * generation / mean_tokens)
    return replace(world, train_s=each)


def _per_token(seconds: float, tokens: int) -> float:
    return seconds * tokens
