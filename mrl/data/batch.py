"""A prompt, and the batch that is trained on: sequences with the loss's inputs for each token. numpy, no torch."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

import numpy as np

from mrl.data.routes import RoutesHere
from mrl.data.row_columns import of, positions
from mrl.data.samples import RowImage, Sequences

Array = TypeVar("Array")  # np.ndarray on the host, a tensor on the device


@dataclass(frozen=True)
class Prompt:
    """One validated, tokenised row of a data set."""

    prompt_id: int  # position of the row in the loaded data set, stable over runs and resumes
    token_ids: tuple[int, ...]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    acts: bool = False  # its responses call tools or environments of this row (mrl.acting.offer)
    messages: list[dict[str, str]] | None = None  # the messages behind the tokens, where an agent gets them
    images: tuple[RowImage, ...] = ()  # whose tokens are among `token_ids`

    @property
    def acting_row(self) -> dict[str, Any] | None:
        """The row as an engine gets it; None where the tokens are enough."""
        if not self.acts:
            return None
        row = {"data_source": self.data_source, "ground_truth": self.ground_truth, "extra_info": self.extra_info}
        if self.messages is None:
            return row
        return row | {"prompt": self.messages}


@dataclass(frozen=True, kw_only=True)
class TokenValues(Generic[Array]):
    """The inputs of the loss for each response token, beside its log-probability under the current weights.

    Columns are flat [response tokens] in a TrainBatch, and [rows, response_length] in a micro-batch. None: not
    computed.
    """

    # float32: of the policy that anchors the ratio
    old_log_probs: Array | None = field(default=None, **of("response token"))
    advantages: Array | None = field(default=None, **of("response token"))  # float32
    ref_log_probs: Array | None = field(default=None, **of("response token"))  # float32
    teacher_log_probs: Array | None = field(default=None, **of("response token"))  # float32
    # [response tokens, words]: a teacher's likeliest words, int32, and their log-probs, float32
    teacher_top_ids: Array | None = field(default=None, **of("response token"))
    teacher_top_log_probs: Array | None = field(default=None, **of("response token"))
    # float32: weights of the off-policy correction; None: all 1
    loss_weights: Array | None = field(default=None, **of("response token"))
    critic_values: Array | None = field(default=None, **of("response token"))  # float32: before the step's updates
    returns: Array | None = field(default=None, **of("response token"))  # float32: targets of the critic's values
    # bool: tokens that the loss treats differently; the actor sets it
    selected: Array | None = field(default=None, **of("response token"))

    @property
    def token_values(self) -> dict[str, Array | None]:
        """The columns by name."""
        return {f.name: getattr(self, f.name) for f in fields(TokenValues)}


@dataclass(frozen=True)
class TrainBatch(Sequences, TokenValues[np.ndarray]):
    """Sequences with the loss's inputs. Rows are ordered by (group_id, sample_id), so whole prompts are a slice of
    rows.

    Routes are those of this rank: of the layers of its model chunks. With `route_rows` they cover only some of the
    tokens. They then belong to no rows, and every part of the batch holds all of them.
    """

    temperature: np.ndarray = field(**of("row", np.float32))
    # bool: false for rejected tokens; None: none was rejected
    keep: np.ndarray | None = field(default=None, kw_only=True, **of("response token"))

    route_rows: np.ndarray | None = field(
        default=None, kw_only=True, **of("token")
    )  # int64: row of `routes`; -1: not on this rank
    # int32 [tokens, 3]: by time, row and column, where rows have images; a rank sets them (mrl.rank.vision)
    positions: np.ndarray | None = field(default=None, kw_only=True, **of("token"))

    @classmethod
    def of(cls, sequences: Sequences, temperature: float, routes: RoutesHere | None = None) -> "TrainBatch":
        """Makes a batch of sequences that were all sampled at one temperature. `routes` replace their own."""
        columns = {f.name: getattr(sequences, f.name) for f in fields(Sequences)}
        if routes is not None:
            columns |= {"routes": routes.values, "route_rows": routes.value_rows}
        return cls(**columns, temperature=np.full(len(sequences), temperature, np.float32))

    def rows(self, index: np.ndarray | slice) -> "TrainBatch":
        """Takes the given rows. Routes stay whole where `route_rows` point into them."""
        if self.route_rows is None:
            return super().rows(index)
        return replace(super(TrainBatch, replace(self, routes=None)).rows(index), routes=self.routes)

    @property
    def token_route_rows(self) -> np.ndarray:
        """The row of `routes` that belongs to each token, int64 [tokens]; -1 where this rank has none. Routes must be
        there.
        """
        if self.route_rows is None:
            return np.arange(len(self.token_ids))
        return self.route_rows

    def token_indices(self, rows: np.ndarray) -> np.ndarray:
        """Returns the positions of the response tokens of `rows` in a flat column, int64."""
        return positions(self.response_lengths, rows)

    def sampled_indices(self, rows: np.ndarray) -> np.ndarray:
        """Returns the positions of the sampled response tokens of `rows` in a flat column, int64."""
        indices = self.token_indices(rows)
        if self.sampled is None:
            return indices
        return indices[self.sampled[indices]]

    @property
    def loss_mask(self) -> np.ndarray:
        """The tokens that are trained on and counted in the loss's denominators, bool [response tokens]."""
        if self.keep is None:
            return self.is_sampled
        return self.is_sampled & self.keep
