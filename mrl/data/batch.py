"""A prompt, and the batch that is trained on: sequences with what a loss takes of each token; numpy, no torch."""

from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

import numpy as np

from mrl.data.samples import Sequences, of, positions

Array = TypeVar("Array")  # np.ndarray on the host, a tensor on the device


@dataclass(frozen=True)
class Prompt:
    """One validated row of a data set, tokenised."""

    prompt_id: int  # position of the row in the loaded data set, stable over runs and resumes
    token_ids: tuple[int, ...]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TokenValues(Generic[Array]):
    """What a loss takes of each response token beside its log-probability under the current weights.

    Flat [response tokens] in a TrainBatch, [rows, response_length] in a micro-batch; None: not there.
    """

    # float32: of the anchor of the trust region
    old_log_probs: Array | None = field(default=None, **of("response token"))
    advantages: Array | None = field(default=None, **of("response token"))  # float32
    ref_log_probs: Array | None = field(default=None, **of("response token"))  # float32
    # float32: of the off-policy correction; None: all 1
    loss_weights: Array | None = field(default=None, **of("response token"))
    # bool: tokens that the loss treats apart; the actor sets it
    selected: Array | None = field(default=None, **of("response token"))

    @property
    def token_values(self) -> dict[str, Array | None]:
        """These five by name."""
        return {f.name: getattr(self, f.name) for f in fields(TokenValues)}


@dataclass(frozen=True)
class TrainBatch(Sequences, TokenValues[np.ndarray]):
    """Rows are ordered by (group_id, sample_id), so a slice of whole prompts is a slice of rows."""

    temperature: np.ndarray = field(**of("row", np.float32))
    # bool: false where rejected; None: nothing was
    keep: np.ndarray | None = field(default=None, kw_only=True, **of("response token"))

    @classmethod
    def of(cls, sequences: Sequences, temperature: float) -> "TrainBatch":
        """Sequences that were all sampled at one temperature."""
        own = {f.name: getattr(sequences, f.name) for f in fields(Sequences)}
        return cls(**own, temperature=np.full(len(sequences), temperature, np.float32))

    def places_of(self, rows: np.ndarray) -> np.ndarray:
        """int64: where the response tokens of `rows` stand in a flat column."""
        return positions(self.response_lengths, rows)

    @property
    def loss_mask(self) -> np.ndarray:
        """bool [response tokens]: those that are trained on and counted in the loss's denominators."""
        return np.ones(len(self.rollout_log_probs), bool) if self.keep is None else self.keep
