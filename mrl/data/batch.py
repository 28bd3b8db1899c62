"""What travels between generation, reward and training: plain integers, floats and numpy arrays; no torch."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One validated row of a data set, tokenised."""

    prompt_id: int  # position of the row in the loaded data set, stable over runs and resumes
    token_ids: tuple[int, ...]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One response. Token ids in, token ids out: nothing is ever re-tokenised."""

    prompt_id: int
    group_id: int  # samples of one group share a prompt within one step
    sample_id: int  # unique and stable within one step
    seed: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_log_probs: tuple[float, ...]  # processed, at the sampling temperature; one per response token
    stop_reason: str  # "stop" or "length"
    weight_version: int
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)  # see mrl.data.routes; None: the engine told of none


@dataclass(frozen=True)
class TrainBatch:
    """Samples of one step as arrays, right-padded; response arrays are aligned so that column t is response token t.

    Rows are ordered by (group_id, sample_id), so a slice of whole prompts is a slice of rows.
    """

    input_ids: np.ndarray  # int64 [batch, length], prompt then response then pad
    prompt_lengths: np.ndarray  # int64 [batch]
    response_lengths: np.ndarray  # int64 [batch]
    temperature: np.ndarray  # float32 [batch]
    rollout_log_probs: np.ndarray  # float32 [batch, response_length]
    old_log_probs: np.ndarray | None = None  # float32 [batch, response_length]
    advantages: np.ndarray | None = None  # float32 [batch, response_length]
    keep: np.ndarray | None = None  # bool [batch, response_length]: false where a token was rejected; None: none was
    loss_weights: np.ndarray | None = None  # float32 [batch, response_length]: of the off-policy correction; None: all 1
    selected: np.ndarray | None = None  # bool [batch, response_length]: tokens that the loss treats apart; the actor sets it
    ref_log_probs: np.ndarray | None = None  # float32 [batch, response_length]
    routes: np.ndarray | None = None  # int8 or int16 [tokens of all rows, MoE layers, topk], rows end to end; see mrl.data.routes

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def response_mask(self) -> np.ndarray:
        """bool [batch, response_length]: true where a response token stands."""
        return np.arange(self.rollout_log_probs.shape[1])[None] < self.response_lengths[:, None]

    @property
    def loss_mask(self) -> np.ndarray:
        """bool [batch, response_length]: the response tokens that are trained on and counted in the loss's denominators."""
        return self.response_mask if self.keep is None else self.response_mask & self.keep

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The fields that there are, by name; `TrainBatch(**arrays)` is the batch again."""
        return {f.name: array for f in fields(self) if (array := getattr(self, f.name)) is not None}

    def rows(self, index: np.ndarray | slice) -> "TrainBatch":
        """The same batch with only the given rows; widths are unchanged."""
        by_row = {name: array[index] for name, array in self.arrays.items() if name != "routes"}
        return replace(self, **by_row, routes=None if self.routes is None else self._routes_of(index))

    def _routes_of(self, index: np.ndarray | slice) -> np.ndarray:
        """Routes have no padding: of long samples they are most of the batch."""
        ends = np.cumsum(self.prompt_lengths + self.response_lengths)
        starts, rows = np.concatenate([[0], ends]), np.arange(len(self))[index]
        if isinstance(index, slice) and index.step in (None, 1) and len(rows):
            return self.routes[starts[rows[0]] : ends[rows[-1]]]
        return np.concatenate([self.routes[:0], *(self.routes[starts[row] : ends[row]] for row in rows)])


def collate(samples: list[Sample], temperature: float, pad_id: int) -> TrainBatch:
    """Pads samples, in the given order, into a TrainBatch."""
    prompt = np.array([len(s.prompt_ids) for s in samples], dtype=np.int64)
    response = np.array([len(s.response_ids) for s in samples], dtype=np.int64)
    ids = np.full((len(samples), int((prompt + response).max())), pad_id, dtype=np.int64)
    log_probs = np.zeros((len(samples), int(response.max())), dtype=np.float32)
    for row, s in enumerate(samples):
        ids[row, : prompt[row] + response[row]] = s.prompt_ids + s.response_ids
        log_probs[row, : response[row]] = s.rollout_log_probs
    temperatures = np.full(len(samples), temperature, np.float32)
    return TrainBatch(ids, prompt, response, temperatures, log_probs, routes=_joined_routes(samples))


def _joined_routes(samples: list[Sample]) -> np.ndarray | None:
    """Routes of all samples end to end, -1 where a sample has none; None where none has any."""
    known = next((s.routes for s in samples if s.routes is not None), None)
    if known is None:
        return None
    sizes = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
    joined = np.full((sum(sizes), *known.shape[1:]), -1, known.dtype)
    for s, end, size in zip(samples, np.cumsum(sizes), sizes, strict=True):
        if s.routes is not None:
            joined[end - size : end] = s.routes
    return joined
