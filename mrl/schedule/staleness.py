"""The rules of a schedule: how far generation may be ahead of training, and which numbers cannot work together.

At a step (counted from 0; also the version of the weights) groups issued so far, trained ones included and evicted ones
not, are at most (max_staleness + step + 1) x batch. Trained are step x batch of them, so that at most
(max_staleness + 1) x batch groups exist at once.

At staleness 0, in order, engines and ranks work one after the other: that is the synchronous schedule.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mrl.errors import Violation

Order = Literal["in_order", "ready_first"]
OnStale = Literal["requeue", "drop"]
OnExhausted = Literal["error", "partial", "unfiltered"]


@dataclass(frozen=True)
class Schedule:
    """When a run generates and trains what.

    `in_order`: steps train on groups in the order of numbers; `ready_first`: on groups that are finished.
    """

    batch: int  # groups that a step trains on
    responses: int  # of a group
    max_tokens: int  # of a response
    max_staleness: int = 0  # updates that a token may be behind the weights that are trained with it
    order: Order = "in_order"
    partial_rollouts: bool = False  # a response may have tokens of several versions
    on_stale: OnStale = "requeue"
    segment_tokens: int | None = None  # in_order: of one request, and of each version but the last; None: see `quota`
    buffer_groups: int | None = None  # on their way at most; None: as many as are admitted
    concurrency: int | None = None  # responses under way at most, in all engines; None: all
    total_steps: int | None = None  # of the run: nothing is issued for those after them
    whole_batches: bool = False  # synchronous: what a step lacks is issued by whole draws; see `unit`
    draw: int | None = None  # groups of a draw; None: as many as a batch
    most_draws: int | None = None  # that a step may have; None: any number
    on_exhausted: OnExhausted = "error"  # synchronous: what a step trains on whose draws are used up
    rewards_decide: bool = True  # groups may be dropped for their rewards, so that in_order weights wait for them

    @property
    def quota(self) -> int:
        """in_order: tokens of a response by the first weights, and by each after them but the last, which add the rest.

        By default so many that none are left for the last, which a step would have to wait for.
        """
        if not self.partial_rollouts or self.max_staleness == 0:
            return self.max_tokens
        return self.segment_tokens or -(-self.max_tokens // self.max_staleness)

    @property
    def is_synchronous(self) -> bool:
        """Whether nothing that is generated outlives its step."""
        return self.max_staleness == 0 and self.order == "in_order"

    @property
    def admitted(self) -> int:
        """Groups that exist at most, by staleness alone."""
        return (self.max_staleness + 1) * self.batch

    @property
    def unit(self) -> int:
        """in_order: groups that are issued together where a step lacks some.

        Ahead of training it is one for each that was dropped: the next are under way already. A synchronous step would
        wait for one after the other. So whole draws may be issued there, and what they have too many is dropped.
        """
        if not self.whole_batches or not self.is_synchronous:
            return 1
        return self.draw or self.batch

    @property
    def step_limit(self) -> int | None:
        """Groups that may be issued for one step, where draws are counted."""
        counts = self.whole_batches and self.is_synchronous and self.most_draws is not None
        if counts:
            return self.most_draws * self.unit
        return None

    @property
    def max_groups(self) -> int:
        """The number of groups that may exist at most."""
        admitted = self.admitted if self.buffer_groups is None else min(self.buffer_groups, self.admitted)
        return admitted + self.unit - 1

    def issue_limit(self, step: int) -> int:
        """Groups that may have been issued with the weights of `step`, trained ones included."""
        steps = self.max_staleness + step + 1
        return min(steps, self.total_steps or steps) * self.batch

    def bound(self) -> str:
        """The bound in one sentence, as `validate` prints it."""
        exist = self.max_groups * self.responses
        slots = self.concurrency
        idle = ""
        if slots is not None and slots > exist:
            idle = f", of {slots:,} that engines have room for"
        return (
            f"no token is older than {self.max_staleness} updates: with the weights of step s at most "
            f"({self.max_staleness} + s + 1) x {self.batch:,} groups have been issued, and {self.max_groups:,} exist "
            f"at once ({exist:,} responses{idle})"
        )


def violations(schedule: Schedule) -> Iterator[Violation]:
    """What would wait for ever, or cannot hold; `field` is that of Schedule."""
    batch = schedule.batch
    admitted = schedule.admitted
    buffer = admitted if schedule.buffer_groups is None else schedule.buffer_groups
    if buffer < batch:
        why = f"a step trains on {batch} finished groups, and with fewer places none would ever have them"
        least = admitted if schedule.order == "in_order" else batch
        yield Violation("buffer_groups", f"must be at least the batch, {batch}", why, (least, None))
    elif buffer < admitted and schedule.order == "in_order":
        why = (
            "a group would be issued when a place comes free, by the weights of that moment, so that "
            "speed decides which they are"
        )
        rule = f"must be (max_staleness + 1) x batch, {admitted}, in_order"
        yield Violation("buffer_groups", rule, why, (admitted, None))
    if schedule.concurrency is not None and schedule.concurrency < 1:
        yield Violation("concurrency", "must be at least 1", "no response would ever be sent to an engine", (1, None))
    if schedule.max_staleness == 0 and schedule.partial_rollouts:
        why = "at 0 every token is of the weights that are trained, so that a response has one version"
        yield Violation("partial_rollouts", "needs max_staleness of 1 or more", why, (False,))
    if schedule.segment_tokens is not None and schedule.segment_tokens < 1:
        why = "a response that may add no token by any weights but the last is made while its step waits for it"
        yield Violation("segment_tokens", "must be at least 1", why, (1, None))
