"""Scores a step with the teacher of a distillation. Its replicas are not the actor's, so rows are exchanged.

    driver                                    ranks
    lengths --deal--> rows of each replica
    of the teacher                        --> ask_teacher: fetch those rows, score them, keep the scores
    references to the scores              <--
    the same references                   --> score: each actor replica picks its rows' scores

The driver never holds a score. It passes on references (handed_rows.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mrl.config.schema import ActorConfig
from mrl.config.schema_distillation import TeacherConfig
from mrl.config.teacher_model import TeacherModel
from mrl.data.batch import TrainBatch
from mrl.data.samples import Samples
from mrl.rank.batching import MicroRows, RowLengths, Splitter
from mrl.rank.handed_rows import HandedRows
from mrl.store.response_store import ResponseStore

if TYPE_CHECKING:
    from mrl.rank.actor import MegatronActor  # the driver imports this module and must not load Megatron


@dataclass(frozen=True)
class TeacherShare:
    """The share of one replica of the teacher: rows of the step, ascending, and micro-batches of indices into them."""

    rows: np.ndarray  # int64
    micros: tuple[MicroRows, ...]


def deal(
    actor: ActorConfig, given: TeacherConfig, teacher: TeacherModel, lengths: RowLengths, own: Sequence[np.ndarray]
) -> list[TeacherShare]:
    """Divides the rows of a step, with the given lengths, among the teacher's replicas.

    `given` is the teacher's section, `own` are the rows of each of the actor's replicas. Where the teacher has as many
    replicas, they score the same rows. Raises DataError for a row above the limit of a micro-batch.
    """
    splitter = Splitter.for_teacher(actor, given, teacher.layout, teacher.model)
    owners = None
    if len(own) == teacher.layout.data:
        owners = list(own)
    return [_share(micros) for micros in splitter.shares(lengths, owners)]


def _share(micros: Sequence[MicroRows]) -> TeacherShare:
    rows = np.unique(np.concatenate([micro.rows for micro in micros]))
    return TeacherShare(rows, tuple(MicroRows(np.searchsorted(rows, micro.rows), micro.is_filler) for micro in micros))


def scored(
    actor: "MegatronActor", stored: ResponseStore, rows: np.ndarray, micros: Sequence[MicroRows]
) -> HandedRows | None:
    """Lets this rank's replica of the teacher score `stored`, which are `rows` of the step. Collective.

    One rank of each replica returns the scores, the others None.
    """
    samples = as_counted(stored, stored.read())
    batch = TrainBatch.of(samples, actor.config.rollout.temperature)
    result = actor.teacher.log_probs(batch, micros)
    if result is None:
        return None
    sampled = samples.sampled_lengths[result.rows]
    columns = {"teacher_log_probs": result.log_probs}
    if result.words is not None:
        columns |= {"teacher_words": result.words, "of_teacher_words": result.of_words}
    return HandedRows(rows[result.rows], sampled, columns)


def as_counted(stored: ResponseStore, samples: Samples) -> Samples:
    """Makes responses context whose log-probs are not numbers, as the driver does."""
    return samples.as_context((stored.rows.sampled_lengths == 0) & (samples.sampled_lengths > 0))
