"""Where in a conversation that is kept a client's request belongs: it goes on from a turn, asks one again, or branches.

A client sends the whole conversation as it sees it. What of it the model said, or was told before, is found among the
turns that are kept, by what the messages say (ChatMessage.key); the rest is new, and that alone becomes tokens. An
example, u for a user's message, a for an answer of the model, t for a tool's:

    kept turns                    a request              where it belongs
    1: u1 -> a1                   u1 a1 t2               EXTENDS 1: t2 is new
    2: t2 -> a2, behind 1         u1 a1 t2               RETRIES 2: what it said is replaced
                                  u1 a1 t2 a2 t3         EXTENDS 2
                                  u1 a1 t2'              BRANCHES from 1: "edited"
                                  u1 a1' t2              BRANCHES from the beginning: "forged", the model said a1
                                  u9                     BRANCHES from the beginning: "other"

A turn with others behind it is not replaced: who asks it again branches ("asked again"). Immutable: numbers of turns,
whose tokens somebody else keeps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from mrl.data.chat_api import BadRequest, ChatMessage, ChatRequest


class Move(StrEnum):
    """What a request does to the conversation."""

    BEGINS = "begins"
    EXTENDS = "extends"
    RETRIES = "retry"
    BRANCHES = "branch"


class Why(StrEnum):
    """Why a request does not go on from the turn before."""

    EDITED = "edited"  # a message of the client's is another than before, or is gone
    FORGED = "forged"  # a message of the model's is another than it said
    TOOLS = "tools"  # other tools, which stand in the prompt
    ASKED_AGAIN = "asked again"  # the same, behind which the conversation has gone on
    OTHER = "other"  # another conversation


@dataclass(frozen=True)
class KeptTurn:
    """What the model was told since the turn before, and what it said to it."""

    number: int
    parent: int | None  # None: it begins with the prompt
    tools: tuple[Mapping[str, Any], ...]
    messages: tuple[ChatMessage, ...]
    said: ChatMessage


@dataclass(frozen=True)
class ChatPlace:
    """Where a request belongs."""

    move: Move
    parent: int | None  # the turn that it goes on from; None: it begins with a prompt of its own
    messages: tuple[ChatMessage, ...]  # that are new behind it
    why: Why | None = None  # of a branch
    replaced: int | None = None  # the turn that a retry asks again


@dataclass(frozen=True)
class KeptTurns:
    """The turns of one session, in the order in which they were said."""

    turns: tuple[KeptTurn, ...] = ()
    said: int = 0  # turns so far, replaced ones too: the next has the number after

    def place(self, asked: ChatRequest) -> ChatPlace:
        """Where a request belongs. Raises BadRequest where it has nothing new to answer."""
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
        """With what the model said to a request; a turn that it replaces is gone."""
        turn = KeptTurn(self.said + 1, place.parent, asked.tools, place.messages, said)
        kept = tuple(each for each in self.turns if each.number != place.replaced)
        return replace(self, turns=(*kept, turn), said=turn.number)

    @property
    def leaves(self) -> list[int]:
        """Numbers of the turns that nothing follows, in order: the ends of all branches."""
        return [turn.number for turn in self.turns if not self._has_children(turn.number)]

    def path(self, number: int) -> list[int]:
        """Numbers of the turns that lead to one from the beginning, itself included."""
        parents = {turn.number: turn.parent for turn in self.turns}
        path = []
        at: int | None = number
        while at is not None:
            path.insert(0, at)
            at = parents[at]
        return path

    def _deepest(self, asked: ChatRequest, parent: int | None, known: int) -> tuple[int | None, int]:
        """The last turn that the request has whole, by the longest way, then the newest; and how many messages it has
        up to there.
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
        """Turns that follow another one, with the request's tools."""
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
    """Whether an answer follows what the model was told: another than it gave, or it would have been found."""
    return new[: len(told)] == told and new[len(told)][0] == "assistant"


def _keys(messages: Sequence[ChatMessage]) -> list[tuple[Any, ...]]:
    return [message.key for message in messages]
