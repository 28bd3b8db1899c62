"""How the rows of a step are dealt to data-parallel replicas and cut into micro-batches: once, by the driver, from
lengths.

The update's cut says which replica has which rows; log-probs and reference are computed where the rows are, under
limits of their own where they have some, so a replica needs its rows once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    critic: tuple[Micros, ...] = ()  # mini-batches of a critic's update
    values: Micros = ()

    def trained_rows(self) -> list[np.ndarray]:
        """int64: rows of each mini-batch that are this replica's."""
        return [np.sort(rows_of(micros)) for micros in self.mini_batches]

    def computed(self, lengths: RowLengths, shape: Shape, context_rank: int, tensor_rank: int) -> np.ndarray:
        """bool [tokens]: those of a batch that one of the replica's ranks computes in any pass."""
        parts = (*self.mini_batches, self.log_probs, self.reference)  # a critic's routers choose by themselves
        micros = {tuple(micro.rows.tolist()) for micro in chain.from_iterable(parts)}
        computed = np.zeros(int(lengths.sequences.sum()), bool)
        for rows in micros:
            places = lengths.places(np.array(rows))
            computed[computed_tokens(lengths.sequences, places, shape, context_rank, tensor_rank)] = True
        return computed

    def renumbered(self, rows: np.ndarray) -> "ReplicaCut":
        """The cut for a batch of `rows` [own], ascending numbers of the batch that this cut is of."""

        def local(micros: Micros) -> Micros:
            return tuple(MicroRows(np.searchsorted(rows, micro.rows), micro.is_filler) for micro in micros)

        return ReplicaCut(
            tuple(map(local, self.mini_batches)),
            local(self.log_probs),
            local(self.reference),
            tuple(map(local, self.critic)),
            local(self.values),
        )

    @property
    def micros(self) -> Micros:
        """The micro-batches of all passes."""
        parts = (*self.mini_batches, self.log_probs, self.reference, *self.critic, self.values)
        return tuple(chain.from_iterable(parts))


@dataclass(frozen=True)
class CriticCut:
    """The cut of a step for a critic; every row is where the actor has it."""

    mini_batches: tuple[Shares, ...]
    values: Shares
    slices: tuple[slice, ...]  # rows of each mini-batch


@dataclass(frozen=True)
class StepCut:
    """The cut of a whole step; row numbers are the step's."""

    mini_batches: tuple[Shares, ...]
    log_probs: Shares
    reference: Shares
    slices: tuple[slice, ...]  # rows of each mini-batch
    loads: tuple[MiniBatchLoad, ...]
    critic: CriticCut | None = None

    def of(self, replica: int) -> ReplicaCut:
        """The part of one replica."""
        cut = ReplicaCut(
            tuple(shares[replica] for shares in self.mini_batches), self.log_probs[replica], self.reference[replica]
        )
        if self.critic is None:
            return cut
        updates = tuple(shares[replica] for shares in self.critic.mini_batches)
        return replace(cut, critic=updates, values=self.critic.values[replica])

    def own_rows(self, replica: int) -> np.ndarray:
        """int64, ascending: the rows that the replica trains on."""
        return np.sort(np.concatenate(self.of(replica).trained_rows()))

    def needed_rows(self, replica: int) -> np.ndarray:
        """int64, ascending: its own, and those that fillers repeat."""
        return np.unique(np.concatenate([micro.rows for micro in self.of(replica).micros]))


def step_cut(config: RunConfig, layout: TrainLayout, model: ModelSpec, lengths: RowLengths) -> StepCut:
    """The cut of a step's rows, rollout.n of them a prompt.

    Raises DataError for a row above the limit of a micro-batch.
    """
    actor = config.actor
    update = Splitter.for_update(actor, layout, model)
    slices = tuple(mini_batches(len(lengths), actor.ppo_mini_batch_size * config.rollout.n))
    of_slices = [lengths.rows(np.arange(rows.start, rows.stop)) for rows in slices]
    parts = tuple(_shifted(update.shares(each), rows.start) for rows, each in zip(slices, of_slices, strict=True))
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
    critic = None
    if config.of_critic is not None:
        critic = _critic_cut(config.of_critic, layout, model, lengths, owners)
    return StepCut(parts, *passes, slices, loads, critic)


def _critic_cut(
    config: RunConfig, layout: TrainLayout, model: ModelSpec, lengths: RowLengths, owners: list[np.ndarray]
) -> CriticCut:
    """`config`: with the critic in the actor's place; `owners`: rows of each replica."""
    update = Splitter.for_update(config.actor, layout, model)
    slices = tuple(mini_batches(len(lengths), config.actor.ppo_mini_batch_size * config.rollout.n))
    parts = []
    for rows in slices:
        own = [of_replica[(of_replica >= rows.start) & (of_replica < rows.stop)] - rows.start for of_replica in owners]
        of_rows = lengths.rows(np.arange(rows.start, rows.stop))
        parts.append(_shifted(update.shares(of_rows, own), rows.start))
    scoring = Splitter.for_log_probs(config.actor, layout, model)
    values = _joined(parts) if scoring is None else scoring.shares(lengths, owners)
    return CriticCut(tuple(parts), values, slices)


def _joined(parts: Sequence[Shares]) -> Shares:
    """The micro-batches of all mini-batches one after the other, by replica."""
    return tuple(tuple(chain.from_iterable(of_replica)) for of_replica in zip(*parts, strict=True))


def _shifted(shares: Shares, by: int) -> Shares:
    return tuple(tuple(MicroRows(micro.rows + by, micro.is_filler) for micro in replica) for replica in shares)
