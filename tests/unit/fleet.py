"""A fleet of engines and a trainer on a virtual clock, which do what the machines of `mrl.schedule` tell them.

What is simulated is what a run has outside these machines: engines that make tokens at their own speed, die, hang and
come back, rewards that take time, a trainer, weight syncs, a process that is killed and goes on from its last
checkpoint. `Fleet.train_step` reads like the loop that it stands for. Books of what happened are kept beside the
machines' own, so that each can be held against the other.

An engine with n responses makes one token of each in `token_seconds(n)`. For tokens that have to be computed before
(prompt, kept) it makes none for `prefill_s` each. Which responses share an engine changes with every arrival and end:
per engine one counter of tokens made since it began, and of each response the count at which it is done.
"""

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mrl.schedule.buffer import GroupBuffer
from mrl.schedule.dispatch import Assignment, Dispatcher
from mrl.schedule.fleet import READY, STALE
from mrl.schedule.fleet import Fleet as Machine
from mrl.schedule.groups import Group, State
from mrl.schedule.ledger import Ledger, check_goes_on, restored, snapshot
from mrl.schedule.progress import ProgressWatch
from mrl.schedule.rate import Observation, Rate, RateRules
from mrl.schedule.staleness import Schedule
from mrl.schedule.suspects import suspects

Spans = tuple[tuple[int, int], ...]  # (first token, version)


class Deadlock(Exception):
    """Nothing happens any more, and the run is not at its end."""


class Killed(Exception):
    """The process of the run is gone."""


@dataclass(frozen=True)
class EngineKind:
    """How fast an engine is, in virtual seconds, and how much it holds."""

    step_s: float = 0.02
    each_s: float = 0.0001
    prefill_s: float = 0.0
    seats: int = 1_000_000  # responses at once; more wait in their order
    cache_tokens: int = 1 << 60

    def token_seconds(self, responses: int) -> float:
        """Of one step, in which each of so many responses gets a token."""
        return self.step_s + responses * self.each_s


@dataclass(frozen=True)
class World:
    """Everything that the schedule has no say in. Functions of group number and response index decide what is made."""

    engines: tuple[EngineKind, ...]
    length: Callable[[int, int], int]  # tokens that the model would make
    prompt_tokens: int = 10
    train_s: Callable[[int], float] = lambda tokens: 1.0  # seconds of a step on so many response tokens
    sync_s: float = 0.1
    reward_s: Callable[[int], float] = lambda number: 0.05  # of a group, after its last response
    verdict: Callable[[int], str] = lambda number: "finished"  # or "failed", "filtered"
    poison: frozenset[int] = frozenset()  # groups that kill the engine they are sent to
    deaths: tuple[tuple[float, int], ...] = ()  # (second, engine)
    hangs: tuple[tuple[float, int], ...] = ()
    kills: tuple[float, ...] = ()  # seconds at which the whole run is killed
    restart_s: float = 5.0
    restart_limit: int = 1000
    progress_limit_s: float = 3.0
    keeps_requests: bool = True  # at a sync engines keep what is under way; else it is given back and sent anew
    rate: RateRules | None = None


@dataclass
class _Response:
    """A request inside an engine."""

    sent: Assignment
    tokens: int  # that it will make
    stops: bool  # by itself
    end: float  # the engine's count at which it is done
    versions: list[tuple[int, int]]  # (token of the response, version), from its first on
    base: int = 0  # tokens made before the last sync

    def made(self, count: float) -> int:
        return max(self.base, min(self.tokens, int(self.tokens - (self.end - count) + 1e-9)))


class _Engine:
    """One engine; `count` tokens have been made of each response that was in it from the beginning."""

    def __init__(self, kind: EngineKind):
        self.kind, self.count, self.at, self.owed = kind, 0.0, 0.0, 0.0  # owed: seconds of prefill
        self.inside: dict[int, _Response] = {}
        self.waiting: dict[int, _Response] = {}
        self.ends: list[tuple[float, int]] = []
        self.runs, self.hangs, self.is_alive = True, False, True
        self.epoch = self.made = 0

    @property
    def rate(self) -> float:
        """Tokens a second of each response."""
        stands = not self.inside or self.hangs or not self.runs
        return 0.0 if stands else 1.0 / self.kind.token_seconds(len(self.inside))

    def to(self, now: float) -> None:
        seconds, rate, self.at = now - self.at, self.rate, now
        if rate:
            paid = min(self.owed, seconds)
            self.owed -= paid
            self.count += (seconds - paid) * rate

    def send(self, response: _Response) -> None:
        if len(self.inside) < self.kind.seats:
            self._enter(response)
        else:
            self.waiting[response.sent.request] = response

    def _enter(self, response: _Response) -> None:
        sent = response.sent
        self.owed += (sent.tokens - sent.max_tokens) * self.kind.prefill_s
        response.end = self.count + response.tokens
        self.inside[sent.request] = response
        heapq.heappush(self.ends, (response.end, sent.request))

    def next_end(self) -> float | None:
        while self.ends and self._is_old(*self.ends[0]):
            heapq.heappop(self.ends)
        if not self.ends or not self.rate:
            return None
        return self.at + self.owed + max(0.0, self.ends[0][0] - self.count) / self.rate

    def _is_old(self, end: float, request: int) -> bool:
        return request not in self.inside or self.inside[request].end != end

    def done(self) -> list[_Response]:
        """Responses that are at their end; those that waited take their seats."""
        found = []
        while self.next_end() is not None and self.ends[0][0] <= self.count + 1e-6:
            found.append(self.drop(self.ends[0][1]))
        return found

    def drop(self, request: int) -> _Response | None:
        response = self.inside.pop(request, None) or self.waiting.pop(request, None)
        if response is not None:
            self.made += response.tokens
        while self.waiting and len(self.inside) < self.kind.seats:
            self._enter(self.waiting.pop(next(iter(self.waiting))))
        return response

    def empty(self) -> None:
        """Drops all that it has."""
        self.inside, self.waiting, self.ends, self.owed = {}, {}, [], 0.0

    def new_weights(self, version: int) -> None:
        """Tokens made so far keep the version before; all that is inside is computed anew."""
        for response in self.inside.values():
            response.base = response.made(self.count)
            response.end = self.count + response.tokens - response.base
            heapq.heappush(self.ends, (response.end, response.sent.request))
            self.owed += (response.sent.tokens - response.sent.max_tokens + response.base) * self.kind.prefill_s
        for response in self.all():
            response.versions.append((response.sent.kept + response.base, version))

    def all(self) -> list[_Response]:
        return [*self.inside.values(), *self.waiting.values()]

    def made_of(self, response: _Response) -> int:
        """Tokens made of it so far; of one that waits for a seat none."""
        return response.made(self.count) if response.sent.request in self.inside else 0

    @property
    def held(self) -> int:
        """Tokens in the cache."""
        return sum(r.sent.tokens - r.sent.max_tokens + r.made(self.count) for r in self.inside.values())


@dataclass
class Books:
    """What happened, kept beside the machines. `spans` are those of responses on their way: what a spool would hold."""

    # step, number, spans, lengths
    trained: list[tuple[int, int, tuple[Spans, ...], tuple[int, ...]]] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    spans: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    lengths: dict[tuple[int, int], int] = field(default_factory=dict)
    sent: list[tuple[int, int, int, int]] = field(default_factory=list)  # version, number, index, kept
    step_ends: list[float] = field(default_factory=list)
    recomputed: int = 0  # tokens that engines computed before they went on

    def copy(self) -> "Books":
        spans = {key: list(value) for key, value in self.spans.items()}
        lists = (
            list(self.trained),
            dict(self.dropped),
            spans,
            dict(self.lengths),
            list(self.sent),
            list(self.step_ends),
        )
        return Books(*lists, self.recomputed)


class Fleet:
    """A run of the schedule in the world."""

    def __init__(self, schedule: Schedule, world: World):
        self.schedule, self.world = schedule, world
        self.now = self.waited = 0.0
        self.events: list[tuple[float, int, str, tuple]] = []
        self.order = 0
        self.kills = sorted(world.kills, reverse=True)
        self.largest_buffer = self.most_under_way = 0
        self.seen: Counter[str] = Counter()  # what happened how often, over all kills
        for kind, times in (("death", world.deaths), ("hang", world.hangs)):
            for second, engine in times:
                self.push(second, kind, self.name(engine % len(world.engines)))
        self.losses: list[list[int]] = []  # groups under each lost engine, over all kills
        self.ranks_are_idle = True
        self.begin(GroupBuffer(schedule), Books())
        self.save()

    @staticmethod
    def name(engine: int) -> str:
        return f"engine {engine}"

    def begin(self, buffer: GroupBuffer, books: Books) -> None:
        """A new process: engines that hold nothing, and the groups that the buffer has."""
        self.buffer, self.books = buffer, books
        self.engines = {self.name(i): _Engine(kind) for i, kind in enumerate(self.world.engines)}
        for engine in self.engines.values():
            engine.at = self.now
        self.events = [event for event in self.events if event[2] in ("death", "hang") and len(event[3]) == 1]
        heapq.heapify(self.events)
        self.dispatcher = Dispatcher(buffer, list(self.engines))
        self.machine = Machine(self.engines, self.world.restart_limit, version=buffer.step)
        self.suspects = suspects(self.losses)
        self.ranks_are_idle = True
        self.rate = Rate.start(self.world.rate) if self.world.rate else None
        self.rate_log: list[tuple[Observation, int]] = []
        self.watch = ProgressWatch(self.world.progress_limit_s)
        if self.world.hangs or self.world.rate:
            self.push(self.now + 1.0, "poll")
        for group in sorted(buffer.groups.values(), key=lambda group: group.number):
            self.admit(group)
            if group.state is State.RUNNING and group.number in self.buffer.groups:
                self.push(self.now + self.world.reward_s(group.number), "reward", group)

    # ------------------------------------------------------------ the loop

    def run(self, steps: int) -> "Fleet":
        """Trains so many steps, over all kills."""
        while self.buffer.step < steps:
            try:
                self.feed()
                self.train_step()
            except Killed:
                self.resume()
        return self

    def train_step(self) -> None:
        schedule = self.schedule
        batch, rest, ended = self.wait_for(self.dispatcher.take)
        self.book_batch(batch)
        for number in rest:
            self.forget(number)
            self.seen["surplus"] += 1
            self.books.dropped[number] = "surplus"
        self.end(ended)
        self.ranks_are_idle = False
        self.pass_time(self.world.train_s(sum(group.tokens for group in batch)))
        drains = schedule.order == "ready_first" and not schedule.partial_rollouts
        self.dispatcher.is_open = not drains
        self.wait_for(self.may_change_weights)
        self.pause()
        self.pass_time(self.world.sync_s)
        self.new_weights()
        self.dispatcher.is_open = True
        self.ranks_are_idle = True
        self.books.step_ends.append(self.now)
        self.save()

    def may_change_weights(self) -> bool:
        """In order, ahead of training: without an engine nobody can make what is of the weights before; resumed."""
        if self.schedule.order == "in_order" and not self.schedule.is_synchronous and self.dispatcher.lacks_engines:
            self.seen["nobody left"] += 1
            raise Killed
        return self.dispatcher.may_change_weights

    def pause(self) -> None:
        """Nothing is made while weights change. Engines that do not keep what is under way give it back first."""
        self.dispatcher.is_open = False
        for engine in self.engines.values():
            engine.to(self.now)
            engine.runs = False
            if not self.world.keeps_requests:
                for response, tokens in [(response, engine.made_of(response)) for response in engine.all()]:
                    self.book_answer(response, tokens, False)
                engine.empty()

    def new_weights(self) -> None:
        before = dict(self.buffer.groups)
        ended = self.dispatcher.advance()
        for number in [number for number, group in before.items() if self.buffer.groups.get(number) is not group]:
            self.forget(number)
            self.seen["stale"] += 1
            if number not in self.buffer.groups:
                self.books.dropped[number] = "stale"
        self.end(ended)
        for engine in self.engines.values():
            engine.to(self.now)
            engine.new_weights(self.buffer.step)
            engine.runs = True
        self.bring(self.machine.those(READY, STALE))
        for engine in self.engines.values():
            self.books.recomputed += sum(response.sent.kept + response.base for response in engine.inside.values())
        self.watch.excuse(self.now)
        self.schedule_ends(self.engines)

    def save(self) -> None:
        """A checkpoint, which can be read again; loads are those of what is under way."""
        self.saved = json.dumps(snapshot(self.buffer).to_json()), self.books.copy()
        Ledger.from_json(json.loads(self.saved[0]))
        loads: Counter[str] = Counter()
        for sent in self.dispatcher.under_way.values():
            loads[sent.engine] += sent.tokens
        assert loads == +Counter(self.dispatcher.loads.tokens)

    def resume(self) -> None:
        """A new process from the last checkpoint. What was done since is done again."""
        self.seen["killed"] += 1
        text, books = self.saved
        lengths = {n: [books.lengths.get((n, k), 0) for k in range(self.schedule.responses)] for n, _ in books.spans}
        ledger = Ledger.from_json(json.loads(text))
        check_goes_on(ledger, self.schedule)
        assert all(lengths.get(g.number) == g.lengths for g in ledger.groups if g.tokens), "tokens are what is counted"
        self.begin(restored(ledger, self.schedule), books.copy())

    # ------------------------------------------------------------ what happens

    def wait_for(self, ready: Callable[[], object]):
        """Lets things happen until `ready` gives something. Raises Deadlock, or Killed."""
        while not (found := ready()):
            if not self.events or self.now - self.waited > 1000 * self.world.progress_limit_s:
                raise Deadlock(
                    f"step {self.buffer.step}, second {self.now:.1f}: {len(self.buffer.groups)} groups on their way"
                )
            self.happen()
        self.waited = self.now
        return found

    def pass_time(self, seconds: float) -> None:
        """Things happen meanwhile."""
        until = self.now + seconds
        while self.events and self.events[0][0] <= until:
            self.happen()
        self.move(until)
        self.waited = self.now

    def move(self, now: float) -> None:
        if self.kills and now >= self.kills[-1]:
            self.now = max(self.now, self.kills.pop())
            raise Killed
        self.now = max(self.now, now)

    def push(self, when: float, kind: str, *what) -> None:
        self.order += 1
        heapq.heappush(self.events, (when, self.order, kind, what))

    def happen(self) -> None:
        when, _, kind, what = self.events[0]
        self.move(when)
        heapq.heappop(self.events)
        if getattr(self, f"on_{kind}")(*what):
            self.waited = self.now
            self.feed()

    def feed(self) -> None:
        """All that may be issued is issued, all that may be sent is sent."""
        while groups := self.buffer.reserve():
            for group in groups:
                group.prompt_tokens = self.world.prompt_tokens
                self.admit(group)
        issued = self.buffer.next_number - len(self.books.dropped)
        assert issued < self.schedule.issue_limit(self.buffer.step) + self.schedule.unit, (
            f"{issued} groups at step {self.buffer.step}"
        )
        assignments = self.dispatcher.assignments()
        self.largest_buffer = max(self.largest_buffer, len(self.buffer.groups))
        self.most_under_way = max(self.most_under_way, len(self.dispatcher.under_way))
        for sent in assignments:
            self.send(sent)
        self.schedule_ends({sent.engine for sent in assignments})

    def admit(self, group: Group) -> None:
        if not self.is_aside(group):
            self.dispatcher.admit(group)

    def is_aside(self, group: Group) -> bool:
        """Engines were lost under it, and under no other as often: then it is dropped."""
        if group.number in self.suspects.alone:
            self.dispatcher.alone.add(group.number)
        if group.number not in self.suspects.aside or group.is_whole:
            return False
        self.end(self.dispatcher.evict(group.number, "quarantined"))
        self.books.dropped[group.number] = "quarantined"
        self.seen["quarantined"] += 1
        self.forget(group.number)
        return True

    def send(self, sent: Assignment) -> None:
        assert self.machine.status(sent.engine) is READY or self.schedule.order == "ready_first"
        engine = self.engines[sent.engine]
        engine.to(self.now)
        wanted = self.world.length(sent.number, sent.index) - sent.kept
        tokens = min(wanted, sent.max_tokens)
        self.books.recomputed += sent.kept
        self.books.sent.append((self.buffer.step, sent.number, sent.index, sent.kept))
        engine.send(_Response(sent, tokens, wanted <= sent.max_tokens, 0.0, [(sent.kept, self.buffer.step)]))
        if sent.number in self.world.poison:
            self.push(self.now + 0.01, "death", sent.engine, sent.request)

    def schedule_ends(self, engines: Iterable[str]) -> None:
        for name in sorted(engines):
            engine = self.engines[name]
            engine.epoch += 1
            if (when := engine.next_end()) is not None:
                self.push(when, "made", name, engine.epoch)

    def on_made(self, name: str, epoch: int) -> bool:
        engine = self.engines[name]
        if epoch != engine.epoch:
            return False
        engine.to(self.now)
        for response in engine.done():
            self.book_answer(response, response.tokens, response.stops)
        self.schedule_ends([name])
        return True

    def book_answer(self, response: _Response, tokens: int, stops: bool) -> None:
        """An answer reaches the machines, and the books."""
        sent, key = response.sent, (response.sent.number, response.sent.index)
        group = self.dispatcher.answered(sent.request, tokens, stops)
        if group is None:
            return
        if tokens:
            self.books.lengths[key] = self.books.lengths.get(key, 0) + tokens
            assert self.books.lengths[key] == sent.kept + tokens == group.lengths[sent.index]
            known = self.books.spans.setdefault(key, [])
            for start, version in response.versions:
                if start < sent.kept + tokens:
                    while known and known[-1][0] >= start:
                        known.pop()
                    if not known or known[-1][1] != version:
                        known.append((start, version))
        if group.is_whole:
            self.push(self.now + self.world.reward_s(group.number), "reward", group)

    def on_reward(self, group: Group) -> bool:
        if self.buffer.groups.get(group.number) is not group:
            return False  # evicted meanwhile
        verdict = self.world.verdict(group.number)
        if verdict == "finished":
            self.buffer.finish(group.number)
        else:
            self.books.dropped[group.number] = verdict
            self.seen[verdict] += 1
            self.end(self.dispatcher.evict(group.number, verdict))
            self.forget(group.number)
        return True

    def end(self, requests: Iterable[Assignment]) -> None:
        """Engines end requests that nobody wants."""
        touched = set()
        for sent in requests:
            if sent.engine in self.engines:
                self.engines[sent.engine].to(self.now)
                self.engines[sent.engine].drop(sent.request)
                touched.add(sent.engine)
        self.schedule_ends(touched)

    def forget(self, number: int) -> None:
        for index in range(self.schedule.responses):
            self.books.spans.pop((number, index), None)
            self.books.lengths.pop((number, index), None)

    def on_death(self, name: str, request: int | None = None) -> bool:
        engine = self.engines[name]
        if not engine.is_alive or (request is not None and request not in engine.inside):
            return False
        engine.is_alive = False
        self.seen["hung and lost" if engine.hangs else "lost"] += 1
        engine.empty()
        self.machine.exit(name, self.machine.epoch(name))
        self.losses.append(sorted({sent.number for sent in self.dispatcher.lose(name)}))
        self.suspects = suspects(self.losses)
        for group in list(self.buffer.groups.values()):
            self.is_aside(group)
        self.watch.forget(name)
        self.schedule_ends([name])
        if (epoch := self.machine.start(name)) is not None:
            self.push(self.now + self.world.restart_s, "started", name, epoch)
        elif self.machine.shortage():
            self.seen["too few left"] += 1
            raise Killed
        return True

    def on_hang(self, name: str) -> bool:
        engine = self.engines[name]
        engine.to(self.now)
        engine.hangs = True
        self.schedule_ends([name])
        return True

    def on_started(self, name: str, epoch: int) -> bool:
        if not self.machine.started(name, epoch):
            return False
        kind, runs = self.engines[name].kind, self.engines[name].runs
        self.engines[name] = engine = _Engine(kind)
        engine.at, engine.runs = self.now, runs
        if self.ranks_are_idle:
            self.push(self.now + self.world.sync_s, "caught_up", name, epoch, self.buffer.step)
        return True

    def on_caught_up(self, name: str, epoch: int, version: int) -> bool:
        """Ranks that came to train meanwhile had to wait; here the engine comes with the next weights instead."""
        if not self.ranks_are_idle or version != self.buffer.step or self.machine.epoch(name) != epoch:
            return False
        if self.machine.status(name) is STALE:
            self.bring([name])
        return True

    def bring(self, names: Iterable[str]) -> None:
        """Proven weights of now, committed."""
        for name in names:
            epoch = self.machine.epoch(name)
            self.machine.verified(name, epoch, self.buffer.step)
            self.machine.committed(name, epoch, self.buffer.step)
            if name not in self.dispatcher.loads.tokens:
                self.seen["brought back"] += 1
                self.dispatcher.join(name)

    def on_poll(self) -> bool:
        """Once a second: who gets on, and how full caches are."""
        self.push(self.now + 1.0, "poll")
        alive = {name: engine for name, engine in self.engines.items() if engine.is_alive}
        for name, engine in alive.items():
            engine.to(self.now)
            made = engine.made + sum(response.made(engine.count) for response in engine.inside.values())
            self.watch.note(name, made, bool(engine.inside) and engine.runs, self.now)
        for name in self.watch.late(self.now):
            self.on_death(name)
        if self.rate and alive:
            uses = [engine.held / engine.kind.cache_tokens for engine in alive.values()]
            seen = Observation(max(uses), sum(use > 1 for use in uses), len(self.dispatcher.under_way))
            self.rate = self.rate.after(seen)
            self.rate_log.append((seen, self.rate.window))
            self.dispatcher.window = min(self.rate.window, self.schedule.concurrency or self.rate.window)
        self.feed()
        return False

    def book_batch(self, batch: list[Group]) -> None:
        for group in batch:
            keys = [(group.number, index) for index in range(self.schedule.responses)]
            spans = tuple(tuple(self.books.spans[key]) for key in keys)
            self.books.trained.append(
                (self.buffer.step, group.number, spans, tuple(self.books.lengths[key] for key in keys))
            )
            self.forget(group.number)
