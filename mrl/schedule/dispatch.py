"""Decides which response goes to which engine next, and when weights may change.

                  assignments                   answered
    ready  --------------------->  under way  ------------>  ended
      ^                                |
      |    engine lost, or interrupted | at the boundary of this version (in_order)
      +--------------------------------+------------>  ahead
      +--------------------- advance ---------------------+

Responses that a step needs sooner go first, then those with more tokens. Each request has a unique number, so that an
answer to a withdrawn request is recognised.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from mrl.schedule.buffer import GroupBuffer
from mrl.schedule.engine_loads import EngineLoads
from mrl.schedule.groups import Cause, Group
from mrl.schedule.staleness import request_end, version_of


class InLine(NamedTuple):
    """One response in line. The lowest goes first."""

    priority: int
    shortness: int  # minus its tokens: of equal priority, the longest goes first
    number: int
    index: int
    tokens: int  # prompt, kept, and all that may be added


class ReadyLine:
    """Responses that may be sent.

    A dropped group leaves by its number, without a search. Its entries in the heap are skipped when they reach the top.
    """

    def __init__(self) -> None:
        self.tokens = 0  # of all in line
        self._heap: list[InLine] = []
        self._of_group: dict[int, dict[int, InLine]] = defaultdict(dict)  # number -> index -> what is in line
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, response: InLine) -> None:
        """Adds a response. Its position depends on its values, not on the time."""
        heapq.heappush(self._heap, response)
        self._of_group[response.number][response.index] = response
        self._length += 1
        self.tokens += response.tokens

    def pop(self) -> InLine:
        """Removes and returns the first response. Raises IndexError if the line is empty."""
        while True:
            response = heapq.heappop(self._heap)
            if self._of_group.get(response.number, {}).get(response.index) == response:
                self._forget(response)
                return response

    def leave(self, number: int) -> None:
        """Removes all responses of a group."""
        for response in list(self._of_group.get(number, {}).values()):
            self._forget(response)

    def _forget(self, response: InLine) -> None:
        of_group = self._of_group[response.number]
        del of_group[response.index]
        if not of_group:
            del self._of_group[response.number]
        self._length -= 1
        self.tokens -= response.tokens


class AheadLine:
    """Responses that wait for later weights, by group."""

    def __init__(self) -> None:
        self._numbers: list[int] = []  # a heap, which may contain groups that have left
        self._of_group: dict[int, list[int]] = {}

    def add(self, number: int, index: int) -> None:
        """Adds a response of a group."""
        if number not in self._of_group:
            heapq.heappush(self._numbers, number)
            self._of_group[number] = []
        self._of_group[number].append(index)

    def leave(self, number: int) -> None:
        """Removes all responses of a group."""
        self._of_group.pop(number, None)

    def pop_while(self, due: Callable[[int], bool]) -> list[tuple[int, int]]:
        """Removes the groups with the lowest numbers, up to the first that is not due. Returns (number, index)."""
        found: list[tuple[int, int]] = []
        while self._numbers and due(self._numbers[0]):
            number = heapq.heappop(self._numbers)
            found += [(number, index) for index in self._of_group.pop(number, ())]
        return found


@dataclass(frozen=True)
class Assignment:
    """One request: continues response `index` of group `number` after `kept` tokens, by at most `max_tokens`."""

    request: int
    number: int
    index: int
    engine: str
    kept: int
    max_tokens: int
    tokens: int  # counted in the engine's load: prompt, kept, and all that may be added
    is_whole: bool  # in_order: it is answered completely, or begins again


class Dispatcher:
    """Dispatches the responses of a buffer's groups to engines."""

    def __init__(self, buffer: GroupBuffer, engines: list[str], max_requests: int | None = None):
        """`max_requests` limits the requests at an engine, as in EngineLoads."""
        self.buffer = buffer
        self.loads = EngineLoads(engines, max_requests)
        self.window = buffer.schedule.concurrency  # limit of running responses; rate control may lower it
        self.is_open = True  # False: nothing is sent, so that engines become empty
        self.alone: set[int] = set()  # groups of which one response runs at a time
        self.under_way: dict[int, Assignment] = {}
        self._of_group: dict[int, set[int]] = defaultdict(set)  # running requests
        self._held: dict[str, set[int]] = defaultdict(set)  # groups with responses handed over unfinished
        self._ready = ReadyLine()
        self._ahead = AheadLine()
        self._requests = 0

    def admit(self, group: Group) -> None:
        """Adds a reserved group with the length of its prompt, or a group from a checkpoint."""
        for index, ended in enumerate(group.ended):
            if not ended:
                self._line_up(group, index)

    def _line_up(self, group: Group, index: int) -> None:
        if self._is_ahead(group, index):
            self._ahead.add(group.number, index)
        else:
            tokens = group.prompt_tokens + group.lengths[index] + self._allowed(group, index)
            self._ready.add(InLine(self._first(group), -group.lengths[index], group.number, index, tokens))

    @property
    def _in_order(self) -> bool:
        return self.buffer.schedule.order == "in_order"

    def _is_ahead(self, group: Group, index: int) -> bool:
        """in_order: tells whether the response's next token needs later weights."""
        if not self._in_order:
            return False
        now = self.buffer.step
        later = version_of(group.lengths[index], group.begun, now + 1, self.buffer.schedule.quota) > now
        return later and not self.buffer.is_next(group.number)  # a step's own groups are finished with its weights

    def _first(self, group: Group) -> int:
        """Returns the priority of a group, lower for what is needed sooner: about the number of its step."""
        if self._in_order:
            return group.number // self.buffer.schedule.batch
        if group.begun is None:
            return self.buffer.step
        return group.begun

    def _allowed(self, group: Group, index: int) -> int:
        """Returns how many tokens the next request of a response may add."""
        schedule = self.buffer.schedule
        kept = group.lengths[index]
        end = request_end(kept, schedule.quota, schedule.max_tokens) if self._in_order else schedule.max_tokens
        return end - kept

    def assignments(self) -> list[Assignment]:
        """Returns the requests to send now, in this order."""
        sent = list[Assignment]()
        held = list[InLine]()
        in_line = self._ready.tokens
        most = len(self._ready) if self.window is None else self.window - len(self.under_way)
        while self.is_open and self.loads.free and self._ready and len(sent) < most:
            response = self._ready.pop()
            if self._waits_alone(response.number):
                held.append(response)
            else:
                sent.append(self._sent(response, in_line))
                in_line -= response.tokens
        for response in held:
            self._ready.add(response)
        return sent

    def _waits_alone(self, number: int) -> bool:
        return number in self.alone and any(self._of_group.get(other) for other in self.alone - {number})

    def _sent(self, response: InLine, in_line: int) -> Assignment:
        """Returns the request for a response, and records it as running.

        `in_line`: tokens of all responses that are to be sent now, including this one.
        """
        group = self.buffer.groups[response.number]
        index = response.index
        engine = self.loads.assign(group.number, response.tokens, in_line)
        self.buffer.start(group.number)
        self._requests += 1
        allowed = self._allowed(group, index)
        kept = group.lengths[index]
        request = Assignment(
            self._requests, group.number, index, engine, kept, allowed, response.tokens, self._in_order
        )
        self.under_way[request.request] = request
        self._of_group[group.number].add(request.request)
        return request

    def answered(self, request: int, tokens: int, stopped: bool, context: int = 0) -> Group | None:
        """Records an answer of `tokens` tokens. `stopped` says that the response ended by itself.

        `context` counts tokens of the whole response that were not sampled; at a boundary they may pass it. Returns the
        group, or None for a withdrawn request. In order, a request that is interrupted before its boundary begins again
        with 0 tokens. Continued, it would have other bits. A conversation comes back between two turns instead.
        """
        if request not in self.under_way:
            return None
        sent = self._back(request)
        if tokens > sent.max_tokens + context:
            raise ValueError(f"{sent.engine} made {tokens} tokens, of {sent.max_tokens} asked for: {sent}")
        if sent.is_whole and not stopped and not context and 0 < tokens < sent.max_tokens:
            raise ValueError(
                f"{sent.engine} gave {tokens} tokens, neither all nor none of {sent.max_tokens} "
                f"up to the boundary: {sent}"
            )
        schedule = self.buffer.schedule
        has_ended = stopped or sent.kept + tokens >= schedule.max_tokens
        if not has_ended and not schedule.continues_kept:
            tokens = 0
        group = self.buffer.add(sent.number, sent.index, tokens, has_ended)
        if group.is_whole:
            del self._of_group[group.number]
        elif not group.ended[sent.index]:
            if tokens < sent.max_tokens:
                self._held[sent.engine].add(sent.number)
            self._line_up(group, sent.index)
        return group

    def _back(self, request: int) -> Assignment:
        sent = self.under_way.pop(request)
        self._of_group[sent.number].discard(request)
        self.loads.done(sent.engine, sent.tokens)
        return sent

    def evict(self, number: int, cause: Cause) -> list[Assignment]:
        """Drops a group. Returns its running requests, which engines should end.

        In order, the next group replaces it.
        """
        self.buffer.evict(number, cause)
        ended = self._recalled(number)
        self._look_ahead(self.buffer.is_next)
        return ended

    def take(self) -> tuple[list[Group], list[int], list[Assignment]] | None:
        """Returns the step's batch once it is complete, else None.

        Also returns the numbers of surplus groups, and their running requests, which engines should end.
        """
        batch = self.buffer.take()
        if batch is None:
            return None
        rest = self.buffer.drop_rest()
        ended = [sent for number in rest for sent in self._recalled(number)]
        return batch, rest, ended

    def filter(self, number: int) -> list[int]:
        """Filters a group out of the buffer. In order, the next group replaces it."""
        gone = self.buffer.filter(number)
        self._look_ahead(self.buffer.is_next)
        return gone

    def _recalled(self, number: int) -> list[Assignment]:
        requests = [self._back(request) for request in sorted(self._of_group.get(number, ()))]
        self._of_group.pop(number, None)
        self._ready.leave(number)
        self._ahead.leave(number)
        return requests

    def _look_ahead(self, due: Callable[[int], bool]) -> None:
        """Moves the oldest groups from the line of later weights to the ready line, until one is not `due`."""
        for number, index in self._ahead.pop_while(due):
            self._line_up(self.buffer.groups[number], index)

    def lose(self, engine: str) -> list[Assignment]:
        """Removes a lost engine. Its responses continue elsewhere, from the tokens that came back before.

        Returns its requests, each of which is issued again.
        """
        self.loads.lose(engine)
        self._held.pop(engine, None)
        requests = [request for request, sent in self.under_way.items() if sent.engine == engine]
        lost = [self._back(request) for request in requests]
        for sent in lost:
            self._line_up(self.buffer.groups[sent.number], sent.index)
        return lost

    def at(self, engines: Collection[str]) -> list[int]:
        """Returns the numbers of groups that these engines generate, or handed over unfinished by these weights.

        A conversation is handed over by an engine that dies, perhaps of the conversation.
        """
        numbers = {sent.number for sent in self.under_way.values() if sent.engine in engines}
        for engine in engines:
            numbers |= self._held.get(engine, set())
        groups = self.buffer.groups
        return sorted(number for number in numbers if number in groups and not groups[number].is_whole)

    def join(self, engine: str) -> None:
        """Adds an engine that holds the current weights."""
        self.loads.join(engine)

    @property
    def lacks_engines(self) -> bool:
        """Tells whether responses wait and no engine is left."""
        return bool(self._ready) and not self.loads.tokens

    @property
    def may_change_weights(self) -> bool:
        """Tells whether weights may change now without giving a token or an issued group the wrong version."""
        schedule = self.buffer.schedule
        if schedule.order == "in_order":
            undecided = schedule.rewards_decide and self.buffer.awaits_rewards
            return not self._ready and not self.under_way and not undecided
        return schedule.partial_rollouts or not self.under_way

    def advance(self) -> list[Assignment]:
        """Advances to the next weights: waiting responses may continue, stale groups are dropped or begin again.

        Returns the requests of stale groups that still run, which engines should end.
        """
        if not self.may_change_weights:
            waiting = ""
            if self.buffer.awaits_rewards:
                waiting = ", rewards are awaited"
            raise ValueError(
                f"by these weights {len(self.under_way)} requests are under way, "
                f"{len(self._ready)} have to go on{waiting}"
            )
        self._held.clear()
        stale = self.buffer.advance()
        ended = [sent for number in stale for sent in self._recalled(number)]
        self.loads.forget_prefixes()
        self._look_ahead(lambda number: True)
        for number in stale:
            if number in self.buffer.groups:
                self.admit(self.buffer.groups[number])
        return ended
