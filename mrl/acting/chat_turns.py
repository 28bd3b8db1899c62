"""Finds where a client's request belongs in a kept conversation: it extends a turn, retries one, or branches.

A client sends the whole conversation as it sees it. Messages that the kept turns hold already are found by their
content (ChatMessage.key). The rest is new, and only that becomes tokens. An example, with u for a user's message, a for
an answer of the model, t for a tool's:

    kept turns                    a request              where it belongs
    1: u1 -> a1                   u1 a1 t2               EXTENDS 1: t2 is new
    2: t2 -> a2, behind 1         u1 a1 t2               RETRIES: another answer to the same, a sibling of 2
                                  u1 a1 t2 a2 t3         EXTENDS 2
                                  u1 a1 t2'              BRANCHES from 1: "edited"
                                  u1 a1' t2              BRANCHES from the beginning: "forged", the model said a1
                                  u9                     BRANCHES from the beginning: "other"

All answers of one question are kept until the session ends, because a client may take any of them. What the
conversation goes on from decides: at the end an answer that nothing follows is passed over where another of the same
question is newer, or has been gone on from since. Where an answer of the question has been gone on from already,
another one begins a branch ("asked again"). A request that is still being answered has its place and its number
already, so two equal ones at once are siblings. The objects are immutable. They know turns by number only; their tokens
are kept elsewhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from mrl.acting.chat_api import BadRequest, ChatMessage, ChatRequest


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


@dataclass(frozen=True)
class ChatPlace:
    """The place of a request in the kept conversation."""

    move: Move
    parent: int | None  # the turn that it continues; None: it begins with a prompt of its own
    messages: tuple[ChatMessage, ...]  # new messages behind that turn
    why: Why | None = None  # reason of a branch
    question: int | None = None  # that it asks again
    again: int = 0  # how often that question has been asked before


@dataclass(frozen=True)
class KeptTurns:
    """The turns of one session, in the order in which they were asked for."""

    turns: tuple[KeptTurn, ...] = ()
    asked: int = 0  # requests so far; the next turn gets the next number

    def place(self, asked: ChatRequest) -> ChatPlace:
        """Finds where a request belongs. Raises BadRequest where it has nothing new to answer."""
        parent, known = self._deepest(asked, None, 0)
        new = asked.messages[known:]
        if not new:
            raise BadRequest("the conversation ends with what the model said: there is nothing to answer")
        if not self.turns:
            return ChatPlace(Move.BEGINS, None, new)
        followed = self._followed
        keys = _keys(new)
        same = [turn for turn in self._behind(parent, asked) if _keys(turn.messages) == keys]
        if same:
            again = 1 + max(turn.again for turn in same)
            place = ChatPlace(Move.RETRIES, parent, new, question=same[0].question, again=again)
            if any(turn.number in followed for turn in same):
                return replace(place, move=Move.BRANCHES, why=Why.ASKED_AGAIN)
            return place
        if parent is not None and parent not in followed:
            if self._is_late(parent):
                return ChatPlace(Move.BRANCHES, parent, new, Why.ASKED_AGAIN)
            return ChatPlace(Move.EXTENDS, parent, new)
        return ChatPlace(Move.BRANCHES, parent, new, self._why(asked, parent, known))

    def opened(self, asked: ChatRequest, place: ChatPlace) -> "KeptTurns":
        """Returns the turns with that of a request added, which is still to be answered. Its number is `asked`."""
        number = self.asked + 1
        question = place.question or number
        turn = KeptTurn(
            number, place.parent, asked.tools, place.messages, None, question, place.again, asked.is_instructed
        )
        return replace(self, turns=(*self.turns, turn), asked=number)

    def answered(self, number: int, said: ChatMessage) -> "KeptTurns":
        """Returns the turns with the model's answer to request `number`."""
        turns = (replace(turn, said=said) if turn.number == number else turn for turn in self.turns)
        return replace(self, turns=tuple(turns))

    def without(self, number: int) -> "KeptTurns":
        """Returns the turns as if request `number` had not been asked."""
        return replace(self, turns=tuple(turn for turn in self.turns if turn.number != number))

    @property
    def all_answered(self) -> "KeptTurns":
        """The turns without those that are still to be answered."""
        return replace(self, turns=tuple(turn for turn in self.turns if turn.said is not None))

    def history(self, number: int) -> tuple[ChatMessage, ...]:
        """Returns the conversation up to and with turn `number`, without instructions."""
        turns = {turn.number: turn for turn in self.turns}
        first, *later = (turns[each] for each in self.path(number))
        begin = first.messages[first.is_instructed :]
        return (*begin, first.said, *(message for turn in later for message in (*turn.messages, turn.said)))

    def tools_of(self, number: int) -> tuple[Mapping[str, Any], ...]:
        """Returns the tools of turn `number`."""
        return next(turn.tools for turn in self.turns if turn.number == number)

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
        followed = self._followed
        return [turn.number for turn in self.turns if turn.number not in followed]

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
        stays = {turn.question: turn.number for turn in self.turns if turn.number not in passed}
        return {turn.number: stays[turn.question] for turn in self.turns if turn.number in passed}

    def path(self, number: int) -> list[int]:
        """Returns the numbers of the turns from the beginning to turn `number`, itself included."""
        parents = {turn.number: turn.parent for turn in self.turns}
        path = []
        at: int | None = number
        while at is not None:
            path.insert(0, at)
            at = parents[at]
        return path

    def _deepest(self, asked: ChatRequest, parent: int | None, known: int) -> tuple[int | None, int]:
        """Finds the deepest turn whose messages all stand in the request; the newest of several.

        Returns it with the number of messages of the request up to there.
        """
        found = (parent, known)
        for turn in self._behind(parent, asked):
            if turn.said is None:
                continue
            whole = (*turn.messages, turn.said)
            end = known + len(whole)
            if _keys(asked.messages[known:end]) != _keys(whole):
                continue
            deeper = self._deepest(asked, turn.number, end)
            if deeper[1] >= found[1]:
                found = deeper
        return found

    def _behind(self, parent: int | None, asked: ChatRequest) -> list[KeptTurn]:
        """Returns the turns that follow another one and have the tools of the request."""
        return [turn for turn in self.turns if turn.parent == parent and turn.tools == asked.tools]

    def _is_late(self, number: int) -> bool:
        """Tells whether another answer of a turn's question has been gone on from since the turn was said."""
        questions = {turn.number: turn.question for turn in self.turns}
        first_behind: dict[int, int] = {}
        for turn in self.turns:
            if turn.parent is not None and questions[turn.parent] == questions[number]:
                first_behind.setdefault(turn.parent, turn.number)
        return bool(first_behind) and min(first_behind.values()) > number

    @property
    def _followed(self) -> set[int | None]:
        """Numbers of the turns that others follow."""
        return {turn.parent for turn in self.turns}

    def _why(self, asked: ChatRequest, parent: int | None, known: int) -> Why:
        new = _keys(asked.messages[known:])
        siblings = [turn for turn in self.turns if turn.parent == parent]
        told = [_keys(turn.messages) for turn in self._behind(parent, asked)]
        if not told:
            return Why.TOOLS
        if any(_says_another(new, before) for before in told):
            return Why.FORGED
        if parent is None and all(turn.messages[0].key != new[0] for turn in siblings):
            return Why.OTHER
        return Why.EDITED


def _says_another(new: Sequence[tuple[Any, ...]], told: Sequence[tuple[Any, ...]]) -> bool:
    """Returns whether another answer than the model's follows the messages of a turn. The model's own would have been
    found.
    """
    return new[: len(told)] == told and new[len(told)][0] == "assistant"


def _keys(messages: Sequence[ChatMessage]) -> list[tuple[Any, ...]]:
    return [message.key for message in messages]
