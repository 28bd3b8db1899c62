"""Rows of a step on a rank's replica of a second model, which scores them: a teacher, or a critic, which also trains.

The reference model has the actor's layout and rows (rank_batch.py). These have rows of their own, so what they compute
is handed on (handed_rows.py). Where they have as many replicas as the actor, these have the same rows, unless a
critic's mini-batches would then be uneven (`CriticConfig.keeps_rows_of`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mrl.algo.plain import Denominators, FloatParts
from mrl.data.batch import TrainBatch
from mrl.rank.handed_rows import HandedRows, as_counted, with_handed
from mrl.rank.rank_step import CRITIC, ReplicaRows
from mrl.store.response_store import ResponseStore

if TYPE_CHECKING:
    from mrl.rank.actor import MegatronActor


class SecondRows:
    """The rows of the newest step on this rank's replica of a second model. Every method is collective."""

    def __init__(self, actor: "MegatronActor", name: str, own: ReplicaRows, stored: ResponseStore) -> None:
        """Fetches `stored`, which are the rows of `own`. `name` is the model's attribute of `actor`."""
        self._model = getattr(actor, name)
        self._trains = name == CRITIC
        self._own = own
        self._samples = as_counted(stored, stored.read())
        self._batch = self._model.prepared(TrainBatch.of(self._samples, actor.config.rollout.temperature))

    def columns(self) -> HandedRows | None:
        """Computes what the model says of the rows. One rank of each replica returns it, the others None.

        What a critic says stays here on ranks of the last stage, for its update.
        """
        found = self._model.columns(self._batch, self._own.cut.log_probs)
        if found is None:
            return None
        rows, columns = found
        handed = HandedRows(self._own.numbers[rows], self._samples.sampled_lengths[rows], columns)
        if self._trains:
            self._batch = with_handed(self._batch, self._own.numbers, [handed])
        return handed if self._model.holds_result else None

    def update(self, counts: Sequence[Denominators], returns: Sequence[HandedRows]) -> list[FloatParts] | None:
        """Updates a critic. One rank of each replica returns its sums of metrics, the others None.

        `returns` have the returns of all rows of this replica, and which of their tokens are trained on.
        """
        batch = with_handed(self._batch, self._own.numbers, returns)
        parts = self._model.update_replica(batch, self._own.cut.mini_batches, counts)
        return parts if self._model.holds_result else None
