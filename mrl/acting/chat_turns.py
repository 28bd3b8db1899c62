"""Finds where a client's request belongs in a kept conversation: it extends a turn, retries one, or branches.

A client sends the whole conversation as it sees it. Messages that the kept turns hold already are found by their
content (ChatMessage.key). The rest is new, and only that becomes tokens. An example, with u for a user's message, a for
an answer of the model, t for a tool's:

    kept turns                    a request              where it belongs
    1: u1 -> a1                   u1 a1 t2               EXTENDS 1: t2 is new
    2: t2 -> a2, behind 1         u1 a1 t2               RETRIES 2: its answer is replaced
                                  u1 a1 t2 a2 t3         EXTENDS 2
                                  u1 a1 t2'              BRANCHES from 1: "edited"
                                  u1 a1' t2              BRANCHES from the beginning: "forged", the model said a1
                                  u9                     BRANCHES from the beginning: "other"

A turn that others follow is not replaced: a request that asks it again branches ("asked again"). The objects are
immutable. They know turns by number only; their tokens are kept elsewhere.
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
    ASKED_AGAIN = "asked again"  # the same request, but the conversation has gone on behind it
    OTHER = "other"  # another conversation


@dataclass(frozen=True)
class KeptTurn:
    """One turn: the messages since the turn before, and the model's answer to them."""

    number: int
    parent: int | None  # None: it begins with the prompt
    tools: tuple[Mapping[str, Any], ...]
    messages: tuple[ChatMessage, ...]
    said: ChatMessage


@dataclass(frozen=True)
class ChatPlace:
    """The place of a request in the kept conversation."""

    move: Move
    parent: int | None  # the turn that it continues; None: it begins with a prompt of its own
    messages: tuple[ChatMessage, ...]  # new messages behind that turn
    why: Why | None = None  # reason of a branch
    replaced: int | None = None  # the turn that a retry asks again


@dataclass(frozen=True)
class KeptTurns:
    """The turns of one session, in the order in which they were said."""

    turns: tuple[KeptTurn, ...] = ()
    said: int = 0  # turns so far, replaced ones included; the next turn gets the next number

    def place(self, asked: ChatRequest) -> ChatPlace:
        """Finds where a request belongs. Raises BadRequest where it has nothing new to answer."""
        parent, known = self._deepest(asked, None, 0)
        new = asked.messages[known:]
        if not new:
            raise BadRequest("the conversation ends with what the model said: there is nothing to answer")
        if not self.turns:
            return ChatPlace(Move.BEGINS, None, new)
        same = [turn for turn in self._behind(parent, asked) if _keys(turn.messages) == _keys(new)]
        leaves = [turn for turn in same if not self._has_children(turn.number)]
        if leaves:
            return ChatPlace(Move.RETRIES, parent, new, replaced=leaves[-1].number)
        if same:
            return ChatPlace(Move.BRANCHES, parent, new, Why.ASKED_AGAIN)
        if parent is not None and not self._has_children(parent):
            return ChatPlace(Move.EXTENDS, parent, new)
        return ChatPlace(Move.BRANCHES, parent, new, self._why(asked, parent, known))

    def with_turn(self, asked: ChatRequest, place: ChatPlace, said: ChatMessage) -> "KeptTurns":
        """Returns the turns with the model's answer to a request added, and without the turn that it replaces."""
        turn = KeptTurn(self.said + 1, place.parent, asked.tools, place.messages, said)
        kept = tuple(each for each in self.turns if each.number != place.replaced)
        return replace(self, turns=(*kept, turn), said=turn.number)

    @property
    def leaves(self) -> list[int]:
        """Numbers of the turns that nothing follows, in order: the ends of all branches."""
        return [turn.number for turn in self.turns if not self._has_children(turn.number)]

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

    def _has_children(self, number: int) -> bool:
        return any(turn.parent == number for turn in self.turns)

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
