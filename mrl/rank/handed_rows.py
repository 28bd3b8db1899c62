"""Hands columns of tokens from rank to rank: between the actor's replicas and those of a second model, which have other
rows of the step.

    driver                                           ranks
    lengths --cut--> rows of a second model's replicas
                                                 --> score_by: fetch those rows, compute columns (second_rows.py)
    references to columns                        <-- each replica's result rank: HandedRows
    the same references                          --> score: each actor replica picks its rows, by `with_handed`
    references to a critic's returns             <-- each actor replica's result rank
    the same references                          --> update_critic: each replica of the critic picks its rows

The driver never holds a number of a token. It passes on references (step_batch.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mrl.data.batch import TrainBatch
from mrl.data.samples import Samples
from mrl.model.layout import TrainLayout
from mrl.store.response_store import ResponseStore


@dataclass(frozen=True)
class HandedRows:
    """Columns of the sampled tokens of some rows of a step."""

    rows: np.ndarray  # int64 [rows]: their numbers in the step
    sampled: np.ndarray  # int64 [rows]: sampled tokens of each
    columns: Mapping[str, np.ndarray]  # [sampled tokens, ...], rows end to end, by their names in a TrainBatch

    def among(self, rows: np.ndarray) -> "HandedRows":
        """Keeps the rows that are among `rows`."""
        kept = np.isin(self.rows, rows)
        tokens = np.repeat(kept, self.sampled)
        columns = {name: values[tokens] for name, values in self.columns.items()}
        return HandedRows(self.rows[kept], self.sampled[kept], columns)


def with_handed(batch: TrainBatch, numbers: np.ndarray, parts: Sequence[HandedRows]) -> TrainBatch:
    """Returns the batch with the columns of `parts`. Context, and rows that nobody handed out, get 0.

    `numbers` [rows], ascending, are the numbers of its rows in the step.
    """
    columns: dict[str, np.ndarray] = {}
    for part in parts:
        here = part.among(numbers)
        indices = batch.sampled_indices(np.searchsorted(numbers, here.rows))
        for name, values in here.columns.items():
            if name not in columns:
                columns[name] = np.zeros((int(batch.response_lengths.sum()), *values.shape[1:]), values.dtype)
            columns[name][indices] = values
    return replace(batch, **columns)


def as_counted(stored: ResponseStore, samples: Samples) -> Samples:
    """Makes responses context whose log-probs are not numbers, as the driver does."""
    return samples.as_context((stored.rows.sampled_lengths == 0) & (samples.sampled_lengths > 0))


def answers_of(layout: TrainLayout, rows: Sequence[np.ndarray], answers: Sequence[Any]) -> list[tuple[np.ndarray, Any]]:
    """Returns the answer of each replica's result rank, with the replica's `rows`. `answers` are in rank order."""
    ranks = [layout.dense_coords(rank) for rank in range(layout.world_size)]
    return [
        (rows[rank.dp], answer)
        for rank, answer in zip(ranks, answers, strict=True)
        if rank.tp == rank.cp == 0 and rank.pp == layout.pipeline - 1
    ]


def needed_by(rows: np.ndarray, answers: Sequence[tuple[np.ndarray, Any]]) -> list[Any]:
    """Returns the answers of `answers_of` that have some of `rows`."""
    return [answer for held, answer in answers if np.isin(held, rows).any()]
