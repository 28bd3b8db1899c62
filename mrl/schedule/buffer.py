"""All groups on their way: issued as the schedule admits, evicted by a counted cause, given to a step as its batch.

Every number that was ever issued is in exactly one place: trained on, dropped, or here. A group that is dropped makes
room for exactly one other; one that is requeued keeps its number, and so its place in the data.

in_order a step trains on the first of those that are not dropped, in the order of numbers, and groups are issued at
fixed moments: with each new version as many as are admitted then, afterwards only what its own step lacks even so.
Weights wait for the rewards of what is finished, so that the same groups are known to be dropped by then. So neither
which groups a step trains on nor which weights they begin with depends on when another was evicted.

An example of the synchronous schedule with dynamic sampling, a step of 4 groups in draws of 4: the first 4 are under
way; the first reward says that a group teaches nothing; 3 at most will be left, and the next 4 are issued while the
rewards of those 3 are awaited. With them the step has its 4, and the 3 that it has too many are dropped.
"""

from itertools import islice

from mrl.schedule.groups import Cause, Counts, Group, State
from mrl.schedule.staleness import Schedule


class GroupBuffer:
    """Groups by number, at one step."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.step = 0  # steps finished; the version that engines have
        self.groups: dict[int, Group] = {}
        self.next_number = 0
        self.taken = 0  # groups trained on
        self.admitted = -1  # in_order: the last version with which groups were admitted
        self._first = 0  # the first number that was issued with it
        self._spare: dict[int, Group] = {}  # filtered groups that may fill up the step; see `filter`
        self.frontier = 0  # the oldest number that is neither trained on nor dropped: all before it are settled
        self.settled: set[int] = set()  # trained on or dropped, from the frontier on
        self.counts = Counts()
        self._finished = 0
        self._last: int | None = None  # in_order: the last number that the step will train on; None: to be looked up
        self._unjudged: set[int] = set()  # groups whose rewards are awaited

    @property
    def awaits_rewards(self) -> bool:
        """Whether a group has all its responses and is neither finished nor evicted."""
        return bool(self._unjudged)

    def reserve(self) -> list[Group]:
        """Issues all groups that may be issued now, in the order of the data."""
        begun = None
        if self._in_order:
            begun = self.step
        return [self._issued(begun) for _ in range(self._room())]

    @property
    def _in_order(self) -> bool:
        return self.schedule.order == "in_order"

    def _room(self) -> int:
        """How many groups may be issued now."""
        room = min(self.schedule.issue_limit(self.step) - self.taken, self.schedule.max_groups) - len(self.groups)
        if not self._in_order:
            return room
        if self.admitted < self.step:
            self.admitted = self.step
            self._first = self.next_number
            return self._of_whole_draws(room)
        if self.is_training:
            return 0
        return self._of_whole_draws(self.schedule.batch - len(self.groups))

    def _of_whole_draws(self, lacking: int) -> int:
        """Groups of the draws that are needed for so many, as far as the step may have them."""
        unit = self.schedule.unit
        needed = -(-lacking // unit) * unit
        limit = self.schedule.step_limit
        if limit is None:
            return needed
        return min(needed, limit - (self.next_number - self._first))

    @property
    def is_exhausted(self) -> bool:
        """Whether the step may issue no more groups, and all are judged, and fewer are left than a batch."""
        limit = self.schedule.step_limit
        if limit is None or self.is_training or self.next_number - self._first < limit:
            return False
        return self._finished == len(self.groups) < self.schedule.batch

    @property
    def is_training(self) -> bool:
        """Whether the step has taken its batch."""
        return self.taken > self.step * self.schedule.batch

    def is_next(self, number: int) -> bool:
        """in_order: whether the group is one of those that the step will train on, as far as is known now."""
        if self.is_training:
            return False
        if self._last is None:
            self._last = max(islice(self.groups, self.schedule.batch), default=-1)
        return number <= self._last

    def _issued(self, begun: int | None) -> Group:
        group = Group.new(self.next_number, self.schedule.responses, begun)
        self.next_number += 1
        return self._kept(group)

    def put_back(self, group: Group) -> None:
        """A group of a checkpoint.

        One that lacks tokens is reserved again, with its tokens; without any it begins later.
        """
        if not group.is_whole:
            group.state = State.RESERVED
        if not self._in_order and not group.tokens:
            group.begun = None
        self._kept(group)

    def start(self, number: int) -> None:
        """Tokens of the group are made from now on, by the weights of this step."""
        group = self._in(number, State.RESERVED, State.RUNNING)
        group.state = State.RUNNING
        group.begun = self.step if group.begun is None else group.begun

    def add(self, number: int, index: int, tokens: int, ended: bool) -> Group:
        """Counts so many more tokens of one response and returns its group."""
        group = self._in(number, State.RUNNING)
        if group.ended[index]:
            raise ValueError(f"response {index} of group {number} has ended already")
        group.lengths[index] += tokens
        group.ended[index] = ended
        if group.lengths[index] > self.schedule.max_tokens:
            raise ValueError(
                f"response {index} of group {number} has {group.lengths[index]} tokens, of "
                f"{self.schedule.max_tokens} allowed"
            )
        if group.is_whole:
            self._unjudged.add(number)
        return group

    def finish(self, number: int) -> None:
        """All responses are there, and their rewards."""
        group = self._in(number, State.RUNNING)
        if not group.is_whole:
            raise ValueError(f"group {number} has responses that have not ended: {group.ended}")
        group.state = State.FINISHED
        self._finished += 1
        self._unjudged.discard(number)

    def evict(self, number: int, cause: Cause) -> None:
        """Drops a group that nobody will be trained on; the next `reserve` issues another for it."""
        group = self._gone(number)
        self.counts.drop(group, cause)
        self._settle(number)

    def filter(self, number: int) -> list[int]:
        """The group's responses do not differ. Numbers of groups that no step will be trained on, now.

        Where a step that lacks groups is filled up with filtered ones, as many of the first as it may need stay.
        """
        if self.schedule.step_limit is None or self.schedule.on_exhausted != "unfiltered":
            self.evict(number, "filtered")
            return [number]
        self._spare[number] = self._gone(number)
        if len(self._spare) <= self.schedule.batch:
            return []
        last = max(self._spare)
        self._drop_spare(last)
        return [last]

    def _drop_spare(self, number: int) -> None:
        self.counts.drop(self._spare.pop(number), "filtered")
        self._settle(number)

    def take(self) -> list[Group] | None:
        """The batch of this step, ordered by number, once it is complete; None before. A step takes one.

        A requeued group is waited for when it would be stale after this step: one that is always slow would never come.
        A step whose draws are used up takes what `on_exhausted` says, those that were filtered last.
        """
        if self.is_training:
            raise ValueError(f"step {self.step} has taken its batch already")
        batch = self._batch()
        for group in batch:
            if self._spare.pop(group.number, None) is None:
                self._gone(group.number)
            self.counts.kept.add(group)
            self._settle(group.number)
        if batch:
            self.taken += self.schedule.batch
        return batch or None

    def _batch(self) -> list[Group]:
        """The groups that the step trains on; none where it has to wait."""
        if self.is_exhausted:
            return self._made_do_with()
        if self._finished < self.schedule.batch:
            return []
        if self._in_order:
            return self._next_in_order()
        return self._oldest_finished()

    def _made_do_with(self) -> list[Group]:
        if self.schedule.on_exhausted == "error":
            return []
        finished = list(self.groups.values())
        spare = [self._spare[number] for number in sorted(self._spare)]
        return finished + spare[: self.schedule.batch - len(finished)]

    def drop_rest(self) -> list[int]:
        """Synchronous: numbers of the groups that the step has too many, once it has taken its batch."""
        if not self.schedule.is_synchronous or not self.is_training:
            return []
        rest = [*self.groups, *self._spare]
        for number in list(self.groups):
            self.evict(number, "surplus")
        for number in list(self._spare):
            self._drop_spare(number)
        return rest

    def _next_in_order(self) -> list[Group]:
        """The batch, or nothing where one of it is not finished."""
        groups = list(islice(self.groups.values(), self.schedule.batch))
        if all(group.state is State.FINISHED for group in groups):
            return groups
        return []

    def _oldest_finished(self) -> list[Group]:
        """The batch, or nothing where a requeued group has to be waited for."""
        ready = [group for group in self.groups.values() if group.state is State.FINISHED]
        oldest = sorted(ready, key=lambda group: (group.begun, group.number))
        if self._waits_for_requeued():
            return []
        return sorted(oldest[: self.schedule.batch], key=lambda group: group.number)

    def _waits_for_requeued(self) -> bool:
        oldest = self.step - self.schedule.max_staleness
        last = [
            group
            for group in self.groups.values()
            if group.attempts and group.begun is not None and group.begun <= oldest
        ]
        finished = sum(group.state is State.FINISHED for group in last)
        return finished < min(self.schedule.batch, len(last))

    def advance(self) -> list[int]:
        """Engines have the next weights. Numbers of the groups whose tokens are too old from now on.

        They are dropped, or begin anew, as `on_stale` says. in_order there are none.
        """
        if self.taken != (self.step + 1) * self.schedule.batch:
            raise ValueError(f"step {self.step} has not taken its batch")
        self.step += 1
        oldest = self.step - self.schedule.max_staleness
        stale = [number for number, group in self.groups.items() if group.begun is not None and group.begun < oldest]
        if stale and self._in_order:
            raise ValueError(f"groups {stale} are of step {self.step - 1}, which had its batch")
        for number in stale:
            self._stale(number)
        return stale

    def _stale(self, number: int) -> None:
        if self.schedule.on_stale == "drop":
            self.evict(number, "stale")
        else:
            group = self._gone(number)
            self.counts.requeued.add(group)
            self._kept(group.anew())

    def _kept(self, group: Group) -> Group:
        self.groups[group.number] = group
        self._finished += group.state is State.FINISHED
        if len(self.groups) <= self.schedule.batch:
            self._last = None  # it may be the newest
        if group.is_whole and group.state is State.RUNNING:
            self._unjudged.add(group.number)
        return group

    def _gone(self, number: int) -> Group:
        group = self.groups.pop(number)
        self._finished -= group.state is State.FINISHED
        if self._last is not None and number <= self._last:
            self._last = self._following(self._last)
        self._unjudged.discard(number)
        return group

    def _following(self, number: int) -> int:
        """The next number that is on its way; the same one where it is the last."""
        return next((n for n in range(number + 1, self.next_number) if n in self.groups), number)

    def _settle(self, number: int) -> None:
        """Keeps what is settled small: numbers before the frontier are not listed."""
        self.settled.add(number)
        while self.frontier in self.settled:
            self.settled.remove(self.frontier)
            self.frontier += 1

    def _in(self, number: int, *states: State) -> Group:
        group = self.groups[number]
        if group.state not in states:
            raise ValueError(f"group {number} is {group.state}, not {' or '.join(states)}")
        return group
