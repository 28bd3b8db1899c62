"""All live groups: issued within the schedule's limits, evicted for a counted cause, given to a step as its batch.

Every issued number is in exactly one state: trained on, dropped, or in the buffer. A dropped group makes room for
exactly one other. A requeued group keeps its number, and so its position in the data.

In order, a step trains on the lowest numbers that are not dropped, and groups are issued at fixed moments. Each new
version admits a number of groups. Later, only those are issued that its own step still lacks. Weights wait for the
rewards of finished responses, so that the same groups are known to be dropped by then. Therefore the time of an
eviction decides neither which groups a step trains on nor with which weights they begin.

Example: the synchronous schedule with dynamic sampling, a step of 4 groups in draws of 4. The first 4 groups run. The
first reward shows that a group teaches nothing. At most 3 will remain, so the next 4 are issued while the rewards of
those 3 are awaited. With them the step has its 4, and the 3 surplus groups are dropped.
"""

from collections.abc import Mapping
from itertools import islice

from mrl.schedule.groups import Cause, Counts, Group, State
from mrl.schedule.staleness import Schedule


class Front:
    """Counts responses and whole groups of a buffer's first groups, as they arrive.

    It sums over them only after which groups they are has changed.
    """

    def __init__(self, groups: Mapping[int, Group], most: int | None):
        """`groups`: the buffer's own, by number, in order. `most`: how many are the first; None: all."""
        self._groups = groups
        self._most = most
        self._numbers: set[int] | None = None  # None: to be found again
        self._ended = 0
        self._whole = 0

    def came(self) -> None:
        """Says that a group was put behind the others."""
        if self._most is None or len(self._groups) <= self._most:
            self._numbers = None

    def went(self, number: int) -> None:
        """Says that a group was removed."""
        if self._numbers is not None and number in self._numbers:
            self._numbers = None

    def responded(self, group: Group) -> None:
        """Says that one more response of a group has ended."""
        if self._numbers is not None and group.number in self._numbers:
            self._ended += 1
            self._whole += group.is_whole

    @property
    def size(self) -> int:
        """Number of groups."""
        if self._most is None:
            return len(self._groups)
        return min(self._most, len(self._groups))

    @property
    def ended(self) -> int:
        """Number of responses that have ended."""
        self._find()
        return self._ended

    @property
    def whole(self) -> int:
        """Number of groups whose responses have all ended."""
        self._find()
        return self._whole

    def _find(self) -> None:
        if self._numbers is not None:
            return
        first = list(islice(self._groups.values(), self._most))
        self._numbers = {group.number for group in first}
        self._ended = sum(sum(group.ended) for group in first)
        self._whole = sum(group.is_whole for group in first)


class GroupBuffer:
    """The groups of one step's state, by number."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.step = 0  # finished steps; also the version of the engines' weights
        self.groups: dict[int, Group] = {}
        self.next_number = 0
        self.trained = 0  # groups that were trained on
        self.admitted = -1  # in_order: the last version with which groups were admitted
        self._first = 0  # the first number issued with that version
        self._spare: dict[int, Group] = {}  # filtered groups that may fill the step, kept by `filter`
        self.frontier = 0  # the oldest number that is neither trained on nor dropped
        self.settled: set[int] = set()  # numbers at or above the frontier that are trained on or dropped
        self.counts = Counts()
        self._finished = 0
        self._last: int | None = None  # in_order: the last number that the step will train on; None: not computed yet
        self._unjudged: set[int] = set()  # groups whose rewards are missing
        self.progress = Front(self.groups, None if schedule.is_synchronous else schedule.batch)  # shown as progress
        self._trained = Front(self.groups, schedule.batch if self._in_order else None)  # the step will train on

    @property
    def awaits_rewards(self) -> bool:
        """Tells whether a group has all its responses but is neither finished nor evicted."""
        return bool(self._unjudged)

    def reserve(self) -> list[Group]:
        """Issues all groups that may be issued now, in the order of the data."""
        begun = None
        if self._in_order:
            begun = self.step
        return [self._issued(begun) for _ in range(self._issuable())]

    @property
    def _in_order(self) -> bool:
        return self.schedule.order == "in_order"

    def _issuable(self) -> int:
        """Returns how many groups may be issued now."""
        count = min(self.schedule.issue_limit(self.step) - self.trained, self.schedule.max_groups) - len(self.groups)
        if not self._in_order:
            return count
        if self.admitted < self.step:
            self.admitted = self.step
            self._first = self.next_number
            return self._of_whole_draws(count)
        if self.is_training:
            return 0
        return self._of_whole_draws(self.schedule.batch - len(self.groups))

    def _of_whole_draws(self, lacking: int) -> int:
        """Returns `lacking` rounded up to whole draws, within the step's limit."""
        unit = self.schedule.unit
        needed = -(-lacking // unit) * unit
        limit = self.schedule.step_limit
        if limit is None:
            return needed
        return min(needed, limit - (self.next_number - self._first))

    @property
    def is_exhausted(self) -> bool:
        """Tells whether the step may issue no more groups, all are judged, and fewer than a batch are left."""
        limit = self.schedule.step_limit
        if limit is None or self.is_training or self.next_number - self._first < limit:
            return False
        return self._finished == len(self.groups) < self.schedule.batch

    @property
    def lacks_responses(self) -> bool:
        """Tells whether a group that the step will train on, as far as is known, has responses to come."""
        return self._trained.whole < self.schedule.batch

    @property
    def is_training(self) -> bool:
        """Tells whether the step has taken its batch."""
        return self.trained > self.step * self.schedule.batch

    def is_next(self, number: int) -> bool:
        """in_order: tells whether the step will train on this group, as far as is known now."""
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
        """Prepares a group from a checkpoint.

        A group with missing tokens is reserved again and keeps its tokens. Without any tokens it begins later.
        """
        if not group.is_whole:
            group.state = State.RESERVED
        if not self._in_order and not group.tokens:
            group.begun = None
        self._kept(group)

    def start(self, number: int) -> None:
        """Marks a group as running. Its tokens are generated with the weights of this step from now on."""
        group = self._in(number, State.RESERVED, State.RUNNING)
        group.state = State.RUNNING
        group.begun = self.step if group.begun is None else group.begun

    def add(self, number: int, index: int, tokens: int, ended: bool) -> Group:
        """Adds tokens to one response. Returns its group."""
        group = self._in(number, State.RUNNING)
        if group.ended[index]:
            raise ValueError(f"response {index} of group {number} has ended already")
        group.lengths[index] += tokens
        group.ended[index] = ended
        if ended:
            self.progress.responded(group)
            self._trained.responded(group)
        if group.lengths[index] > self.schedule.max_tokens:
            raise ValueError(
                f"response {index} of group {number} has {group.lengths[index]} tokens, of "
                f"{self.schedule.max_tokens} allowed"
            )
        if group.is_whole:
            self._unjudged.add(number)
        return group

    def finish(self, number: int) -> None:
        """Marks a group as finished: all responses and their rewards have arrived."""
        group = self._in(number, State.RUNNING)
        if not group.is_whole:
            raise ValueError(f"group {number} has responses that have not ended: {group.ended}")
        group.state = State.FINISHED
        self._finished += 1
        self._unjudged.discard(number)

    def evict(self, number: int, cause: Cause) -> None:
        """Drops a group. The next `reserve` issues another one for it."""
        group = self._gone(number)
        self.counts.drop(group, cause)
        self._settle(number)

    def filter(self, number: int) -> list[int]:
        """Filters a group whose responses do not differ. Returns the numbers of groups that no step will train on now.

        If filtered groups fill incomplete steps, the first ones that it may need are kept.
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
        """Returns this step's batch, ordered by number, once it is complete; None before. A step takes one batch.

        A requeued group is awaited if it would be stale after this step, otherwise a slow group would never arrive. A
        step that has used up its draws takes what `on_exhausted` says, the latest filtered groups.
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
            self.trained += self.schedule.batch
        return batch or None

    def _batch(self) -> list[Group]:
        """Returns the groups that the step trains on; empty if it has to wait."""
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
        """Synchronous: drops the surplus groups after the step has taken its batch. Returns their numbers."""
        if not self.schedule.is_synchronous or not self.is_training:
            return []
        rest = [*self.groups, *self._spare]
        for number in list(self.groups):
            self.evict(number, "surplus")
        for number in list(self._spare):
            self._drop_spare(number)
        return rest

    def _next_in_order(self) -> list[Group]:
        """Returns the batch, or nothing if a group of it is not finished."""
        groups = list(islice(self.groups.values(), self.schedule.batch))
        if all(group.state is State.FINISHED for group in groups):
            return groups
        return []

    def _oldest_finished(self) -> list[Group]:
        """Returns the batch, or nothing if a requeued group has to be awaited."""
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
        """Advances to the next weights. Returns the numbers of groups whose tokens are too old now.

        `on_stale` decides whether they are dropped or begin again. In order there are none.
        """
        if self.trained != (self.step + 1) * self.schedule.batch:
            raise ValueError(f"step {self.step} has not taken its batch")
        self.step += 1
        oldest = self.step - self.schedule.max_staleness
        stale = [number for number, group in self.groups.items() if group.begun is not None and group.begun < oldest]
        if stale and self._in_order:
            raise ValueError(f"groups {stale} are of step {self.step - 1}, which already has its batch")
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
        self.progress.came()
        self._trained.came()
        self._finished += group.state is State.FINISHED
        if len(self.groups) <= self.schedule.batch:
            self._last = None  # it may be the newest number
        if group.is_whole and group.state is State.RUNNING:
            self._unjudged.add(group.number)
        return group

    def _gone(self, number: int) -> Group:
        group = self.groups.pop(number)
        self.progress.went(number)
        self._trained.went(number)
        self._finished -= group.state is State.FINISHED
        if self._last is not None and number <= self._last:
            self._last = next((n for n in range(self._last + 1, self.next_number) if n in self.groups), self._last)
        self._unjudged.discard(number)
        return group

    def _settle(self, number: int) -> None:
        """Settles a number. Those below the frontier need not be listed."""
        self.settled.add(number)
        while self.frontier in self.settled:
            self.settled.remove(self.frontier)
            self.frontier += 1

    def _in(self, number: int, *states: State) -> Group:
        group = self.groups[number]
        if group.state not in states:
            raise ValueError(f"group {number} is {group.state}, not {' or '.join(states)}")
        return group
