"""Keeps the turns that the model said to one agent, with tokens and calls, and the branches that they form.

An example: the agent hears turn 1, then 2 behind it, goes back behind 1 and hears 3, and behind that 4.

    kept       1 - 2         branches    1 2         the earlier
                \\- 3 - 4                 1 3 4       the last, of which 1 is shared
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mrl.data.chat_api import ChatMessage, ChatRequest
from mrl.data.chat_turns import ChatPlace, KeptTurns
from mrl.data.samples import Samples, TurnCall
from mrl.schedule.branches import Branch


@dataclass
class SpokenTurn:
    """A turn that is kept."""

    row: Samples  # the branch up to and with this turn
    calls: list[list[TurnCall]] = field(default_factory=list)  # of all turns of the branch up to it
    seconds: float = 0.0  # time that the agent took after it


@dataclass(frozen=True)
class SpokenBranch:
    """A branch with the calls of its own turns."""

    branch: Branch
    calls: Sequence[Sequence[TurnCall]]
    seconds: float  # time that the agent took after its last turn


class SpokenTurns:
    """The turns of one session."""

    def __init__(self) -> None:
        self._kept = KeptTurns()
        self._turns: dict[int, SpokenTurn] = {}

    @property
    def said(self) -> int:
        """Number of turns so far, replaced ones included. It is also the number of the newest turn."""
        return self._kept.said

    @property
    def newest(self) -> SpokenTurn:
        """The turn that was said last."""
        return self._turns[self.said]

    def __getitem__(self, number: int) -> SpokenTurn:
        return self._turns[number]

    def place(self, asked: ChatRequest) -> ChatPlace:
        """Returns where a request belongs. Raises BadRequest where it has nothing new to answer."""
        return self._kept.place(asked)

    def add(self, asked: ChatRequest, place: ChatPlace, said: ChatMessage, row: Samples) -> None:
        """Adds the model's answer to a request. A turn that it replaces is removed."""
        self._kept = self._kept.with_turn(asked, place, said)
        self._turns.pop(place.replaced, None)
        self._turns[self.said] = SpokenTurn(row)

    def branches(self, most: int) -> tuple[list[SpokenBranch], int]:
        """Returns the last branch and the earlier ones that fit, and how many do not fit.

        Together they have at most `most` tokens of one response. The newest are taken first. They are returned in the
        order in which the agent left them.
        """
        *earlier, last = self._kept.leaves
        ends = [last]
        taken = int(self._turns[last].row.response_lengths[0])
        for end in reversed(earlier):
            in_front = int(self._turns[end].row.response_lengths[0]) + int(self._turns[ends[0]].row.prompt_lengths[0])
            if taken + in_front <= most:
                taken += in_front
                ends.insert(0, end)
        return self._as_branches(ends), len(earlier) + 1 - len(ends)

    def _as_branches(self, ends: Sequence[int]) -> list[SpokenBranch]:
        known: set[int] = set()
        found = []
        for end in ends:
            path = self._kept.path(end)
            shared = sum(number in known for number in path)
            known |= set(path)
            turn = self._turns[end]
            found.append(SpokenBranch(Branch(turn.row, shared), turn.calls[shared:], turn.seconds))
        return found
