"""Deadlines of calls: a configured time, or one derived from earlier calls of the same kind."""

from mrl.config.schema import ClusterConfig

LEAST_S = 60.0
TIMES_THE_LONGEST = 10.0


class Deadlines:
    """Deadlines in seconds by phase. Earlier calls show how long a phase takes, and so when a process hangs.

    The first call of a phase compiles, connects and reads files. It gets the whole time limit.
    """

    def __init__(self, first_s: float, is_set: bool, least_s: float = LEAST_S) -> None:
        """`is_set`: the user configured `first_s`, so it always applies.

        `least_s` is the shortest deadline of a call.
        """
        self._first_s = first_s
        self._is_set = is_set
        self._least_s = least_s
        self._longest: dict[str, float] = {}

    @classmethod
    def of_steps(cls, cluster: ClusterConfig, least_s: float = LEAST_S) -> "Deadlines":
        """Makes the deadlines of calls within a step."""
        return cls(cluster.step_timeout_s, "step_timeout_s" in cluster.model_fields_set, least_s)

    def of(self, phase: str) -> float:
        """Returns the deadline of the next call."""
        longest = self._longest.get(phase)
        if self._is_set or longest is None:
            return self._first_s
        return min(self._first_s, max(self._least_s, TIMES_THE_LONGEST * longest))

    def ended(self, phase: str, seconds: float) -> None:
        """Records the duration of a call that all have answered."""
        self._longest[phase] = max(seconds, self._longest.get(phase, 0.0))
