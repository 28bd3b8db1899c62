"""The rules of a schedule: how far generation may be ahead of training, and which numbers contradict each other.

Steps are counted from 0, and their number is the version of the weights. At a step, at most (max_staleness + step + 1)
x batch groups have been issued. This includes trained groups, but not evicted ones. Of these, step x batch have been
trained. So at most (max_staleness + 1) x batch groups exist at once.

At staleness 0, in order, engines and ranks work one after the other. This is the synchronous schedule.

In order, the version of each token is a function of its group and position, without a clock (`version_of`). A group is
issued with the weights of version `begun` and trained by step `trained`. Each version generates `quota` tokens, and the
last one, `trained`, all the rest:

    tokens    0 ...... quota ...... 2 quota ...... its end
    version   begun    begun + 1    ...            trained at most

If nothing is dropped, a step trains on the next `batch` numbers. Then `begun` and `trained` follow from the number
alone.

Requests end at multiples of the quota, even if the weights stay the same (`request_end`). An engine restarts its random
numbers with each request. A step's groups are known only when those before them are judged. A response that has its
tokens of this version waits. So weights change only while no request is running, and each request has one version.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mrl.errors import Violation
from mrl.units import counted

Order = Literal["in_order", "ready_first"]
OnStale = Literal["requeue", "drop"]
OnExhausted = Literal["error", "partial", "unfiltered"]


@dataclass(frozen=True)
class Schedule:
    """The schedule of a run: when it generates which groups, and which groups its steps train on.

    `in_order`: steps train on groups in the order of numbers; `ready_first`: on finished groups.
    """

    batch: int  # groups that a step trains on
    responses: int  # in a group
    max_tokens: int  # in a response
    max_staleness: int = 0  # how many steps a token may be older than the weights that are trained with it
    order: Order = "in_order"
    partial_rollouts: bool = False  # a response may have tokens of several versions
    on_stale: OnStale = "requeue"
    segment_tokens: int | None = None  # in_order: for one request, and for each version but the last; None: see `quota`
    buffer_groups: int | None = None  # limit of live groups; None: as many as are admitted
    concurrency: int | None = None  # limit of running responses over all engines; None: no limit
    total_steps: int | None = None  # of the run: nothing is issued for later ones
    whole_batches: bool = False  # synchronous: missing groups are issued in whole draws, see `unit`
    draw: int | None = None  # groups of a draw; None: a batch
    most_draws: int | None = None  # limit for one step; None: no limit
    on_exhausted: OnExhausted = "error"  # synchronous: what a step trains on after it has used up its draws
    rewards_decide: bool = True  # groups may be dropped for their rewards, so in_order weights wait for rewards

    @property
    def quota(self) -> int:
        """in_order: tokens of a response with the first weights, and with each later version but the last, which adds
        the rest.

        By default the last version has none left to add, because a step would wait for them.
        """
        if not self.partial_rollouts or self.max_staleness == 0:
            return self.max_tokens
        return self.segment_tokens or -(-self.max_tokens // self.max_staleness)

    @property
    def is_synchronous(self) -> bool:
        """Tells whether no generated token outlives its step."""
        return self.max_staleness == 0 and self.order == "in_order"

    @property
    def continues_kept(self) -> bool:
        """Tells whether a response may continue after tokens that an earlier request made.

        Without partial rollouts these could have other weights, unless no token outlives its step.
        """
        return self.partial_rollouts or self.is_synchronous

    @property
    def admitted(self) -> int:
        """Limit of live groups by staleness alone."""
        return (self.max_staleness + 1) * self.batch

    @property
    def unit(self) -> int:
        """in_order: number of groups that are issued together when a step lacks some.

        Ahead of training it is one for each dropped group, because the next groups are already running. A synchronous
        step would wait for them one by one. So it may issue whole draws, and drops the surplus.
        """
        if not self.whole_batches or not self.is_synchronous:
            return 1
        return self.draw or self.batch

    @property
    def step_limit(self) -> int | None:
        """Limit of groups issued for one step, where draws are counted."""
        counts = self.whole_batches and self.is_synchronous and self.most_draws is not None
        if counts:
            return self.most_draws * self.unit
        return None

    @property
    def max_groups(self) -> int:
        """The largest number of groups that may exist."""
        admitted = self.admitted if self.buffer_groups is None else min(self.buffer_groups, self.admitted)
        return admitted + self.unit - 1

    def issue_limit(self, step: int) -> int:
        """Returns how many groups may have been issued with the weights of `step`, including trained ones."""
        steps = self.max_staleness + step + 1
        return min(steps, self.total_steps or steps) * self.batch

    def bound(self) -> str:
        """Returns the bound in one sentence, as `validate` prints it."""
        exist = self.max_groups * self.responses
        slots = self.concurrency
        idle = ""
        if slots is not None and slots > exist:
            idle = f", of {slots:,} that engines have room for"
        return (
            f"no token is older than {counted(self.max_staleness, 'step')}: with the weights of step s at most "
            f"({self.max_staleness} + s + 1) x {self.batch:,} groups have been issued, and {self.max_groups:,} exist "
            f"at once ({exist:,} responses{idle})"
        )


def violations(schedule: Schedule) -> Iterator[Violation]:
    """Yields rules that would wait forever or cannot hold. `field` is a field of Schedule."""
    batch = schedule.batch
    admitted = schedule.admitted
    buffer = admitted if schedule.buffer_groups is None else schedule.buffer_groups
    if buffer < batch:
        why = f"a step trains on {batch} finished groups, and never could with a smaller buffer"
        least = admitted if schedule.order == "in_order" else batch
        yield Violation("buffer_groups", f"must be at least the batch, {batch}", why, (least, None))
    elif buffer < admitted and schedule.order == "in_order":
        why = (
            "a group would be issued whenever the buffer has room, with the weights of that moment. So "
            "the engines' speed would decide which weights these are"
        )
        rule = f"must be (max_staleness + 1) x batch, {admitted}, when the order is in_order"
        yield Violation("buffer_groups", rule, why, (admitted, None))
    if schedule.concurrency is not None and schedule.concurrency < 1:
        yield Violation("concurrency", "must be at least 1", "no response would ever be sent to an engine", (1, None))
    if schedule.max_staleness == 0 and schedule.partial_rollouts:
        why = "at 0 the trained weights generate every token, so that a response has one version"
        yield Violation("partial_rollouts", "needs max_staleness of 1 or more", why, (False,))
    if schedule.segment_tokens is not None and schedule.segment_tokens < 1:
        why = "a response that only the last weights may add to would keep its step waiting"
        yield Violation("segment_tokens", "must be at least 1", why, (1, None))


def version_of(token: int, begun: int, trained: int, quota: int) -> int:
    """Returns the version of the weights that generate the `token`-th (from 0) token of a response."""
    return min(trained, begun + token // quota)


def request_end(kept: int, quota: int, max_tokens: int) -> int:
    """Returns the length of a response after the request that continues at `kept`, unless it ends earlier by itself."""
    return min(max_tokens, (kept // quota + 1) * quota)
