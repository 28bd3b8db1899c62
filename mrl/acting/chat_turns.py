"""Finds where a client's request belongs in a kept conversation: it extends a turn, retries one, or branches.

A client sends the whole conversation as it sees it. Messages that the kept turns hold already are found by their
content (ChatMessage.key). The rest is new, and only that becomes tokens. An example, with u for a user's message, a for
an answer of the model, t for a tool's:

    kept turns                    a request              where it belongs
    1: u1 -> a1                   u1 a1 t2               EXTENDS 1: t2 is new
    2: t2 -> a2, behind 1         u1 a1 t2               RETRIES: another answer to the same, a sibling of 2
                                  u1 a1 t2 a2 t3         EXTENDS 2
                                  u1 a1 t2 a2            EXTENDS 2 without a message: the model is to say more
                                  u1 a1 t2'              BRANCHES from 1: "edited"
                                  u1 a1' t2              BRANCHES from the beginning: "forged", the model said a1
                                  u9                     BRANCHES from the beginning: "other"

All answers of one question are kept until the session ends, because a client may take any of them. What the
conversation goes on from decides: at the end an answer that nothing follows is passed over where another of the same
question is newer, or has been gone on from since. Where an answer of the question has been gone on from already,
another one begins a branch ("asked again"). A request that is still being answered has its position and its number
already, so two equal ones at once are siblings. Turns are known by number only; their tokens are kept elsewhere.

Locating a request takes a time that grows with the request, and not with the number of turns. Each beginning of a
conversation has a number, its node: tools lead from node 0 to a node, and each message to the next. Turns and questions
are found by the node at which they end.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from mrl.acting.chat_api import BadRequest, ChatMessage, ChatRequest, answer_of_call, plain


class Move(StrEnum):
    """The effect of a request on the conversation."""

    BEGINS = "begins"
    EXTENDS = "extends"
    RETRIES = "retry"
    BRANCHES = "branch"


class Why(StrEnum):
    """The reason why a request does not extend the turn before."""

    EDITED = "edited"  # a message of the client has changed, or is gone
    FORGED = "forged"  # a message of the model is not what it said
    TOOLS = "tools"  # the tools have changed, and they are part of the prompt
    ASKED_AGAIN = "asked again"  # another answer of a question, and the conversation has gone on from one before
    OTHER = "other"  # another conversation


@dataclass(frozen=True)
class KeptTurn:
    """One turn: the messages since the turn before, and the model's answer to them."""

    number: int
    parent: int | None  # None: it begins with the prompt
    tools: tuple[Mapping[str, Any], ...]
    messages: tuple[ChatMessage, ...]
    said: ChatMessage | None  # None: it is still being sampled
    question: int  # number of the first turn that answers the same messages behind the same turn
    again: int = 0  # how often that question had been asked before
    is_instructed: bool = False  # its first message is the instructions of a request in the form of Responses
    node: int = 0  # behind its messages


@dataclass(frozen=True)
class ChatPosition:
    """The position of a request in the kept conversation."""

    move: Move
    parent: int | None  # the turn that it continues; None: it begins with a prompt of its own
    messages: tuple[ChatMessage, ...]  # new messages behind that turn; none: the model is to say more
    why: Why | None = None  # reason of a branch
    question: int | None = None  # that it asks again
    again: int = 0  # how often that question has been asked before


@dataclass
class _Question:
    """What became of the messages that were asked behind one turn."""

    answers: list[int] = field(default_factory=list)  # numbers of the turns that answer them, in order
    behind: list[int] = field(default_factory=list)  # numbers of the turns that follow one of these, in order


class KeptTurns:
    """The turns of one session, in the order in which they were asked for."""

    def __init__(self) -> None:
        self.asked = 0  # requests so far; the next turn gets the next number
        self._turns: dict[int, KeptTurn] = {}
        self._nodes: dict[tuple[int, Any], int] = {}  # (node, what follows it) -> node
        self._uses: Counter[int] = Counter()  # node -> how many turns pass it
        self._newest_node = 0
        # (node, key of an answer without its text) -> number of the turn -> node behind the answer
        self._bare: dict[tuple[int, Any], dict[int, int]] = {}
        self._said: dict[int, int] = {}  # node behind an answer -> the newest turn that ends there
        self._questions: dict[tuple[int | None, int], _Question] = {}  # (parent, node behind the messages) -> question
        self._following: Counter[int] = Counter()  # turn -> how many follow it
        self._first_tools: Counter[int] = Counter()  # node behind tools -> how many turns without a parent have them
        self._first_messages: Counter[Any] = Counter()  # key of a message -> how many of these begin with it

    @property
    def turns(self) -> list[KeptTurn]:
        """All turns, in order."""
        return list(self._turns.values())

    def locate(self, asked: ChatRequest) -> ChatPosition:
        """Finds where a request belongs. Raises BadRequest where it ends with calls that the model made."""
        first, nodes = self._known(asked)
        parent, known = self._deepest(nodes)
        new = asked.messages[known:]
        if not new and asked.messages[-1].calls:
            raise BadRequest("the conversation ends with calls of the model, and nothing answers them")
        if not self._turns:
            return ChatPosition(Move.BEGINS, None, new)
        same = None
        if len(nodes) == len(asked.messages):
            same = self._questions.get((parent, nodes[-1]))
        if same is not None:
            question = self._turns[same.answers[0]].question
            again = 1 + self._turns[same.answers[-1]].again
            position = ChatPosition(Move.RETRIES, parent, new, question=question, again=again)
            if same.behind:
                return replace(position, move=Move.BRANCHES, why=Why.ASKED_AGAIN)
            return position
        if parent is not None and not self._following[parent]:
            if self._is_late(parent):
                return ChatPosition(Move.BRANCHES, parent, new, Why.ASKED_AGAIN)
            return ChatPosition(Move.EXTENDS, parent, new)
        return ChatPosition(Move.BRANCHES, parent, new, self._why(parent, new, first, nodes[known:]))

    def open(self, asked: ChatRequest, position: ChatPosition) -> int:
        """Adds the turn of a request, which is still to be answered. Returns its number."""
        self.asked = number = self.asked + 1
        question = position.question or number
        if position.parent is None:
            node = self._node(0, _tools_key(asked))
            self._first_tools[node] += 1
            self._first_messages[position.messages[0].key] += 1
        else:
            before = self._turns[position.parent]
            node = self._node(before.node, before.said.key)
            self._following[position.parent] += 1
            self._question(before).behind.append(number)
        for message in position.messages:
            node = self._node(node, message.key)
            self._uses[node] += 1
        turn = KeptTurn(
            number,
            position.parent,
            asked.tools,
            position.messages,
            None,
            question,
            position.again,
            asked.is_instructed,
            node,
        )
        self._turns[number] = turn
        self._questions.setdefault((position.parent, node), _Question()).answers.append(number)
        return number

    def answer(self, number: int, said: ChatMessage) -> None:
        """Adds the model's answer to request `number`."""
        turn = replace(self._turns[number], said=said)
        self._turns[number] = turn
        node = self._node(turn.node, said.key)
        self._uses[node] += 1
        self._said[node] = max(number, self._said.get(node, 0))
        if said.calls:
            self._bare.setdefault((turn.node, replace(said, content="").key), {})[number] = node

    def drop(self, number: int) -> None:
        """Takes back request `number`, which has no answer, as if it had not been made."""
        turn = self._turns.pop(number, None)
        if turn is None:
            return
        if turn.parent is None:
            node = self._node(0, _tools_key(turn))
            self._forget(node, turn.messages)
            if _fewer(self._first_tools, node):
                del self._nodes[0, _tools_key(turn)]
            _fewer(self._first_messages, turn.messages[0].key)
        else:
            before = self._turns[turn.parent]
            self._following[turn.parent] -= 1
            self._question(before).behind.remove(number)
            self._forget(self._node(before.node, before.said.key), turn.messages)
        question = self._question(turn)
        question.answers.remove(number)
        if not question.answers:
            del self._questions[turn.parent, turn.node]

    def drop_unanswered(self) -> None:
        """Takes back all requests that have no answer."""
        for turn in self.turns:
            if turn.said is None:
                self.drop(turn.number)

    def history(self, number: int) -> tuple[ChatMessage, ...]:
        """Returns the conversation up to and with turn `number`, without instructions."""
        first, *later = (self._turns[each] for each in self.path(number))
        begin = first.messages[first.is_instructed :]
        return (*begin, first.said, *(message for turn in later for message in (*turn.messages, turn.said)))

    def answer_of(self, number: int) -> ChatMessage:
        """Returns what the model said in turn `number`."""
        return self._turns[number].said

    def tools_of(self, number: int) -> tuple[Mapping[str, Any], ...]:
        """Returns the tools of turn `number`."""
        return self._turns[number].tools

    @property
    def leaves(self) -> list[int]:
        """Numbers of the turns that nothing follows and that are not passed over, in order: the ends of all branches.

        The newest turn is the last of them.
        """
        passed_over = self.passed_over
        return [number for number in self.all_leaves if number not in passed_over]

    @property
    def all_leaves(self) -> list[int]:
        """Numbers of the turns that nothing follows, in order."""
        return [number for number in self._turns if not self._following[number]]

    @property
    def passed_over(self) -> dict[int, int]:
        """Turns that nothing follows, by number, where another answer of their question is newer or has been gone on
        from since; each with the newest such answer that is not passed over itself.
        """
        newest = {turn.number: turn.number for turn in self.turns}  # of each turn and all behind it
        for turn in reversed(self.turns):  # a turn has a smaller number than those behind it
            if turn.parent is not None:
                newest[turn.parent] = max(newest[turn.parent], newest[turn.number])
        of_question: dict[int, int] = {}
        for turn in self.turns:
            of_question[turn.question] = max(newest[turn.number], of_question.get(turn.question, 0))
        passed = {
            turn.number
            for turn in self.turns
            if newest[turn.number] == turn.number < of_question[turn.question]  # nothing follows it
        }
        kept = {turn.question: turn.number for turn in self.turns if turn.number not in passed}
        return {turn.number: kept[turn.question] for turn in self.turns if turn.number in passed}

    def path(self, number: int) -> list[int]:
        """Returns the numbers of the turns from the beginning to turn `number`, itself included."""
        path = []
        at: int | None = number
        while at is not None:
            path.append(at)
            at = self._turns[at].parent
        return path[::-1]

    def _node(self, before: int, what: Any) -> int:
        """Returns the node to which `what` leads from another one; a new one where nothing has led there yet."""
        node = self._nodes.get((before, what))
        if node is None:
            self._newest_node = node = self._newest_node + 1
            self._nodes[before, what] = node
        return node

    def _forget(self, before: int, messages: Sequence[ChatMessage]) -> None:
        """Removes the nodes of messages behind a node that no turn passes any more: they hold what was said."""
        for message in messages:
            node = self._nodes[before, message.key]
            self._uses[node] -= 1
            if not self._uses[node]:
                del self._nodes[before, message.key], self._uses[node]
            before = node

    def _known(self, asked: ChatRequest) -> tuple[int | None, list[int]]:
        """Returns the node behind the request's tools, and those behind its messages as far as there are any."""
        first = self._nodes.get((0, _tools_key(asked)))
        nodes: list[int] = []
        at = first
        for message in asked.messages:
            at = self._nodes.get((at, message.key)) or self._without_text(at, message)
            if at is None:
                break
            nodes.append(at)
        return first, nodes

    def _without_text(self, at: int | None, message: ChatMessage) -> int | None:
        """Returns the node behind the answer of which a client keeps nothing but its calls: the one that their ids
        name, or the newest.
        """
        nodes = self._bare.get((at, message.key))
        if not nodes:
            return None
        return nodes.get(next(filter(None, (answer_of_call(call.id) for call in message.calls)), 0), nodes[max(nodes)])

    def _deepest(self, nodes: Sequence[int]) -> tuple[int | None, int]:
        """Finds the deepest turn whose messages all stand in the request; the newest of several.

        Returns it with the number of messages of the request up to there.
        """
        for known in range(len(nodes), 0, -1):
            if nodes[known - 1] in self._said:
                return self._said[nodes[known - 1]], known
        return None, 0

    def _question(self, turn: KeptTurn) -> _Question:
        return self._questions[turn.parent, turn.node]

    def _is_late(self, number: int) -> bool:
        """Tells whether another answer of a turn's question has been gone on from since the turn was said."""
        behind = self._question(self._turns[number]).behind
        return bool(behind) and behind[0] > number

    def _why(self, parent: int | None, new: Sequence[ChatMessage], first: int | None, nodes: Sequence[int]) -> Why:
        """Returns why new messages begin a branch. `first`: node behind the tools; `nodes`: behind the new messages."""
        if parent is None and not self._first_tools[first]:
            return Why.TOOLS
        # Another answer than the model's follows the messages of a turn: the model's own would have been found.
        for node, follows in zip(nodes, new[1:], strict=False):
            if follows.role == "assistant" and (parent, node) in self._questions:
                return Why.FORGED
        if parent is None and not self._first_messages[new[0].key]:
            return Why.OTHER
        return Why.EDITED


def _fewer(counts: Counter[Any], key: Any) -> bool:
    """Counts one less. Returns whether that was the last, which is then forgotten."""
    counts[key] -= 1
    if counts[key]:
        return False
    del counts[key]
    return True


def _tools_key(of: ChatRequest | KeptTurn) -> str:
    """Equal for equal tools."""
    return json.dumps(plain(list(of.tools)), sort_keys=True)
