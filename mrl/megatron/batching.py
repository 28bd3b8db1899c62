"""Which rows of a batch go through the model together, on which data-parallel rank. Pure numpy.

Every data-parallel rank gets the same number of micro-batches, because with expert parallelism each forward is a collective over them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mrl.data.batch import TrainBatch
from mrl.errors import DataError


@dataclass(frozen=True)
class MicroBatch:
    """Rows that share one forward. Of a filler, which only keeps ranks in step, nothing counts."""

    rows: np.ndarray  # int64, indices into the batch
    is_filler: bool = False


@dataclass(frozen=True)
class MicroArrays:
    """One micro-batch as the model takes it, right-padded. `length` is padded to the alignment, `response_length` is the longest here."""

    input_ids: np.ndarray  # int64 [rows, length]
    predictors: np.ndarray  # int64 [rows, response_length]: position whose logits predict response token t
    targets: np.ndarray  # int64 [rows, response_length]
    response_mask: np.ndarray  # bool [rows, response_length]: tokens that count, rejected ones not
    temperature: np.ndarray  # float32 [rows]
    old_log_probs: np.ndarray | None  # float32 [rows, response_length]
    advantages: np.ndarray | None  # float32 [rows, response_length]
    loss_weights: np.ndarray | None = None  # float32 [rows, response_length]
    selected: np.ndarray | None = None  # bool [rows, response_length]


def mini_batches(num_rows: int, rows_per_mini_batch: int) -> Iterator[slice]:
    """Consecutive slices of rows, in order; the last may be shorter."""
    for start in range(0, num_rows, rows_per_mini_batch):
        yield slice(start, min(start + rows_per_mini_batch, num_rows))


def split_micro_batches(
    lengths: np.ndarray, data_parallel_size: int, micro_batch_size: int, count_multiple: int = 1
) -> tuple[tuple[MicroBatch, ...], ...]:
    """[data-parallel rank][micro-batch]; every row is in exactly one micro-batch that is no filler.

    `lengths` [rows] are tokens per row. Rows are dealt over ranks by falling length, so ranks get alike work, rows of one micro-batch have
    alike lengths and the largest forward comes first. No micro-batch has more than `micro_batch_size` rows. Their number on each rank is a
    multiple of `count_multiple`, as the interleaved pipeline schedule needs of the number of stages.
    """
    order = np.argsort(-lengths, kind="stable")
    shares = [order[rank::data_parallel_size] for rank in range(data_parallel_size)]
    count = -(-len(shares[0]) // micro_batch_size)
    count = -(-count // count_multiple) * count_multiple
    filler = MicroBatch(order[-1:], is_filler=True)
    return tuple(tuple(MicroBatch(rows) if len(rows) else filler for rows in np.array_split(share, count)) for share in shares)


def micro_arrays(batch: TrainBatch, micro: MicroBatch, align: int) -> MicroArrays:
    """Cuts the rows out and down to their own longest lengths. Sequence parallelism needs lengths that are a multiple of `align`."""
    rows = batch.rows(micro.rows)
    longest = int((rows.prompt_lengths + rows.response_lengths).max())
    length = -(-longest // align) * align
    input_ids = np.zeros((len(rows), length), dtype=np.int64)
    input_ids[:, :longest] = rows.input_ids[:, :longest]
    width = max(int(rows.response_lengths.max()), 1)
    mask = rows.loss_mask[:, :width] & (not micro.is_filler)
    positions = rows.prompt_lengths[:, None] + np.arange(width)[None]
    positions = np.where(rows.response_mask[:, :width], positions, 1)
    return MicroArrays(
        input_ids=input_ids,
        predictors=positions - 1,
        targets=np.take_along_axis(input_ids, positions, axis=1) if length > 1 else np.zeros_like(positions),
        response_mask=mask,
        temperature=rows.temperature,
        old_log_probs=_cut(rows.old_log_probs, width),
        advantages=_cut(rows.advantages, width),
        loss_weights=_cut(rows.loss_weights, width),
        selected=_cut(rows.selected, width),
    )


def _cut(values: np.ndarray | None, width: int) -> np.ndarray | None:
    return None if values is None else values[:, :width]


def check_batch(batch: TrainBatch) -> None:
    """Raises DataError for rows that no model can be asked about."""
    if len(batch) == 0:
        raise DataError("a training batch without rows")
    if int(batch.prompt_lengths.min()) < 1:
        row = int(batch.prompt_lengths.argmin())
        raise DataError(f"row {row} of the batch has an empty prompt: nothing predicts its first response token")
    longest = int((batch.prompt_lengths + batch.response_lengths).max())
    if longest > batch.input_ids.shape[1]:
        raise DataError(f"a row of the batch claims {longest} tokens and the batch is {batch.input_ids.shape[1]} wide")
