"""The state of an agent's session: how many of its requests are open, what is left of its budgets, and why it ended.

Requests of one session are answered at once, so a session is no line of turns (mrl.schedule.conversation). Its time is
the agent's: it counts from the first request on, while no request is open. An example, with budgets of 3 turns and 10
seconds:

    event                     open   turns   seconds of the agent
    asked(2.0)                 1      1       0          its start does not count
    asked(2.5)                 2      2       0          another one meanwhile, of a sub-agent
    answered(4.0)              1      2       0
    answered(5.0)              0      2       0          from here on the agent's time counts
    asked(6.0)                 1      3       1          no further one is taken
    answered(9.0, call)        0      3       1          ENDED: "turns", since the last turn has a call

Each branch of the session has the tokens of a whole response for itself; what does not fit into the row in the end is
left out there. So a request reserves a turn, and no tokens of others. This file has only numbers.
"""

from dataclasses import dataclass, replace

from mrl.schedule.conversation import Stop


@dataclass(frozen=True)
class AgentTalk:
    """A session. It is immutable: each event returns the session after it. `now`: seconds of any monotonic clock."""

    turns_left: int
    seconds_left: float  # of the agent's own time, when it last began to count
    idle_since: float | None = None  # when the last open request was answered; None: there was none yet
    open: int = 0
    stop: Stop | None = None  # why no request is taken any more

    @property
    def has_ended(self) -> bool:
        """Whether nothing is taken any more, and all that was taken is answered."""
        return self.stop is not None and not self.open

    @property
    def deadline(self) -> float:
        """When the agent's time is over, where no request is open and one has been answered."""
        return self.idle_since + self.seconds_left

    def idle_s(self, now: float) -> float:
        """Seconds since the last open request was answered; 0 before the first."""
        if self.idle_since is None:
            return 0.0
        return max(0.0, now - self.idle_since)

    def asked(self, now: float) -> "AgentTalk":
        """Takes a request, which reserves a turn. Raises ValueError where none is left."""
        if self.stop is not None or not self.turns_left:
            raise ValueError("a session without turns left got a request")
        left = self.seconds_left
        if not self.open:
            left -= self.idle_s(now)
        return replace(self, open=self.open + 1, turns_left=self.turns_left - 1, seconds_left=left)

    def answered(self, now: float, has_call: bool, is_full: bool = False) -> "AgentTalk":
        """Records an answer. `is_full`: its branch has no room for another token."""
        after = replace(self, open=self.open - 1, idle_since=now)
        if is_full:
            return after.ended(Stop.LENGTH)
        if not after.open and not after.turns_left:
            return after.ended(Stop.TURNS if has_call else Stop.STOP)
        return after

    def left(self, now: float) -> "AgentTalk":
        """Records that nobody waits for an answer any more. The turn is spent."""
        return self.answered(now, has_call=True)

    def refused(self, now: float, stop: Stop) -> "AgentTalk":
        """Records that a request which was taken cannot be answered, for a reason that ends the session."""
        return replace(self, open=self.open - 1, idle_since=now).ended(stop)

    def ended(self, stop: Stop) -> "AgentTalk":
        """Ends the session. The first reason stays, unless the agent has failed."""
        if self.stop is not None and stop is not Stop.ENVIRONMENT:
            return self
        return replace(self, stop=stop)
