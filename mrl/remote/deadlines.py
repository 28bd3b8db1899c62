"""How long a call may take: what was set, else by what calls of its kind took before."""

from mrl.config.schema import ClusterConfig

LEAST_S = 60.0
TIMES_THE_LONGEST = 10.0


class Deadlines:
    """Seconds by phase: those of before tell how long one takes, and so when somebody hangs.

    The first call of a phase compiles, connects and reads, and has all the time that there is.
    """

    def __init__(self, first_s: float, is_set: bool, least_s: float = LEAST_S) -> None:
        """`is_set`: somebody has said that it is `first_s`, always. `least_s`: that a call is given at least."""
        self._first_s = first_s
        self._is_set = is_set
        self._least_s = least_s
        self._longest: dict[str, float] = {}

    @classmethod
    def of_steps(cls, cluster: ClusterConfig, least_s: float = LEAST_S) -> "Deadlines":
        """Deadlines of calls within a step."""
        return cls(cluster.step_timeout_s, "step_timeout_s" in cluster.model_fields_set, least_s)

    def of(self, phase: str) -> float:
        """Returns the deadline of the next call."""
        longest = self._longest.get(phase)
        if self._is_set or longest is None:
            return self._first_s
        return min(self._first_s, max(self._least_s, TIMES_THE_LONGEST * longest))

    def ended(self, phase: str, seconds: float) -> None:
        """Takes notice of a call that all have answered."""
        self._longest[phase] = max(seconds, self._longest.get(phase, 0.0))
