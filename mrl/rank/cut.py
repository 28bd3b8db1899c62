"""Cuts the rows of a step into micro-batches of data-parallel replicas: once, by the driver, from lengths.

The update's cut decides the rows of each replica. Log-probs and reference are computed on the same replica, possibly
under limits of their own. So a replica needs its rows only once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from mrl.config.schema import ActorConfig, RunConfig
from mrl.config.schema_distillation import TeacherConfig
from mrl.config.teacher_model import TeacherModel
from mrl.model import ModelSpec
from mrl.model.layout import TrainLayout
from mrl.rank.batching import (
    MicroRows,
    MiniBatchLoad,
    RowLengths,
    Shares,
    Splitter,
    mini_batches,
    rows_of,
    trained_rows,
)
from mrl.rank.packing import Shape, computed_tokens

Micros = tuple[MicroRows, ...]


@dataclass(frozen=True)
class ReplicaCut:
    """The part of a step that one data-parallel replica computes. Row numbers are those of the batch that it holds.

    A critic's pass for values, and a teacher's pass, have the place of log-probs.
    """

    mini_batches: tuple[Micros, ...]
    log_probs: Micros
    reference: Micros

    def trained_rows(self) -> list[np.ndarray]:
        """Returns this replica's rows of each mini-batch, int64."""
        return [np.sort(rows_of(micros)) for micros in self.mini_batches]

    def computed(self, lengths: RowLengths, shape: Shape, context_rank: int, tensor_rank: int) -> np.ndarray:
        """Returns which tokens of a batch one of the replica's ranks computes in any pass, bool [tokens]."""
        micros = {tuple(micro.rows.tolist()) for micro in self.micros}
        computed = np.zeros(int(lengths.sequences.sum()), bool)
        for rows in micros:
            places = lengths.places(np.array(rows))
            computed[computed_tokens(lengths.sequences, places, shape, context_rank, tensor_rank)] = True
        return computed

    def renumbered(self, rows: np.ndarray) -> "ReplicaCut":
        """Returns the cut for a batch of `rows` [own], which are ascending row numbers of this cut's batch."""

        def local(micros: Micros) -> Micros:
            return tuple(MicroRows(np.searchsorted(rows, micro.rows), micro.is_filler) for micro in micros)

        return ReplicaCut(tuple(map(local, self.mini_batches)), local(self.log_probs), local(self.reference))

    @property
    def micros(self) -> Micros:
        """Returns the micro-batches of all passes."""
        return tuple(chain.from_iterable((*self.mini_batches, self.log_probs, self.reference)))


@dataclass(frozen=True)
class StepCut:
    """The cut of a whole step. Row numbers are the step's."""

    mini_batches: tuple[Shares, ...]
    log_probs: Shares
    reference: Shares
    slices: tuple[slice, ...]  # rows of each mini-batch
    loads: tuple[MiniBatchLoad, ...]

    def of(self, replica: int) -> ReplicaCut:
        """Returns the part of one replica."""
        return ReplicaCut(
            tuple(shares[replica] for shares in self.mini_batches), self.log_probs[replica], self.reference[replica]
        )

    def own_rows(self, replica: int) -> np.ndarray:
        """Returns the rows that the replica trains on, int64, ascending."""
        return np.sort(np.concatenate(self.of(replica).trained_rows()))

    def needed_rows(self, replica: int) -> np.ndarray:
        """Returns the replica's own rows and those that fillers repeat, int64, ascending."""
        return np.unique(np.concatenate([micro.rows for micro in self.of(replica).micros]))


def step_cut(
    config: RunConfig,
    layout: TrainLayout,
    model: ModelSpec,
    lengths: RowLengths,
    given: Sequence[np.ndarray] | None = None,
) -> StepCut:
    """Cuts a step's rows, which have rollout.n rows for each prompt.

    With RunConfig.of_critic it returns a critic's cut, in which value passes take the place of log-prob passes. `given`
    holds ascending int64 rows of each replica; without it, rows are dealt anew. Raises DataError for a row above the
    limit of a micro-batch.
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
    # Equal cuts give equal sums bit by bit, and replayed routes belong to the same micro-batches.
    as_update = _joined(parts)
    passes = [as_update if splitter is None else splitter.shares(lengths, owners) for splitter in own]
    loads = tuple(
        update.load(each, _shifted(part, -rows.start))
        for rows, each, part in zip(slices, of_slices, parts, strict=True)
    )
    return StepCut(parts, *passes, slices, loads)


def teacher_cut(
    actor: ActorConfig, given: TeacherConfig, teacher: TeacherModel, lengths: RowLengths, own: Sequence[np.ndarray]
) -> list[tuple[np.ndarray, ReplicaCut]]:
    """Divides the rows of a step among the teacher's replicas: rows of each, int64, ascending, and their cut.

    `given` is the teacher's section, `own` are the rows of each of the actor's replicas. Where the teacher has as many
    replicas, they score the same rows. Raises DataError for a row above the limit of a micro-batch.
    """
    splitter = Splitter.for_teacher(actor, given, teacher.layout, teacher.model)
    owners = None
    if len(own) == teacher.layout.data:
        owners = list(own)
    cuts = [ReplicaCut((), micros, ()) for micros in splitter.shares(lengths, owners)]
    needed = [np.unique(np.concatenate([micro.rows for micro in cut.log_probs])) for cut in cuts]
    return [(rows, cut.renumbered(rows)) for rows, cut in zip(needed, cuts, strict=True)]


def _inside(owners: Sequence[np.ndarray] | None, rows: slice) -> list[np.ndarray] | None:
    """Returns each replica's rows inside a slice, counted from the slice's start."""
    if owners is None:
        return None
    return [own[(own >= rows.start) & (own < rows.stop)] - rows.start for own in owners]


def _joined(parts: Sequence[Shares]) -> Shares:
    """Joins the micro-batches of all mini-batches one after the other, by replica."""
    return tuple(tuple(chain.from_iterable(of_replica)) for of_replica in zip(*parts, strict=True))


def _shifted(shares: Shares, by: int) -> Shares:
    return tuple(tuple(MicroRows(micro.rows + by, micro.is_filler) for micro in replica) for replica in shares)
