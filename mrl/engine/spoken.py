"""The turns of an agent's session with their tokens: where a request belongs, and the row that is trained."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from mrl.acting.agent import AGENT
from mrl.acting.chat_api import SAID, BadRequest, ChatMessage, ChatRequest, in_order_of_calls, number_of
from mrl.acting.chat_turns import ChatPosition, KeptTurns
from mrl.data.samples import Samples, TurnCall, row_images, with_turns
from mrl.schedule.branches import Branch, as_one_row

TOKENS = "tokens"  # role of a message that is token ids, as a text of numbers

_digest = partial(hashlib.blake2b, digest_size=16)


@dataclass
class SpokenTurn:
    """A turn that was answered."""

    row: Samples  # the branch up to and with this turn
    marks: list[TurnCall] = field(default_factory=list)  # what is recorded of its request
    acted: TurnCall | None = None  # all that the agent did after it

    @property
    def calls(self) -> list[TurnCall]:
        """All that is recorded of the turn."""
        return [*self.marks, *([] if self.acted is None else [self.acted])]

    @property
    def seconds(self) -> float:
        """Time that the agent took after it."""
        return 0.0 if self.acted is None else self.acted.seconds


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
        self._by_tokens: dict[int, dict[bytes, int]] = {}  # number of tokens -> their digest -> the newest turn
        self.last: SpokenTurn | None = None  # the turn that was answered last

    def __contains__(self, number: int | None) -> bool:
        return number in self._turns

    def __getitem__(self, number: int) -> SpokenTurn:
        return self._turns[number]

    def whole(self, asked: ChatRequest) -> ChatRequest:
        """Returns the request with all its messages, ready to be placed. Raises BadRequest where it goes on from what
        is not there. It may run in another thread than the rest.
        """
        if any(message.role == SAID for message in asked.messages):
            asked = replace(asked, messages=in_order_of_calls([self._said(message) for message in asked.messages]))
        if asked.previous:
            asked = self._with_history(asked)
        elif asked.ids is not None:
            asked = self._with_tokens(asked)
        for message in asked.messages:
            _ = message.key  # computed here, and kept: of megabytes it takes long
        return asked

    def locate(self, asked: ChatRequest) -> ChatPosition:
        """Returns where a whole request belongs. Raises BadRequest where it ends with calls that the model made."""
        return self._kept.locate(asked)

    def _said(self, message: ChatMessage) -> ChatMessage:
        """Returns the answer that a message stands for, with what else the message has of it. Raises BadRequest where
        there is none.
        """
        if message.role != SAID:
            return message
        number = int(message.call_id)
        if number not in self._turns:
            raise BadRequest(f"an item of the input is of answer {number}, which is none of this session")
        said = self._kept.answer_of(number)
        own = {call.id: call for call in message.calls}
        calls = [own.pop(call.id, call) for call in said.calls]
        return replace(said, content=message.content or said.content, calls=(*calls, *own.values()))

    def _with_history(self, asked: ChatRequest) -> ChatRequest:
        """Puts the conversation up to an earlier response in front of the messages, behind their instructions."""
        number = number_of(asked.previous)
        if number not in self._turns:
            raise BadRequest(f"the request goes on from {asked.previous[:60]!r}, which is no answer of this session")
        own, new = asked.messages[: asked.is_instructed], asked.messages[asked.is_instructed :]
        *before, last = self._kept.history(number)
        if asked.is_thread:  # which inherits what it does not give anew
            if own and before and before[0].role == "system":
                del before[0]
            asked = replace(asked, tools=asked.tools or self._kept.tools_of(number), is_instructed=False)
        return replace(asked, messages=(*own, *before, *in_order_of_calls((last, *new))))

    def _with_tokens(self, asked: ChatRequest) -> ChatRequest:
        """Finds the turn whose tokens are the beginning of the request's, the longest of several."""
        ids = np.array(asked.ids, np.int32)
        parent = None
        read = 0
        digest = _digest()
        for length in sorted(self._by_tokens):
            if length > len(ids):
                break
            digest.update(ids[read:length])
            read = length
            parent = self._by_tokens[length].get(digest.digest(), parent)
        if parent is None:
            return replace(asked, messages=(_tokens(ids),))
        row = self._turns[parent].row
        new = ids[len(row.token_ids) :]
        if not len(new) and not row.truncated[0]:
            raise BadRequest("the prompt ends with what the model said: there is nothing to answer")
        tools = self._kept.tools_of(parent)
        return replace(asked, messages=(*self._kept.history(parent), _tokens(new)), tools=tools)

    def open(self, asked: ChatRequest, position: ChatPosition) -> int:
        """Reserves a place. Returns its number, which the answer will have."""
        return self._kept.open(asked, position)

    def drop(self, number: int) -> None:
        """Gives a place back, as if the request had not been made."""
        self._kept.drop(number)

    def add(self, number: int, said: ChatMessage, row: Samples, marks: Sequence[TurnCall]) -> None:
        """Adds the model's answer to a request."""
        self._kept.answer(number, said)
        self._turns[number] = self.last = SpokenTurn(row, list(marks))
        if row_images(row, 0):  # tokens do not tell which
            return
        of_length = self._by_tokens.setdefault(len(row.token_ids), {})
        digest = _digest(row.token_ids).digest()
        of_length[digest] = max(number, of_length.get(digest, 0))

    def acted(self, reason: str, seconds: float) -> None:
        """Records what the agent did after the turn that was answered last: one call, whose reason is the newest, also
        where a request that nobody waited for divides it.
        """
        if self.last is not None:
            self.last.acted = TurnCall(AGENT, reason, self.last.seconds + seconds)

    def row(self, most: int) -> "SpokenRow":
        """Returns all branches that fit as one row, as `numbers` has them."""
        ends, leaves = self._ends(most)
        known: set[int] = set()
        branches = []
        numbers: list[int] = []
        for end in ends:
            path = self._kept.path(end)
            shared = sum(number in known for number in path)
            known |= set(path)
            numbers += path[shared:]
            branches.append(Branch(self._turns[end].row, shared))
        calls, seconds = self._recorded(numbers)
        calls[-1] += [TurnCall(AGENT, "untrained")] * (len(leaves) - len(ends))
        return SpokenRow(_after(as_one_row(branches), seconds), numbers, calls)

    def numbers(self, most: int) -> set[int]:
        """Returns the numbers of the turns that are in the row of `row`.

        Together its branches have at most `most` tokens of one response. The last is taken, then the newest of the
        others; they stand in the order in which the agent left them. What is still to be answered is in none.
        """
        return set().union(*(self._kept.path(end) for end in self._ends(most)[0]))

    def last_row(self) -> "SpokenRow":
        """Returns the branch of the turn that was answered last."""
        number = next(number for number, turn in self._turns.items() if turn is self.last)
        path = self._kept.path(number)
        turns = [self._turns[each] for each in path]
        made = _after(with_turns(self.last.row), [turn.seconds for turn in turns])
        return SpokenRow(made, path, [turn.calls for turn in turns])

    def _ends(self, most: int) -> tuple[list[int], list[int]]:
        """Returns the ends of the branches that fit into a row, and of all."""
        self._kept.drop_unanswered()
        leaves = self._kept.all_leaves if self._keeps_all else self._kept.leaves
        *earlier, last = leaves
        ends = [last]
        length = int(self._turns[last].row.response_lengths[0])
        for end in reversed(earlier):
            in_front = int(self._turns[end].row.response_lengths[0]) + int(self._turns[ends[0]].row.prompt_lengths[0])
            if length + in_front <= most:
                length += in_front
                ends.insert(0, end)
        return ends, leaves

    def _recorded(self, numbers: Sequence[int]) -> tuple[list[list[TurnCall]], list[float]]:
        """Returns the calls, and the agent's seconds, of the turns of a row.

        Those of an answer that was passed over are of the one that stays instead, and of what has no room of the last
        turn. That such answers began a branch is left out.
        """
        own = set(numbers)
        kept = {} if self._keeps_all else self._kept.passed_over
        carried: dict[int, list[TurnCall]] = defaultdict(list)
        for number, turn in self._turns.items():
            if number in own:
                continue
            to = kept.get(number, number)
            carried[to if to in own else numbers[-1]] += [
                *(call for call in turn.calls if call.reason != "branch"),
                *([TurnCall(AGENT, "retry")] if number in kept else []),
            ]
        calls = [[*carried[number], *self._turns[number].calls] for number in numbers]
        seconds = [self._turns[number].seconds + sum(call.seconds for call in carried[number]) for number in numbers]
        return calls, seconds


def _tokens(ids: np.ndarray) -> ChatMessage:
    return ChatMessage(TOKENS, " ".join(map(str, ids.tolist())))


def _after(made: Samples, seconds: Sequence[float]) -> Samples:
    """Sets the seconds that the agent took after each turn."""
    return replace(made, turn_seconds=np.array(seconds, made.turn_seconds.dtype))
