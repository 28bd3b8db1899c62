"""One rank's part in a step: its replica's rows, fetched once, and the calls that the driver makes on them in order.

What a call returns are numbers a row, from the rank that hands out its replica's results; None from the others.
"""

import numpy as np

from mrl.algo.advantages import TokenAdvantages
from mrl.algo.aggregate import Denominators, FloatParts
from mrl.algo.rows import RowValues
from mrl.algo.selection import Means
from mrl.cluster.replica_rows import ReplicaRows, Scored
from mrl.cluster.routes import Readers, read_routes
from mrl.cluster.stored_samples import StoredSamples
from mrl.megatron import parallel
from mrl.megatron.actor import MegatronActor
from mrl.megatron.batching import RowResult
from mrl.megatron.cut import ReplicaCut


class RankStep:
    """Rows of the newest step.

    Ranks before the last pipeline stage have no log-probs, and compute nothing of tokens.
    """

    def __init__(self, actor: MegatronActor, stored: StoredSamples, own: np.ndarray, cut: ReplicaCut, readers: Readers):
        """`own`, bool [rows]: which of `stored` the replica trains on; the others are there for fillers.

        `readers`: of routes, by node.
        """
        config = actor.config
        self._actor, self._own, self._cut = actor, own, cut
        blocks, routes = stored.fetched([block.samples for block in stored.blocks]), None
        samples = stored.assembled(blocks)
        if config.actor.router_replay == "R3" and actor.routing is not None:
            needed = actor.computed_tokens(cut, samples.lengths)
            routes = read_routes(stored, blocks, needed, actor.routing.layers, readers)
        self._rows = ReplicaRows(config.algorithm, samples, config.rollout.temperature, routes)

    def log_probs(self) -> Scored | None:
        """The old policy's log-probs stay here."""
        return self._scored(self._actor.policy_log_probs(self._rows.batch, self._cut.log_probs))

    def old_log_probs_of(self, rows: np.ndarray) -> list[np.ndarray] | None:
        """See ReplicaRows.old_log_probs_of."""
        return self._rows.old_log_probs_of(rows) if parallel.holds_result() else None

    def differences(self, rows: np.ndarray) -> np.ndarray | None:
        """See ReplicaRows.differences."""
        return self._rows.differences(rows) if parallel.holds_result() else None

    def ref_log_probs(self) -> None:
        """The reference's log-probs stay here."""
        result = self._actor.reference_log_probs(self._rows.batch, self._cut.reference)
        if result is not None:
            self._rows.set_reference(self._of_all_rows(result))

    def correct(self) -> RowValues | None:
        """See ReplicaRows.correct."""
        return self._answer(self._rows.correct()) if parallel.on_last_stage() else None

    def moments(self, advantages: TokenAdvantages) -> RowValues | None:
        """See ReplicaRows.moments."""
        return self._answer(self._rows.moments(advantages)) if parallel.on_last_stage() else None

    def set_advantages(self, advantages: TokenAdvantages) -> RowValues | None:
        """See ReplicaRows.set_advantages."""
        return self._answer(self._rows.set_advantages(advantages)) if parallel.on_last_stage() else None

    def find(self, means: list[Means]) -> list[np.ndarray] | None:
        """See ReplicaRows.find."""
        if not parallel.on_last_stage():
            return None
        largest = self._rows.find(self._actor.loss_parameters, self._cut.trained_rows(), means)
        return largest if parallel.holds_result() else None

    def select(self, least: list[float | int | None]) -> None:
        """See ReplicaRows.select."""
        if parallel.on_last_stage():
            self._rows.select(least)

    def update(self, counts: list[Denominators]) -> tuple[list[FloatParts], Scored | None]:
        """See MegatronActor.update_replica; on policy what `log_probs` says else, of the same weights, those before the
        update.

        The rows are gone afterwards: memory is free while the next ones are generated.
        """
        result = self._actor.update_replica(self._rows.batch, self._cut.mini_batches, counts)
        scored, self._rows = self._scored(result.old), None
        return [*result.parts, result.spent], scored

    def _scored(self, result: RowResult | None) -> Scored | None:
        if result is None:
            return None
        mismatch = self._answer(self._rows.set_old(self._of_all_rows(result)))
        return None if mismatch is None else (mismatch, result.entropy)

    def _of_all_rows(self, result: RowResult) -> np.ndarray:
        batch = self._rows.batch
        flat = np.zeros(len(batch.rollout_log_probs), np.float32)
        flat[batch.places_of(result.rows)] = result.log_probs
        return flat

    def _answer(self, of_rows: RowValues) -> RowValues | None:
        return {name: values[self._own] for name, values in of_rows.items()} if parallel.holds_result() else None
