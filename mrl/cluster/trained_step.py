"""A step's rows on the ranks, as the driver sees them: who has which, calls on all ranks, numbers a row from all
replicas.

driver                                     ranks (rank_step.py)
lengths --step_cut--> rows of replicas --> fetch their rows, once, from where they are
numbers a row                          <-- log-probs, corrections: tokens stay
numbers a response                     --> advantages of tokens
counts of mini-batches                 --> updates
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mrl.algo.advantages import TokenAdvantages
from mrl.algo.aggregate import Denominators
from mrl.algo.rows import RowValues
from mrl.algo.selection import Means
from mrl.cluster.actor_group import ActorGroup
from mrl.cluster.replica_rows import Scored
from mrl.cluster.stored_samples import StoredSamples
from mrl.megatron.batching import UpdateResult
from mrl.megatron.cut import step_cut


@dataclass(frozen=True)
class Mismatch:
    """`of_rows`: how far generation is from training, by row. `entropy`: mean over response tokens, nats."""

    of_rows: RowValues
    entropy: float


class TrainedStep:
    """Calls on all ranks about one step; see ReplicaRows for what each does of a replica's rows."""

    def __init__(self, actor: ActorGroup, samples: StoredSamples):
        """Deals the rows out; every rank fetches its own.

        Raises DataError for a row above the limit of a micro-batch.
        """
        layout = actor.layout
        self._actor, self.rows = actor, samples.rows
        # [rows]: mean |log p_actor - log p_rollout| over tokens, once it is known
        self.log_gaps: np.ndarray | None = None
        self.cut = step_cut(actor.config, layout, actor.model, samples.rows.lengths)
        self._replica_of = [layout.dense_coords(rank).dp for rank in range(layout.world_size)]
        self._needed = [self.cut.needed_rows(replica) for replica in range(layout.data)]
        self._own = [self.cut.own_rows(replica) for replica in range(layout.data)]
        parts = [
            (samples.take(needed), np.isin(needed, own), self.cut.of(replica).renumbered(needed), actor.route_readers)
            for replica, (needed, own) in enumerate(zip(self._needed, self._own, strict=True))
        ]
        actor.each(
            "begin_step", [parts[replica] for replica in self._replica_of], "fetching samples", interruptible=True
        )

    def log_probs(self) -> Mismatch:
        """How far generation is from training."""
        mismatch = self._mismatch(self._call("log_probs", interruptible=True))
        self.log_gaps = mismatch.of_rows["log_gap"] / np.maximum(self.rows.response_lengths, 1)
        return mismatch

    def old_log_probs_of(self, rows: Sequence[int]) -> dict[int, np.ndarray]:
        """The trainer's log-probs of the given rows' tokens, by row; after `log_probs` and before `correct`,
        which may change them.
        """
        wanted = self._own_among(rows)
        by_row: dict[int, np.ndarray] = {}
        for replica, answer in zip(self._replica_of, self._call("old_log_probs_of", wanted.__getitem__), strict=True):
            if answer is not None:
                numbers = self._needed[replica][wanted[replica]].tolist()
                by_row |= dict(zip(numbers, answer, strict=True))
        return by_row

    def differences(self, rows: np.ndarray) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[Any]]:
        """Of each rank, ids and response lengths of its replica's own ones among `rows`, and a reference to its
        `RankStep.differences` of them.

        Nothing is waited for: who is given the references fetches what stands behind them. After `log_probs`.
        """
        wanted = self._own_among(rows)
        own = [self._needed[replica][wanted[replica]] for replica in self._replica_of]
        refs = self._actor.refs_each("on_step", [("differences", wanted[replica]) for replica in self._replica_of])
        return [(self.rows.sample_id[each], self.rows.response_lengths[each]) for each in own], list(refs.values())

    def ref_log_probs(self) -> None:
        """The reference model's log-probs, which stay on the ranks."""
        self._call("ref_log_probs", interruptible=True)

    def correct(self) -> RowValues:
        """See ReplicaRows.correct."""
        return self._of_rows(self._call("correct"))

    def moments(self, advantages: TokenAdvantages) -> RowValues:
        """See ReplicaRows.moments."""
        return self._of_rows(self._call("moments", self._parts_of(advantages)))

    def set_advantages(self, advantages: TokenAdvantages) -> RowValues:
        """See ReplicaRows.set_advantages."""
        return self._of_rows(self._call("set_advantages", self._parts_of(advantages)))

    def find(self, means: list[Means]) -> list[list[np.ndarray]]:
        """Of each mini-batch, what each replica found; see ReplicaRows.find."""
        answers = [answer for answer in self._call("find", lambda replica: means) if answer is not None]
        return [list(of_mini_batch) for of_mini_batch in zip(*answers, strict=True)]

    def select(self, least: list[float | int | None]) -> None:
        """See ReplicaRows.select."""
        self._call("select", lambda replica: least)

    def update(self, counts: list[Denominators]) -> tuple[UpdateResult, Mismatch | None]:
        """All optimizer steps; `counts` of each mini-batch's trained tokens and sequences.

        On policy, what `log_probs` says else.
        """
        answers = self._call("update", lambda replica: counts)
        result = UpdateResult([part for parts, _ in answers for part in parts], list(self.cut.loads))
        scored = [scored for _, scored in answers]
        return result, None if all(each is None for each in scored) else self._mismatch(scored)

    def _own_among(self, rows: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """int64, of each replica: places of the rows that it trains on, among those that it holds."""
        return [
            np.flatnonzero(np.isin(needed, own) & np.isin(needed, rows))
            for needed, own in zip(self._needed, self._own, strict=True)
        ]

    def _mismatch(self, answers: Sequence[Scored | None]) -> Mismatch:
        entropies = [answer[1] for answer in answers if answer is not None]
        of_rows = self._of_rows(None if answer is None else answer[0] for answer in answers)
        return Mismatch(of_rows, sum(value for value, _ in entropies) / sum(weight for _, weight in entropies))

    def by_mini_batch(self, values: np.ndarray) -> list[np.ndarray]:
        """`values` [rows] of each mini-batch."""
        return [values[rows] for rows in self.cut.slices]

    def _call(
        self, method: str, argument: Callable[[int], Any] | None = None, interruptible: bool = False
    ) -> list[Any]:
        arguments = [(method,) if argument is None else (method, argument(replica)) for replica in self._replica_of]
        return self._actor.each("on_step", arguments, method, interruptible)

    def _parts_of(self, advantages: TokenAdvantages) -> Callable[[int], TokenAdvantages]:
        return lambda replica: advantages.rows(self._needed[replica])

    def _of_rows(self, answers: Iterable[RowValues | None]) -> RowValues:
        """The replicas' numbers in the order of the step's rows."""
        of_rows: RowValues = {}
        filled = np.zeros(len(self.rows), bool)
        for replica, answer in zip(self._replica_of, answers, strict=True):
            if answer is None:
                continue
            filled[self._own[replica]] = True
            for name, values in answer.items():
                of_rows.setdefault(name, np.zeros(len(filled), values.dtype))[self._own[replica]] = values
        if not filled.all():
            raise RuntimeError(f"no rank answered for rows {np.flatnonzero(~filled)[:8].tolist()}")
        return of_rows


def counts_of(parts: list[np.ndarray]) -> list[Denominators]:
    """Of each mini-batch, from trained tokens a row."""
    return [Denominators.counted(trained) for trained in parts]
