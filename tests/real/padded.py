"""A batch as rectangles, the form of the oracles that compute one sequence at a time;
`packed` is what the product takes.
"""

from dataclasses import dataclass, fields

import numpy as np

from mrl.data.batch import TrainBatch
from mrl.data.row_columns import positions
from mrl.data.samples import Sample, packed


@dataclass(frozen=True)
class PaddedBatch:
    """Arrays [batch, response_length] but for those said otherwise; column t is response token t."""

    input_ids: np.ndarray  # int64 [batch, length], prompt then response then pad
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray
    temperature: np.ndarray  # [batch]
    rollout_log_probs: np.ndarray
    old_log_probs: np.ndarray | None = None
    advantages: np.ndarray | None = None
    keep: np.ndarray | None = None
    loss_weights: np.ndarray | None = None
    ref_log_probs: np.ndarray | None = None
    routes: np.ndarray | None = None  # [tokens of all rows, MoE layers, topk]

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def response_mask(self) -> np.ndarray:
        return np.arange(self.rollout_log_probs.shape[1])[None] < self.response_lengths[:, None]

    @property
    def loss_mask(self) -> np.ndarray:
        return self.response_mask if self.keep is None else self.response_mask & self.keep

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {f.name: array for f in fields(self) if (array := getattr(self, f.name)) is not None}

    def packed(self) -> TrainBatch:
        """The same without padding."""
        flat = {name: array[self.response_mask] for name, array in self.arrays.items() if name in _FLAT}
        tokens = np.arange(self.input_ids.shape[1])[None] < (self.prompt_lengths + self.response_lengths)[:, None]
        return TrainBatch(
            prompt_lengths=self.prompt_lengths, response_lengths=self.response_lengths, temperature=self.temperature,
            routes=self.routes,
            token_ids=self.input_ids[tokens].astype(np.int32), **flat,
        )  # fmt: skip


_FLAT = ("rollout_log_probs", "old_log_probs", "advantages", "keep", "loss_weights", "ref_log_probs")


def collate(samples: list[Sample], temperature: float, pad_id: int) -> PaddedBatch:
    """Pads samples, in the given order."""
    columns = packed(samples)
    mask = np.arange(columns.response_lengths.max())[None] < columns.response_lengths[:, None]
    tokens = np.arange(columns.lengths.max())[None] < columns.lengths[:, None]
    ids, log_probs = np.full(tokens.shape, pad_id, np.int64), np.zeros(mask.shape, np.float32)
    ids[tokens], log_probs[mask] = columns.token_ids, columns.rollout_log_probs
    temperatures = np.full(len(samples), temperature, np.float32)
    return PaddedBatch(
        ids, columns.prompt_lengths, columns.response_lengths, temperatures, log_probs, routes=columns.routes
    )


def read_batch(path: str) -> TrainBatch:
    """What the arrays of a PaddedBatch in an npz file stand for."""
    return PaddedBatch(**np.load(path)).packed()


def in_rows(batch: TrainBatch, rows: np.ndarray, flat: np.ndarray) -> np.ndarray:
    """[rows, response_length of the batch] from a result's [response tokens of `rows`]; 0 outside the responses."""
    padded = np.zeros((len(rows), int(batch.response_lengths.max())), flat.dtype)
    padded[np.arange(padded.shape[1])[None] < batch.response_lengths[rows][:, None]] = flat
    return padded


def on_all_rows(batch: TrainBatch, rows: np.ndarray, flat: np.ndarray) -> np.ndarray:
    """[response tokens of the batch] from those of `rows`; 0 of the others."""
    full = np.zeros(len(batch.rollout_log_probs), flat.dtype)
    full[positions(batch.response_lengths, rows)] = flat
    return full
