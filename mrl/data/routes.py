"""Routes: the experts that the engine's routers chose for each token, which training chooses again (R3). numpy only.

A sample's routes are [tokens, MoE layers, topk], prompt then response. Where a (token, layer) is unknown, all its
entries are `missing_in` their dtype: -1, or 255 in an unsigned byte. 255 throughout is never a real route of 256
experts: at least two are chosen, and a router never names one twice. The last token has no known routes, since it was
sampled and never computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from mrl.errors import DataError

MISSING = -1  # in signed dtypes, and in the routes that an engine returns
ASKED = "mrl_routes"  # marks requests whose routes are wanted, where mrl itself collects them in the engine


def missing_in(dtype: Any) -> int:
    """Returns the number that stands for an unknown route in an integer dtype of NumPy or torch."""
    if str(dtype).endswith("uint8"):
        return 255
    return MISSING


def is_missing(routes: Any) -> Any:
    """Returns bool [...]: true where routes [..., topk] are unknown. Takes arrays of NumPy or tensors of torch."""
    return (routes == missing_in(routes.dtype)).all(-1)


def recoded(routes: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Writes routes in another dtype that holds all their experts. A checkpoint may have them in a wider one."""
    if routes.dtype == dtype:
        return routes
    return np.where(is_missing(routes)[..., None], missing_in(dtype), routes.astype(np.int64)).astype(dtype)


def end_to_end(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Joins routes of tokens, one after the other, in the dtype of the first part."""
    return np.concatenate([recoded(part, parts[0].dtype) for part in parts])


@dataclass(frozen=True)
class RoutesHere:
    """The routes of those tokens of a batch that a rank computes, in the layers that it has."""

    value_rows: np.ndarray  # int64 [tokens of the batch]: row of `values`; -1: not on this rank
    values: np.ndarray  # [tokens here, layers here, topk]


class HasExperts(Protocol):
    """A model with experts, as mrl.model describes it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def moe_layers(self) -> tuple[int, ...]: ...
    @property
    def num_experts_per_tok(self) -> int: ...
    @property
    def num_experts(self) -> int: ...


@dataclass(frozen=True)
class RouteShape:
    """The shape and dtype of a model's routes."""

    num_layers: int  # layers of the model; engines return routes of all of them
    moe_layers: tuple[int, ...]  # numbers (from 0) of the layers with experts
    topk: int
    num_experts: int

    @classmethod
    def of(cls, model: HasExperts) -> "RouteShape":
        """Returns the shape of routes through all layers of a model that have experts."""
        return cls(model.num_layers, model.moe_layers, model.num_experts_per_tok, model.num_experts)

    @property
    def per_token(self) -> tuple[int, int]:
        """The shape of one token's routes: (MoE layers, topk)."""
        return len(self.moe_layers), self.topk

    @property
    def dtype(self) -> np.dtype:
        """The narrowest dtype that holds every expert and the mark of missing ones.

        A step of a large model has gigabytes of routes.
        """
        if self.num_experts <= 128:
            return np.dtype(np.int8)
        fits_a_byte = self.num_experts < 256 or (self.num_experts == 256 and self.topk > 1)
        return np.dtype(np.uint8 if fits_a_byte else np.int16)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's routes."""
        return prod(self.per_token) * self.dtype.itemsize

    def from_engine(self, given: np.ndarray | None, tokens: int, whose: str) -> np.ndarray | None:
        """Makes the routes of a sample of `tokens` tokens, prompt and response, from those of an engine.

        `given` is [tokens - 1, layers of the model, topk], or None, which stays None. Raises DataError that names
        `whose` and says what is wrong.
        """
        if given is None:
            return None
        if given.ndim != 3 or given.shape[1] != self.num_layers:
            expected = f"[{tokens - 1}, {self.num_layers}, {self.topk}]"
            raise DataError(
                f"{whose}: routes are {list(given.shape)}, expected {expected} (computed tokens, "
                "layers, experts per token)"
            )
        if len(given) != tokens - 1:
            raise DataError(
                f"{whose}: routes of {len(given)} tokens, expected {tokens - 1}: all but the "
                "last, which is not computed"
            )
        if not np.issubdtype(given.dtype, np.integer):
            raise DataError(f"{whose}: routes are {given.dtype}, expected integers")
        of_moe = given if len(self.moe_layers) == self.num_layers else given[:, list(self.moe_layers)]
        last = np.full((1, *self.per_token), missing_in(self.dtype), self.dtype)
        return np.concatenate([self.checked(of_moe, tokens - 1, whose), last])

    def checked(self, routes: np.ndarray, tokens: int, whose: str) -> np.ndarray:
        """Checks routes [tokens, MoE layers, topk], MISSING where unknown, and returns them in `dtype`.

        Raises DataError that names `whose` and says what is wrong.
        """
        if routes.shape != (tokens, *self.per_token):
            raise DataError(
                f"{whose}: routes are {list(routes.shape)}, expected {[tokens, *self.per_token]} "
                "(tokens, MoE layers, topk)"
            )
        if not np.issubdtype(routes.dtype, np.integer):
            raise DataError(f"{whose}: routes are {routes.dtype}, expected integers")
        if not routes.size:
            return routes.astype(self.dtype)
        if int(routes.max()) >= self.num_experts or int(routes.min()) < MISSING:
            wrong = (routes >= self.num_experts) | (routes < MISSING)
            allowed = f"no expert of 0 to {self.num_experts - 1}, nor {MISSING} for a missing route"
            raise DataError(f"{whose}: {self._at(routes, wrong)} is {allowed}")
        # signed and as narrow as possible, so that sorting is quick
        signed = routes.astype(np.promote_types(self.dtype, np.int8))
        ordered = np.sort(signed, axis=-1)
        repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & (ordered[..., 0] != MISSING)
        partly = (ordered[..., 0] == MISSING) & (ordered[..., -1] != MISSING)
        for wrong, what in ((partly, "is missing in part"), (repeated, "names an expert twice")):
            if wrong.any():
                raise DataError(f"{whose}: the route {self._at(routes, wrong)} {what}")
        return signed.astype(self.dtype)  # -1 becomes 255 in an unsigned byte

    def _at(self, routes: np.ndarray, wrong: np.ndarray) -> str:
        """Returns the first wrong value and where it stands."""
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        return f"{routes[where].tolist()} at token {where[0]}, layer {self.moe_layers[where[1]]}"
