"""Cuts the rows of a step into micro-batches of data-parallel replicas: once, by the driver, from lengths.

The cut of the update's first epoch decides the rows of each replica. Further epochs, log-probs and the reference are
computed on the same replica, possibly under limits of their own. So a replica needs its rows only once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from mrl.config.schema import ActorConfig, RunConfig
from mrl.config.schema_distillation import TeacherConfig
from mrl.config.teacher_model import TeacherModel
from mrl.data.order import permutation
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
_OF_EPOCHS = 2  # last word of their key: a key is as if zeros followed, so it would else be one of the data's order


@dataclass(frozen=True)
class ReplicaCut:
    """The part of a step that one data-parallel replica computes. Row numbers are those of the batch that it holds.

    A critic's pass for values, and a teacher's pass, have the place of log-probs.
    """

    mini_batches: tuple[Micros, ...]  # of all epochs
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
            indices = lengths.indices(np.array(rows))
            computed[computed_tokens(lengths.sequences, indices, shape, context_rank, tensor_rank)] = True
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

    mini_batches: tuple[Shares, ...]  # of all epochs
    log_probs: Shares
    reference: Shares
    rows: tuple[np.ndarray, ...]  # int64, ascending: rows of each mini-batch
    loads: tuple[MiniBatchLoad, ...]
    epochs: int  # passes over all rows, each in equally many mini-batches

    def of(self, replica: int) -> ReplicaCut:
        """Returns the part of one replica."""
        return ReplicaCut(
            tuple(shares[replica] for shares in self.mini_batches), self.log_probs[replica], self.reference[replica]
        )

    def own_rows(self, replica: int) -> np.ndarray:
        """Returns the rows that the replica trains on, int64, ascending."""
        return np.unique(np.concatenate(self.of(replica).trained_rows()))

    def needed_rows(self, replica: int) -> np.ndarray:
        """Returns the replica's own rows and those that fillers repeat, int64, ascending."""
        return np.unique(np.concatenate([micro.rows for micro in self.of(replica).micros]))


def step_cut(
    config: RunConfig,
    layout: TrainLayout,
    model: ModelSpec,
    lengths: RowLengths,
    given: Sequence[np.ndarray] | None = None,
    *,
    step: int,
) -> StepCut:
    """Cuts a step's rows, which have rollout.n rows for each prompt. `step` is its number, for drawn mini-batches.

    With RunConfig.of_critic it returns a critic's cut, in which value passes take the place of log-prob passes. `given`
    holds ascending int64 rows of each replica; without it, rows are dealt anew. Raises DataError for a row above the
    limit of a micro-batch.
    """
    actor = config.actor
    update = Splitter.for_update(actor, layout, model)
    rows = mini_batch_rows(actor, config.rollout.n, len(lengths), (config.trainer.seed, step))
    of_rows = [lengths.rows(each) for each in rows]
    per_epoch = len(rows) // actor.ppo_epochs
    first = [update.shares(of_rows[k], _inside(given, rows[k])) for k in range(per_epoch)]
    of_first = [trained_rows(_numbered(part, each)) for part, each in zip(first, rows, strict=False)]
    owners = [np.sort(np.concatenate(of_replica)) for of_replica in zip(*of_first, strict=True)]
    further = first * (actor.ppo_epochs - 1)
    if actor.shuffles:
        further = [update.shares(of_rows[k], _inside(owners, rows[k])) for k in range(per_epoch, len(rows))]
    parts = tuple(_numbered(part, each) for part, each in zip((*first, *further), rows, strict=True))
    own = (
        Splitter.for_log_probs(actor, layout, model),
        Splitter.for_reference(actor, config.ref, layout, model),
    )
    # Equal cuts give equal sums bit by bit, and replayed routes belong to the same micro-batches.
    as_update = _joined(parts[:per_epoch])
    passes = [as_update if splitter is None else splitter.shares(lengths, owners) for splitter in own]
    loads = tuple(update.load(each, part) for each, part in zip(of_rows, (*first, *further), strict=True))
    return StepCut(parts, *passes, rows, loads, actor.ppo_epochs)


def mini_batch_rows(actor: ActorConfig, n: int, num_rows: int, seed: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Returns the rows of each mini-batch of a step, int64, ascending, one epoch after the other.

    PPO's epochs of mini-batches over one batch (arXiv:1707.06347, algorithm 1: K epochs). In order, or drawn: then each
    epoch divides all rows anew, by `seed` and the epoch's number, whatever the layout is. verl draws the rows of each
    data-parallel rank by themselves, alike in every step. Groups have `n` rows, and a mini-batch as many rows as its
    prompts have.
    """
    order = np.arange(num_rows)
    parts = []
    for epoch in range(actor.ppo_epochs):
        if actor.shuffles:
            order = permutation((*seed, epoch, _OF_EPOCHS), num_rows)
        parts += [np.sort(order[part]) for part in mini_batches(num_rows, actor.ppo_mini_batch_size * n)]
    return tuple(parts)


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


def _inside(owners: Sequence[np.ndarray] | None, rows: np.ndarray) -> list[np.ndarray] | None:
    """Returns each replica's rows of a mini-batch, by their places in `rows`, which are ascending."""
    if owners is None:
        return None
    return [np.flatnonzero(np.isin(rows, own)) for own in owners]


def _joined(parts: Sequence[Shares]) -> Shares:
    """Joins the micro-batches of all mini-batches one after the other, by replica."""
    return tuple(tuple(chain.from_iterable(of_replica)) for of_replica in zip(*parts, strict=True))


def _numbered(shares: Shares, rows: np.ndarray) -> Shares:
    """Returns shares of a mini-batch with the step's numbers of its rows."""
    return tuple(tuple(MicroRows(rows[micro.rows], micro.is_filler) for micro in replica) for replica in shares)
