"""The turns of an agent's session with their tokens: where a request belongs, and the row that is trained."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from mrl.acting.agent import AGENT
from mrl.acting.chat_api import BadRequest, ChatMessage, ChatRequest, in_order_of_calls, number_of
from mrl.acting.chat_turns import ChatPlace, KeptTurns
from mrl.data.samples import Samples, TurnCall, with_turns
from mrl.schedule.branches import Branch, as_one_row

TOKENS = "tokens"  # role of a message that is token ids, as a text of numbers


@dataclass
class SpokenTurn:
    """A turn that was answered."""

    row: Samples  # the branch up to and with this turn
    calls: list[TurnCall] = field(default_factory=list)  # what is recorded of the turn
    seconds: float = 0.0  # time that the agent took after it


class SpokenRow(NamedTuple):
    """A response as a row."""

    made: Samples
    numbers: list[int]  # of its turns
    calls: list[list[TurnCall]]  # of each turn


class SpokenTurns:
    """The turns of one session."""

    def __init__(self, keeps_all: bool = False) -> None:
        """`keeps_all`: answers that were passed over are trained as well."""
        self._keeps_all = keeps_all
        self._kept = KeptTurns()
        self._turns: dict[int, SpokenTurn] = {}
        self.last: SpokenTurn | None = None  # the turn that was answered last

    def __contains__(self, number: int | None) -> bool:
        return number in self._turns

    def __getitem__(self, number: int) -> SpokenTurn:
        return self._turns[number]

    def place(self, asked: ChatRequest) -> tuple[ChatRequest, ChatPlace]:
        """Returns the request with all its messages, and where it belongs. Raises BadRequest where it has nothing new
        to answer.
        """
        if asked.previous:
            asked = self._with_history(asked)
        elif asked.ids is not None:
            asked = self._with_tokens(asked)
        return asked, self._kept.place(asked)

    def _with_history(self, asked: ChatRequest) -> ChatRequest:
        """Puts the conversation up to an earlier response in front of the messages, behind their instructions."""
        number = number_of(asked.previous)
        if number not in self._turns:
            raise BadRequest(f"`previous_response_id` is {asked.previous[:60]!r}, which is no response of this session")
        own = asked.is_instructed
        messages = (*asked.messages[:own], *self._kept.history(number), *asked.messages[own:])
        return replace(asked, messages=in_order_of_calls(messages))

    def _with_tokens(self, asked: ChatRequest) -> ChatRequest:
        """Finds the turn whose tokens are the beginning of the request's, the longest of several."""
        ids = np.array(asked.ids, np.int64)
        begins = [
            number
            for number, turn in list(self._turns.items())  # others are answered meanwhile, in another thread
            if np.array_equal(turn.row.token_ids, ids[: len(turn.row.token_ids)])
        ]
        if not begins:
            return replace(asked, messages=(_tokens(ids),))
        parent = max(begins, key=lambda number: (len(self._turns[number].row.token_ids), number))
        row = self._turns[parent].row
        new = ids[len(row.token_ids) :]
        if not len(new) and not row.truncated[0]:
            raise BadRequest("the prompt ends with what the model said: there is nothing to answer")
        tools = self._kept.tools_of(parent)
        return replace(asked, messages=(*self._kept.history(parent), _tokens(new)), tools=tools)

    def open(self, asked: ChatRequest, place: ChatPlace) -> int:
        """Reserves a place. Returns its number, which the answer will have."""
        self._kept = self._kept.opened(asked, place)
        return self._kept.asked

    def drop(self, number: int) -> None:
        """Gives a place back, as if the request had not been made."""
        self._kept = self._kept.without(number)

    def add(self, number: int, said: ChatMessage, row: Samples, marks: Sequence[TurnCall]) -> None:
        """Adds the model's answer to a request."""
        self._kept = self._kept.answered(number, said)
        self._turns[number] = self.last = SpokenTurn(row, list(marks))

    def acted(self, reason: str, seconds: float) -> None:
        """Records what the agent did after the turn that was answered last."""
        if self.last is not None:
            self.last.calls.append(TurnCall(AGENT, reason, seconds))
            self.last.seconds += seconds

    def row(self, most: int) -> "SpokenRow":
        """Returns all branches that fit as one row.

        Together the branches have at most `most` tokens of one response. The last is taken, then the newest of the
        others; they stand in the order in which the agent left them. What is still to be answered is in none.
        """
        self._kept = self._kept.all_answered
        leaves = self._kept.all_leaves if self._keeps_all else self._kept.leaves
        *earlier, last = leaves
        ends = [last]
        taken = int(self._turns[last].row.response_lengths[0])
        for end in reversed(earlier):
            in_front = int(self._turns[end].row.response_lengths[0]) + int(self._turns[ends[0]].row.prompt_lengths[0])
            if taken + in_front <= most:
                taken += in_front
                ends.insert(0, end)
        return self._joined(ends, untrained=len(leaves) - len(ends))

    def last_row(self) -> "SpokenRow":
        """Returns the branch of the turn that was answered last."""
        number = next(number for number, turn in self._turns.items() if turn is self.last)
        path = self._kept.path(number)
        return SpokenRow(self.last.row, path, [self._turns[each].calls for each in path])

    def _joined(self, ends: Sequence[int], untrained: int) -> "SpokenRow":
        passed_over: dict[int, list[TurnCall]] = defaultdict(list)  # what is recorded of such answers, by what stays
        if not self._keeps_all:
            for number, stays in self._kept.passed_over.items():
                overridden = (call for call in self._turns[number].calls if call.reason == "overridden")
                passed_over[stays] += [*overridden, TurnCall(AGENT, "retry")]
        known: set[int] = set()
        branches = []
        numbers: list[int] = []
        calls: list[list[TurnCall]] = []
        for end in ends:
            path = self._kept.path(end)
            shared = sum(number in known for number in path)
            known |= set(path)
            numbers += path[shared:]
            calls += [[*passed_over.pop(number, ()), *self._turns[number].calls] for number in path[shared:]]
            branches.append(Branch(_after(self._turns[end]), shared))
        calls[-1].extend(itertools.chain.from_iterable(passed_over.values()))  # of branches without room
        calls[-1] += [TurnCall(AGENT, "untrained")] * untrained
        return SpokenRow(as_one_row(branches), numbers, calls)


def _tokens(ids: np.ndarray) -> ChatMessage:
    return ChatMessage(TOKENS, " ".join(map(str, ids.tolist())))


def _after(turn: SpokenTurn) -> Samples:
    """Adds to the row the seconds that the agent took after its last turn."""
    row = with_turns(turn.row)
    times = row.turn_seconds.copy()
    times[-1] = turn.seconds
    return replace(row, turn_seconds=times)
