"""How the rows of a step are dealt to data-parallel replicas and cut into micro-batches: once, by the driver, from
lengths.

The update's cut says which replica has which rows; log-probs and reference are computed where the rows are, under
limits of their own where they have some, so a replica needs its rows once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from mrl.config.schema import RunConfig
from mrl.megatron.batching import (
    MicroRows,
    MiniBatchLoad,
    RowLengths,
    Shares,
    Splitter,
    mini_batches,
    rows_of,
    trained_rows,
)
from mrl.megatron.packing import Shape, computed_tokens
from mrl.model import ModelSpec
from mrl.model.layout import TrainLayout

Micros = tuple[MicroRows, ...]


@dataclass(frozen=True)
class ReplicaCut:
    """What one data-parallel replica computes of a step; row numbers are those of the batch that it holds."""

    mini_batches: tuple[Micros, ...]
    log_probs: Micros
    reference: Micros

    @property
    def values(self) -> Micros:
        """The micro-batches of a critic's pass for values; its cut has them in the place of log-probs."""
        return self.log_probs

    def trained_rows(self) -> list[np.ndarray]:
        """int64: rows of each mini-batch that are this replica's."""
        return [np.sort(rows_of(micros)) for micros in self.mini_batches]

    def computed(self, lengths: RowLengths, shape: Shape, context_rank: int, tensor_rank: int) -> np.ndarray:
        """bool [tokens]: those of a batch that one of the replica's ranks computes in any pass."""
        micros = {tuple(micro.rows.tolist()) for micro in self.micros}
        computed = np.zeros(int(lengths.sequences.sum()), bool)
        for rows in micros:
            places = lengths.places(np.array(rows))
            computed[computed_tokens(lengths.sequences, places, shape, context_rank, tensor_rank)] = True
        return computed

    def renumbered(self, rows: np.ndarray) -> "ReplicaCut":
        """The cut for a batch of `rows` [own], ascending numbers of the batch that this cut is of."""

        def local(micros: Micros) -> Micros:
            return tuple(MicroRows(np.searchsorted(rows, micro.rows), micro.is_filler) for micro in micros)

        return ReplicaCut(tuple(map(local, self.mini_batches)), local(self.log_probs), local(self.reference))

    @property
    def micros(self) -> Micros:
        """The micro-batches of all passes."""
        return tuple(chain.from_iterable((*self.mini_batches, self.log_probs, self.reference)))


@dataclass(frozen=True)
class StepCut:
    """The cut of a whole step; row numbers are the step's."""

    mini_batches: tuple[Shares, ...]
    log_probs: Shares
    reference: Shares
    slices: tuple[slice, ...]  # rows of each mini-batch
    loads: tuple[MiniBatchLoad, ...]

    def of(self, replica: int) -> ReplicaCut:
        """The part of one replica."""
        return ReplicaCut(
            tuple(shares[replica] for shares in self.mini_batches), self.log_probs[replica], self.reference[replica]
        )

    def own_rows(self, replica: int) -> np.ndarray:
        """int64, ascending: the rows that the replica trains on."""
        return np.sort(np.concatenate(self.of(replica).trained_rows()))

    def needed_rows(self, replica: int) -> np.ndarray:
        """int64, ascending: its own, and those that fillers repeat."""
        return np.unique(np.concatenate([micro.rows for micro in self.of(replica).micros]))


def step_cut(
    config: RunConfig,
    layout: TrainLayout,
    model: ModelSpec,
    lengths: RowLengths,
    given: Sequence[np.ndarray] | None = None,
) -> StepCut:
    """The cut of a step's rows, rollout.n of them a prompt. With RunConfig.of_critic it is a critic's, whose passes for
    values are those of log-probs here.

    `given`: int64 rows of each replica, ascending, where they are not dealt anew. Raises DataError for a row above
    the limit of a micro-batch.
    """
    actor = config.actor
    update = Splitter.for_update(actor, layout, model)
    slices = tuple(mini_batches(len(lengths), actor.ppo_mini_batch_size * config.rollout.n))
    of_slices = [lengths.rows(np.arange(rows.start, rows.stop)) for rows in slices]
    parts = tuple(
        _shifted(update.shares(each, _inside(given, rows)), rows.start)
        for rows, each in zip(slices, of_slices, strict=True)
    )
    of_parts = [trained_rows(part) for part in parts]
    owners = [np.sort(np.concatenate(of_replica)) for of_replica in zip(*of_parts, strict=True)]
    own = (
        Splitter.for_log_probs(actor, layout, model),
        Splitter.for_reference(actor, config.ref, layout, model),
    )
    # cut alike, the same sums give the same bits, and routes that are replayed belong to the same micro-batches
    as_update = _joined(parts)
    passes = [as_update if splitter is None else splitter.shares(lengths, owners) for splitter in own]
    loads = tuple(
        update.load(each, _shifted(part, -rows.start))
        for rows, each, part in zip(slices, of_slices, parts, strict=True)
    )
    return StepCut(parts, *passes, slices, loads)


def _inside(owners: Sequence[np.ndarray] | None, rows: slice) -> list[np.ndarray] | None:
    """Those of each replica's rows that are in a slice, counted from its start."""
    if owners is None:
        return None
    return [own[(own >= rows.start) & (own < rows.stop)] - rows.start for own in owners]


def _joined(parts: Sequence[Shares]) -> Shares:
    """The micro-batches of all mini-batches one after the other, by replica."""
    return tuple(tuple(chain.from_iterable(of_replica)) for of_replica in zip(*parts, strict=True))


def _shifted(shares: Shares, by: int) -> Shares:
    return tuple(tuple(MicroRows(micro.rows + by, micro.is_filler) for micro in replica) for replica in shares)
