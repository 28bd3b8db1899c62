"""Values a step with the critic and trains it. Its replicas may not be the actor's, so rows are exchanged.

    driver                                      ranks
    lengths --step_cut--> rows of each replica
    of the critic                           --> ask_critic: fetch those rows, compute values, keep both
    references to values                    <--
    the same references                     --> score: each actor replica picks its rows' values, to estimate returns
    references to returns, and to what
    is trained on                           <--
    the same references                     --> update_critic: each replica of the critic picks its rows' returns

Where critic and actor have as many replicas, these have the same rows. Only where the critic's mini-batches would then
be uneven they have not (`CriticConfig.keeps_rows_of`). The driver never holds a value or a return. It passes on
references (handed_rows.py).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mrl.algo.plain import Denominators, FloatParts
from mrl.data.batch import TrainBatch
from mrl.rank.cut import ReplicaCut
from mrl.rank.handed_rows import HandedRows, taken
from mrl.rank.teacher_rows import as_counted
from mrl.store.response_store import ResponseStore

if TYPE_CHECKING:
    from mrl.rank.actor import MegatronActor  # the driver imports this module, and has no use for Megatron


class CriticBatch:
    """The rows of the newest step on this rank's replica of the critic. Every method is collective."""

    def __init__(self, actor: "MegatronActor", stored: ResponseStore, rows: np.ndarray, cut: ReplicaCut) -> None:
        """Fetches `stored`, which are `rows` of the step. `cut` counts within these rows."""
        self._critic = actor.critic
        self._rows = rows
        self._cut = cut
        self._samples = as_counted(stored, stored.read())
        self._batch = TrainBatch.of(self._samples, actor.config.rollout.temperature)

    def values(self) -> HandedRows | None:
        """Computes the critic's values and keeps them here. One rank of each replica returns them, the others None."""
        result = self._critic.values(self._batch, self._cut.values)
        if result is None:
            return None
        sampled = self._samples.sampled_lengths[result.rows]
        handed = HandedRows(self._rows[result.rows], sampled, {"critic_values": result.values})
        self._batch = taken(self._batch, self._rows, [handed])
        if self._critic.holds_result:
            return handed
        return None

    def update(self, counts: Sequence[Denominators], returns: Sequence[HandedRows]) -> list[FloatParts] | None:
        """Updates the critic. One rank of each replica returns its sums of metrics, the others None.

        `returns` have the returns of all rows of this replica, and which of their tokens are trained on.
        """
        batch = taken(self._batch, self._rows, returns)
        parts = self._critic.update_replica(batch, self._cut.mini_batches, counts)
        if self._critic.holds_result:
            return parts
        return None
