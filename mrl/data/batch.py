"""A prompt, and the batch that is trained on: sequences with what a loss takes of each token; numpy, no torch."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

import numpy as np

from mrl.data.routes import RoutesHere
from mrl.data.row_columns import of, positions
from mrl.data.samples import Sequences

Array = TypeVar("Array")  # np.ndarray on the host, a tensor on the device


@dataclass(frozen=True)
class Prompt:
    """One validated row of a data set, tokenised."""

    prompt_id: int  # position of the row in the loaded data set, stable over runs and resumes
    token_ids: tuple[int, ...]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    acts: bool = False  # its responses act on what the row names; see mrl.environments.offer
    messages: list[dict[str, str]] | None = None  # of which the tokens are, where an agent is told of them

    @property
    def acting_row(self) -> dict[str, Any] | None:
        """What an engine is told of the row; None: its tokens are enough."""
        if not self.acts:
            return None
        row = {"data_source": self.data_source, "ground_truth": self.ground_truth, "extra_info": self.extra_info}
        if self.messages is None:
            return row
        return row | {"prompt": self.messages}


@dataclass(frozen=True, kw_only=True)
class TokenValues(Generic[Array]):
    """What a loss takes of each response token beside its log-probability under the current weights.

    Flat [response tokens] in a TrainBatch, [rows, response_length] in a micro-batch; None: not there.
    """

    # float32: of the anchor of the trust region
    old_log_probs: Array | None = field(default=None, **of("response token"))
    advantages: Array | None = field(default=None, **of("response token"))  # float32
    ref_log_probs: Array | None = field(default=None, **of("response token"))  # float32
    teacher_log_probs: Array | None = field(default=None, **of("response token"))  # float32
    # [response tokens, words]: a teacher's likeliest words, int32, and their log-probs, float32
    teacher_words: Array | None = field(default=None, **of("response token"))
    of_teacher_words: Array | None = field(default=None, **of("response token"))
    # float32: of the off-policy correction; None: all 1
    loss_weights: Array | None = field(default=None, **of("response token"))
    critic_values: Array | None = field(default=None, **of("response token"))  # float32: before the step's updates
    returns: Array | None = field(default=None, **of("response token"))  # float32: what values are trained towards
    # bool: tokens that the loss treats apart; the actor sets it
    selected: Array | None = field(default=None, **of("response token"))

    @property
    def token_values(self) -> dict[str, Array | None]:
        """The columns by name."""
        return {f.name: getattr(self, f.name) for f in fields(TokenValues)}


@dataclass(frozen=True)
class TrainBatch(Sequences, TokenValues[np.ndarray]):
    """Rows are ordered by (group_id, sample_id), so a slice of whole prompts is a slice of rows.

    Routes are those of the rank that has the batch: layers of its model chunks. With `route_places` they are of some
    of the tokens alone, and belong to no rows: every part of the batch has them all.
    """

    temperature: np.ndarray = field(**of("row", np.float32))
    # bool: false where rejected; None: nothing was
    keep: np.ndarray | None = field(default=None, kw_only=True, **of("response token"))

    route_places: np.ndarray | None = field(
        default=None, kw_only=True, **of("token")
    )  # int64: row of `routes`; -1: not here

    @classmethod
    def of(cls, sequences: Sequences, temperature: float, routes: RoutesHere | None = None) -> "TrainBatch":
        """Sequences that were all sampled at one temperature; `routes` in place of their own."""
        own = {f.name: getattr(sequences, f.name) for f in fields(Sequences)}
        if routes is not None:
            own |= {"routes": routes.values, "route_places": routes.places}
        return cls(**own, temperature=np.full(len(sequences), temperature, np.float32))

    def rows(self, index: np.ndarray | slice) -> "TrainBatch":
        """The given rows; routes stay whole where rows find theirs by place."""
        if self.route_places is None:
            return super().rows(index)
        return replace(super(TrainBatch, replace(self, routes=None)).rows(index), routes=self.routes)

    @property
    def places_of_routes(self) -> np.ndarray:
        """int64 [tokens]: row of `routes`, which there are; -1: none here."""
        if self.route_places is None:
            return np.arange(len(self.token_ids))
        return self.route_places

    def places_of(self, rows: np.ndarray) -> np.ndarray:
        """int64: where the response tokens of `rows` stand in a flat column."""
        return positions(self.response_lengths, rows)

    def sampled_places_of(self, rows: np.ndarray) -> np.ndarray:
        """int64: the same of those that were sampled."""
        places = self.places_of(rows)
        if self.sampled is None:
            return places
        return places[self.sampled[places]]

    @property
    def loss_mask(self) -> np.ndarray:
        """bool [response tokens]: those that are trained on and counted in the loss's denominators."""
        if self.keep is None:
            return self.is_sampled
        return self.is_sampled & self.keep
