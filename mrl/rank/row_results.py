"""What a rank checks of the rows of a batch, and what it returns of them. Pure numpy."""

from dataclasses import dataclass, field

import numpy as np

from mrl.data.batch import TrainBatch
from mrl.errors import DataError
from mrl.model import ModelSpec
from mrl.rank.cut import MiniBatchLoad


@dataclass(frozen=True)
class RowResult:
    """Log-probabilities of the rows of a batch that one data-parallel replica computed."""

    rows: np.ndarray  # int64 [rows]: row numbers in the batch
    log_probs: np.ndarray  # float32 [sampled tokens of these rows], rows end to end
    entropy: tuple[float, float]  # (sum over sampled tokens in nats, number of tokens)
    # from a teacher, [sampled tokens of these rows, k]: its likeliest tokens, int32, and their log-probs, float32
    top_ids: np.ndarray | None = None
    top_log_probs: np.ndarray | None = None


@dataclass(frozen=True)
class UpdateResult:
    """The result of an update of several mini-batches for the driver, from one rank or joined over all ranks.

    `parts`: metrics that add up over mini-batches and ranks, name -> (sum of value x weight, sum of weight). `loads`:
    one for each mini-batch, from a single rank; empty on the others. `old`: with an on-policy anchor, log-probs of the
    rows before the update, from ranks of the last pipeline stage. `spent`: time and peaks of memory on this rank, which
    differ between updates.
    """

    parts: list[dict[str, tuple[float, float]]]
    loads: list[MiniBatchLoad]
    old: RowResult | None = None
    spent: dict[str, tuple[float, float]] = field(default_factory=dict, compare=False)


def check_batch(batch: TrainBatch, model: ModelSpec, moe_layers: int) -> None:
    """Raises DataError for rows that the model cannot compute.

    `moe_layers`: number of this rank's layers with experts.
    """
    if len(batch) == 0:
        raise DataError("a training batch without rows")
    if int(batch.prompt_lengths.min()) < 1:
        row = int(batch.prompt_lengths.argmin()) + 1
        raise DataError(f"row {row} of the batch has an empty prompt: nothing predicts its first response token")
    if batch.image_counts is not None and batch.positions is None:
        raise DataError("rows have images, and the model was loaded without its vision tower: it would not see them")
    if batch.branch_counts is not None:
        _check_branches(batch)
    claimed = int(batch.lengths.sum())
    if claimed != len(batch.token_ids):
        raise DataError(f"the rows of the batch claim {claimed} tokens and it has {len(batch.token_ids)}")
    tokens = claimed if batch.route_rows is None else int((batch.route_rows >= 0).sum())
    expected = (tokens, moe_layers, model.num_experts_per_tok)
    if batch.routes is not None and batch.routes.shape != expected:
        raise DataError(
            f"the batch's routes are {list(batch.routes.shape)}, expected {list(expected)} (tokens, MoE layers, topk)"
        )


def _check_branches(batch: TrainBatch) -> None:
    """Raises DataError if the first token of a later branch is trained on: no token predicts it."""
    branch_row = np.repeat(np.arange(len(batch)), batch.branch_counts)
    begins = np.cumsum(batch.response_lengths) - batch.response_lengths
    later = np.append(False, branch_row[1:] == branch_row[:-1])
    first = (begins[branch_row] + batch.branch_starts)[later]
    wrong = np.flatnonzero(batch.is_sampled[first])
    if len(wrong):
        row = int(branch_row[later][wrong[0]]) + 1
        raise DataError(f"row {row} of the batch has a branch without a prompt: nothing predicts its first token")
