"""Limits how often the ranks of a run may be restarted."""

from collections.abc import Callable

from mrl.errors import Interrupted, LostWeights
from mrl.remote.process_logs import concerning, processes_of

WINDOW = 100  # finished steps to which trainer.restart_limit applies


class RestartBudget:
    """The remaining restarts of ranks. A new start of the whole run restores none."""

    def __init__(
        self, limit: int, spent_at: tuple[int, ...], note: Callable[[int, str], None], for_engines: int = 0
    ) -> None:
        """`spent_at`: finished steps at each restart so far.

        `note`: writes such a step and the reason. `for_engines`: the limit of restarts because of lost engines.
        """
        self._limit = limit
        self._for_engines = for_engines
        self._spent_at = list(spent_at)
        self._note = note

    @property
    def spent(self) -> int:
        """Number of restarts of the run so far."""
        return len(self._spent_at)

    def spend(self, error: Interrupted, step: int) -> None:
        """Counts one restart after `step`.

        Raises `error` if a return to a checkpoint would not help, or no restart is left.
        """
        lost = processes_of(error)
        of_ranks = bool(lost) and all(name.startswith("rank ") for name in lost)
        limit = self._for_engines if isinstance(error, LostWeights) else self._limit if of_ranks else 0
        if not limit:
            raise error
        recent = [at for at in self._spent_at if at > step - WINDOW]
        if len(recent) >= limit:
            text = f"{error}; ranks were started again {len(recent)} times in {WINDOW} steps (trainer.restart_limit)"
            raise concerning(Interrupted(text), *lost) from error
        self._spent_at.append(step)
        self._note(step, str(error))
