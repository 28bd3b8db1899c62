"""One group of responses on its way, and the count of those that nobody was trained on.

    RESERVED ---- start ----> RUNNING ---- finish ----> FINISHED ---- take ----> trained on
       ^                         |                         |
       +------- requeue ---------+-------------------------+---- evict ----> dropped, counted by its cause

A reserved group has no token yet, unless it comes from a checkpoint; then it goes on from what it has.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

Cause = Literal["stale", "failed", "filtered", "quarantined", "surplus"]


class State(StrEnum):
    """How far a group that exists has come."""

    RESERVED = "reserved"
    RUNNING = "running"
    FINISHED = "finished"  # all responses are there, and their rewards


@dataclass
class Group:
    """What is known of a group beside its tokens, which are elsewhere."""

    number: int  # of its prompt, in the order of the data
    lengths: list[int]  # tokens so far of each response
    ended: list[bool]  # of each response: nothing comes any more
    prompt_tokens: int = 0
    begun: int | None = None  # version of its oldest token; None before there is one
    state: State = State.RESERVED
    attempts: int = 0  # times it was begun anew, because its tokens were stale

    @classmethod
    def new(cls, number: int, responses: int, begun: int | None = None) -> "Group":
        """Makes a group without tokens."""
        return cls(number, [0] * responses, [False] * responses, begun=begun)

    def anew(self) -> "Group":
        """A new group of the same prompt, without what was made of this one."""
        fresh = Group.new(self.number, len(self.lengths))
        return replace(fresh, prompt_tokens=self.prompt_tokens, attempts=self.attempts + 1)

    @property
    def is_whole(self) -> bool:
        """Whether all responses have ended."""
        return all(self.ended)

    @property
    def tokens(self) -> int:
        """Tokens of all responses so far."""
        return sum(self.lengths)

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Group":
        """The group that `to_json` wrote."""
        known = {name: value for name, value in data.items() if name != "losses"}  # older ones count engines
        return cls(**{**known, "state": State(data["state"])})


@dataclass
class Tally:
    """Groups with their responses and tokens."""

    groups: int = 0
    responses: int = 0
    tokens: int = 0

    def add(self, group: Group) -> None:
        """Counts one more; responses that have no token yet are none."""
        self.groups += 1
        self.responses += sum(length > 0 for length in group.lengths)
        self.tokens += group.tokens

    @property
    def mean_length(self) -> float:
        """Tokens of a response; 0 without one."""
        if self.responses:
            return self.tokens / self.responses
        return 0.0


@dataclass
class Counts:
    """What was trained on since the run began, beside what was not. Groups that begin anew lose what they had."""

    kept: Tally = field(default_factory=Tally)
    dropped: dict[Cause, Tally] = field(default_factory=dict)  # by cause
    requeued: Tally = field(default_factory=Tally)

    def drop(self, group: Group, cause: Cause) -> None:
        """Counts a group that nobody is trained on."""
        self.dropped.setdefault(cause, Tally()).add(group)

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Counts":
        """The counts that `to_json` wrote."""
        dropped = {cause: Tally(**tally) for cause, tally in data["dropped"].items()}
        return cls(Tally(**data["kept"]), dropped, Tally(**data["requeued"]))
