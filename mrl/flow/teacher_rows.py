"""Scores a step with the teacher of a distillation. Its replicas are not the actor's, so rows are exchanged.

    driver                                    ranks
    lengths --deal--> rows of each replica
    of the teacher                        --> ask_teacher: fetch those rows, score them, keep the scores
    references to the scores              <-- teacher_rows
    the same references                   --> take_teacher: each actor replica picks its rows' scores

The driver never holds a score. It passes on references (step_batch.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mrl.config.schema import RunConfig
from mrl.config.teacher_model import TeacherModel
from mrl.data.batch import TrainBatch
from mrl.data.samples import Samples
from mrl.flow.response_store import ResponseStore
from mrl.megatron.batching import MicroRows, RowLengths, Splitter

if TYPE_CHECKING:
    from mrl.megatron.actor import MegatronActor  # the driver imports this module and must not load Megatron


@dataclass(frozen=True)
class TeacherRows:
    """The teacher's log-probs for some rows of a step."""

    rows: np.ndarray  # int64 [rows]: their numbers in the step
    sampled: np.ndarray  # int64 [rows]: sampled tokens of each
    log_probs: np.ndarray  # float32 [sampled tokens], rows end to end
    # [sampled tokens, words]: its most likely words, int32, and their log-probs, float32; None where they are not used
    words: np.ndarray | None = None
    of_words: np.ndarray | None = None

    def among(self, rows: np.ndarray) -> "TeacherRows":
        """Returns those that are among `rows`."""
        kept = np.isin(self.rows, rows)
        tokens = np.repeat(kept, self.sampled)
        found = TeacherRows(self.rows[kept], self.sampled[kept], self.log_probs[tokens])
        if self.words is None:
            return found
        return replace(found, words=self.words[tokens], of_words=self.of_words[tokens])


@dataclass(frozen=True)
class TeacherShare:
    """The share of one replica of the teacher: rows of the step, ascending, and micro-batches of indices into them."""

    rows: np.ndarray  # int64
    micros: tuple[MicroRows, ...]


def deal(
    config: RunConfig, teacher: TeacherModel, lengths: RowLengths, own: Sequence[np.ndarray]
) -> list[TeacherShare]:
    """Divides the rows of a step, with the given lengths, among the teacher's replicas.

    `own` are the rows of each of the actor's replicas. Where the teacher has as many replicas, they score the same
    rows. Raises DataError for a row above the limit of a micro-batch.
    """
    splitter = Splitter.for_teacher(config.actor, config.distillation.teacher_model, teacher.layout, teacher.model)
    owners = None
    if len(own) == teacher.layout.data:
        owners = list(own)
    return [_share(micros) for micros in splitter.shares(lengths, owners)]


def _share(micros: Sequence[MicroRows]) -> TeacherShare:
    rows = np.unique(np.concatenate([micro.rows for micro in micros]))
    return TeacherShare(rows, tuple(MicroRows(np.searchsorted(rows, micro.rows), micro.is_filler) for micro in micros))


def scored(
    actor: "MegatronActor", stored: ResponseStore, rows: np.ndarray, micros: Sequence[MicroRows]
) -> TeacherRows | None:
    """Lets this rank's replica of the teacher score `stored`, which are `rows` of the step. Collective.

    One rank of each replica returns the scores, the others None.
    """
    samples = as_counted(stored, stored.read())
    batch = TrainBatch.of(samples, actor.config.rollout.temperature)
    result = actor.teacher.log_probs(batch, micros)
    if result is None:
        return None
    sampled = samples.sampled_lengths[result.rows]
    return TeacherRows(rows[result.rows], sampled, result.log_probs, result.words, result.of_words)


def as_counted(stored: ResponseStore, samples: Samples) -> Samples:
    """Makes responses context whose log-probs are not numbers, as the driver does."""
    return samples.as_context((stored.rows.sampled_lengths == 0) & (samples.sampled_lengths > 0))
