"""Who goes next is decided without a look at all responses, and as if all had been looked at: against machines that
sort and search everything at each event, over random events; and by counting what one eviction touches.
"""

import random
import sys
from collections.abc import Iterator

import pytest
from fleet_cases import random_schedule

from mrl.schedule.buffer import GroupBuffer
from mrl.schedule.dispatch import Assignment, Dispatcher, InLine
from mrl.schedule.ledger import restored, snapshot
from mrl.schedule.staleness import Schedule

ENGINES = ["a", "b", "c"]


class SearchedBuffer(GroupBuffer):
    """Looks at all groups to know which the step trains on."""

    def is_next(self, number: int) -> bool:
        return not self.is_training and number in sorted(self.groups)[: self.schedule.batch]


class SortedLine:
    """A list of what may be sent, sorted for every request."""

    def __init__(self):
        self.waiting: list[InLine] = []

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.waiting)

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, response: InLine) -> None:
        self.waiting.append(response)

    def pop(self) -> InLine:
        self.waiting.sort()
        return self.waiting.pop(0)

    def leave(self, number: int) -> None:
        self.waiting = [each for each in self.waiting if each.number != number]


class SearchedLine:
    """A list of what is ahead; all of it is lined up again whenever one might go on."""

    def __init__(self):
        self.ahead: list[tuple[int, int]] = []

    def add(self, number: int, index: int) -> None:
        self.ahead.append((number, index))

    def leave(self, number: int) -> None:
        self.ahead = [each for each in self.ahead if each[0] != number]

    def pop_while(self, due) -> list[tuple[int, int]]:
        found, self.ahead = self.ahead, []
        return found


def quick(buffer: GroupBuffer) -> Dispatcher:
    return Dispatcher(buffer, list(ENGINES), max_requests=5)


class SearchingDispatcher(Dispatcher):
    """Counts what is in line anew for every request, and lines up all that is ahead at every event."""

    def __init__(self, buffer: GroupBuffer, engines: list[str], max_requests: int):
        super().__init__(buffer, engines, max_requests)
        self._ready = SortedLine()
        self._ahead = SearchedLine()

    def assignments(self) -> list[Assignment]:
        sent = []
        held = []
        room = len(self._ready) if self.window is None else self.window - len(self.under_way)
        while self.is_open and self.loads.free and self._ready and len(sent) < room:
            in_line = self._ready.tokens + sum(each.tokens for each in held)
            response = self._ready.pop()
            if self._waits_alone(response.number):
                held.append(response)
            else:
                sent.append(self._sent(response, in_line))
        for response in held:
            self._ready.add(response)
        return sent


def thorough(buffer: GroupBuffer) -> Dispatcher:
    return SearchingDispatcher(buffer, list(ENGINES), max_requests=5)


class Pair:
    """Both machines, to which the same happens, and which have to say the same."""

    def __init__(self, schedule: Schedule, rng: random.Random):
        self.schedule, self.rng = schedule, rng
        self.quick, self.thorough = quick(GroupBuffer(schedule)), thorough(SearchedBuffer(schedule))
        self.evictions = self.weights = 0

    @property
    def both(self) -> Iterator[Dispatcher]:
        return iter((self.quick, self.thorough))

    def same(self, ask) -> object:
        """What both answer, who have to be of one mind afterwards too."""
        first, second = (ask(each) for each in self.both)
        assert first == second
        quick, thorough = self.quick.buffer, self.thorough.buffer
        assert quick.groups == thorough.groups and quick.counts == thorough.counts
        assert self.quick.may_change_weights == self.thorough.may_change_weights
        assert self.quick.loads.tokens == self.thorough.loads.tokens
        assert quick.frontier == min(quick.groups, default=quick.next_number)
        assert quick.settled == set(range(quick.frontier, quick.next_number)) - quick.groups.keys()
        return first

    def issue(self) -> None:
        prompt_tokens = self.rng.randint(1, 30)

        def admit(made: Dispatcher) -> list[int]:
            groups = made.buffer.reserve()
            for group in groups:
                group.prompt_tokens = prompt_tokens
                made.admit(group)
            return [group.number for group in groups]

        self.same(admit)

    def send(self) -> None:
        self.same(lambda made: made.assignments())

    def answer(self) -> None:
        if not self.quick.under_way:
            return
        sent: Assignment = self.rng.choice(list(self.quick.under_way.values()))
        stops = self.rng.random() < 0.5
        parts = (0, sent.max_tokens) if sent.is_whole else range(sent.max_tokens + 1)
        tokens = self.rng.randint(1, sent.max_tokens) if stops else self.rng.choice(list(parts))
        self.same(lambda made: made.answered(sent.request, tokens, stops))

    def judge(self) -> None:
        whole = [g.number for g in self.quick.buffer.groups.values() if g.is_whole and g.state == "running"]
        if not whole:
            return
        number = self.rng.choice(whole)
        if self.rng.random() < 0.4:
            self.drop(number)
        else:
            self.same(lambda made: made.buffer.finish(number))

    def drop(self, number: int | None = None) -> None:
        """Any group may be, in whatever state."""
        if number is None and not self.quick.buffer.groups:
            return
        number = self.rng.choice(list(self.quick.buffer.groups)) if number is None else number
        self.evictions += 1
        self.same(lambda made: made.evict(number, "filtered"))

    def lose(self) -> None:
        engine = self.rng.choice(ENGINES)
        if engine in self.quick.loads.tokens:
            self.same(lambda made: made.lose(engine))
        self.same(lambda made: made.join(engine))

    def limit(self) -> None:
        window = self.rng.choice((None, 1, 3, 8))
        alone = set(self.rng.sample(sorted(self.quick.buffer.groups), min(2, len(self.quick.buffer.groups))))
        for made in self.both:
            made.window = window
            made.alone = set(alone)

    def train(self) -> None:
        """A step takes its batch, or gets the next weights."""
        buffer = self.quick.buffer
        if not buffer.is_training:
            self.same(lambda made: made.take())
        elif self.quick.may_change_weights:
            self.weights += 1
            self.same(lambda made: made.advance())
            if self.rng.random() < 0.2:
                self.go_on()

    def go_on(self) -> None:
        """Both from a checkpoint."""
        ledger = snapshot(self.quick.buffer)
        self.quick = quick(restored(ledger, self.schedule))
        again = restored(ledger, self.schedule)
        again.__class__ = SearchedBuffer
        self.thorough = thorough(again)
        for made in self.both:
            for group in made.buffer.groups.values():
                made.admit(group)


EVENTS = {"issue": 4, "send": 6, "answer": 30, "judge": 8, "drop": 1, "lose": 0.3, "limit": 0.3, "train": 4}


@pytest.mark.parametrize("seed", range(60))
def test_all_that_is_decided_is_what_a_search_of_everything_decides(seed):
    rng = random.Random(seed)
    pair = Pair(random_schedule(rng), rng)
    for event in rng.choices(list(EVENTS), list(EVENTS.values()), k=1500):
        getattr(pair, event)()
    assert pair.evictions > 10


def test_the_random_events_come_through_weights_and_evictions():
    """Else nothing that waits for later weights would have been tried."""
    rng = random.Random(7)
    pair = Pair(Schedule(3, 2, 40, 2, partial_rollouts=True, segment_tokens=10), rng)
    ahead = 0
    for event in rng.choices(list(EVENTS), list(EVENTS.values()), k=4000):
        getattr(pair, event)()
        ahead = max(ahead, len(pair.thorough._ahead.ahead))
    assert pair.weights > 10 and pair.evictions > 50 and ahead > 4


class Counted(dict):
    """Groups of a buffer, counting each that is looked at."""

    seen = 0

    def __iter__(self):
        for number in super().__iter__():
            Counted.seen += 1
            yield number

    def items(self):
        return ((number, self[number]) for number in self)

    def values(self):
        return (self[number] for number in self)


def lines_of(call) -> int:
    """Lines of Python that it runs, an entry of a comprehension each counted as one, and groups that it goes over."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return trace

    Counted.seen = 0
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return lines + Counted.seen


def cost_of_evictions(batch: int, responses: int, order: str) -> int:
    """The most that one of a batch's first ten evictions runs, with all ahead of it at its border."""
    rules = {"partial_rollouts": True, "order": order}
    rules |= {"segment_tokens": 100} if order == "in_order" else {}
    made = Dispatcher(GroupBuffer(Schedule(batch, responses, 1000, 2, **rules)), ["a", "b"])
    for group in made.buffer.reserve():
        made.admit(group)
    if order == "in_order":
        for sent in made.assignments():
            made.answered(sent.request, sent.max_tokens, False)
    made.buffer.groups = Counted(made.buffer.groups)
    lines_of(lambda: made.evict(0, "filtered"))  # the first looks for the last of the batch
    return max(lines_of(lambda n=n: made.evict(n, "filtered")) for n in range(1, 11))


@pytest.mark.parametrize("order", ["in_order", "ready_first"])
def test_an_eviction_touches_its_group_and_the_one_in_its_place_however_many_are_on_their_way(order):
    few, many = (cost_of_evictions(batch, 4, order) for batch in (12, 240))
    assert many <= few
    assert cost_of_evictions(12, 16, order) <= 4 * few
