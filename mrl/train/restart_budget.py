"""How often the ranks of a run may be started again."""

from collections.abc import Callable

from mrl.errors import Interrupted, LostWeights
from mrl.remote.process_logs import concerning, processes_of

WINDOW = 100  # finished steps that trainer.restart_limit is of


class RestartBudget:
    """How often ranks may still be started again; starts of the whole run give nothing back."""

    def __init__(
        self, limit: int, spent_at: tuple[int, ...], note: Callable[[int, str], None], for_engines: int = 0
    ) -> None:
        """`spent_at`: steps that were finished at restarts so far. `note`: writes such a step and why. `for_engines`:
        the limit where it is engines that ranks go back for.
        """
        self._limit = limit
        self._for_engines = for_engines
        self._spent_at = list(spent_at)
        self._note = note

    @property
    def spent(self) -> int:
        """Restarts of the run so far."""
        return len(self._spent_at)

    def spend(self, error: Interrupted, step: int) -> None:
        """Counts one restart after `step`. Raises `error` where ranks that go back to a checkpoint cure nothing, or
        none is left.
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
