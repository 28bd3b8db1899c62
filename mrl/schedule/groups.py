"""One group of responses, and the count of groups that were not trained on.

    RESERVED ---- start ----> RUNNING ---- finish ----> FINISHED ---- take ----> trained on
       ^                         |                         |
       +------- requeue ---------+-------------------------+---- evict ----> dropped, counted by its cause

A reserved group has no tokens, unless it comes from a checkpoint. Then it continues after its tokens.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

Cause = Literal["stale", "failed", "filtered", "quarantined", "surplus"]


class State(StrEnum):
    """The progress of a live group."""

    RESERVED = "reserved"
    RUNNING = "running"
    FINISHED = "finished"  # all responses and their rewards have arrived


@dataclass
class Group:
    """The known facts about a group, without its tokens."""

    number: int  # of its prompt, in the order of the data
    lengths: list[int]  # current number of tokens of each response
    ended: list[bool]  # for each response: it is complete
    prompt_tokens: int = 0
    begun: int | None = None  # version of its oldest token; None before there is one
    state: State = State.RESERVED
    attempts: int = 0  # how often it began again because its tokens were stale

    @classmethod
    def new(cls, number: int, responses: int, begun: int | None = None) -> "Group":
        """Makes a group without tokens."""
        return cls(number, [0] * responses, [False] * responses, begun=begun)

    def anew(self) -> "Group":
        """Returns a new group of the same prompt, without the former tokens."""
        fresh = Group.new(self.number, len(self.lengths))
        return replace(fresh, prompt_tokens=self.prompt_tokens, attempts=self.attempts + 1)

    @property
    def is_whole(self) -> bool:
        """Tells whether all responses have ended."""
        return all(self.ended)

    @property
    def tokens(self) -> int:
        """Tokens of all responses so far."""
        return sum(self.lengths)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data, which `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Group":
        """Reads what `to_json` made."""
        return cls(**{**data, "state": State(data["state"])})


@dataclass
class Tally:
    """Counts groups, responses and tokens."""

    groups: int = 0
    responses: int = 0
    tokens: int = 0

    def add(self, group: Group) -> None:
        """Adds a group. Responses without tokens are not counted."""
        self.groups += 1
        self.responses += sum(length > 0 for length in group.lengths)
        self.tokens += group.tokens

    @property
    def mean_length(self) -> float:
        """Mean tokens of a response; 0 without responses."""
        if self.responses:
            return self.tokens / self.responses
        return 0.0


@dataclass
class Counts:
    """Groups that were trained on since the run began, and groups that were not. Groups that begin again lose their
    tokens.
    """

    kept: Tally = field(default_factory=Tally)
    dropped: dict[Cause, Tally] = field(default_factory=dict)  # by cause
    requeued: Tally = field(default_factory=Tally)

    def drop(self, group: Group, cause: Cause) -> None:
        """Counts a group that is not trained on."""
        self.dropped.setdefault(cause, Tally()).add(group)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data, which `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Counts":
        """Reads what `to_json` made."""
        dropped = {cause: Tally(**tally) for cause, tally in data["dropped"].items()}
        return cls(Tally(**data["kept"]), dropped, Tally(**data["requeued"]))
