"""Batches of prompts that a synchronous step needs, where groups that teach nothing are dropped (dynamic sampling).

A batch is drawn as soon as those before it cannot fill the step, whatever the rewards that are still to come: which are
drawn follows from all rewards together, and not from the order in which they come.

An example, a step of 4 groups: the first 4 are under way; the first reward says that a group teaches nothing; 3 at most
will be left, and the next 4 are drawn while the rewards of those 3 are awaited.
"""

from dataclasses import dataclass


@dataclass
class Draws:
    """Of one step."""

    wanted: int  # groups to train on
    limit: float = float("inf")  # batches at most
    made: int = 0
    trainable: int = 0  # groups
    unjudged: int = 0

    @property
    def lacks_groups(self) -> bool:
        """Whether another batch is to be drawn now."""
        return self.trainable + self.unjudged < self.wanted and self.made < self.limit

    @property
    def is_over(self) -> bool:
        """Whether everything that was drawn is judged, and it is enough, or all that may be."""
        return not self.unjudged and not self.lacks_groups

    def drawn(self, groups: int) -> None:
        """Another batch, of so many groups."""
        self.made += 1
        self.unjudged += groups

    def judged(self, is_trainable: bool) -> None:
        """The rewards of one group are there."""
        self.unjudged -= 1
        self.trainable += is_trainable
