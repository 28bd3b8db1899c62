"""Routes: which experts the engine's routers chose for each token of a sample, to be chosen again in training (R3).

Plain numpy.

A sample's routes are [tokens, MoE layers, topk], prompt then response. Of a (token, layer) of which nothing is known
all are `missing_in` their dtype: -1, in a byte without a sign 255. A router never names an expert twice, so 255
throughout is no route of 256 experts, of which at least two are chosen. Nobody knows those of the last token, which was
sampled and never computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from mrl.errors import DataError

MISSING = -1  # where there is a sign, and in what an engine tells
ASKED = "mrl_routes"  # marks requests to an engine whose routes are wanted, where mrl collects them itself


def missing_in(dtype: Any) -> int:
    """What stands for an unknown route in integers of a NumPy or torch dtype."""
    if str(dtype).endswith("uint8"):
        return 255
    return MISSING


def is_missing(routes: Any) -> Any:
    """bool [...]: of which nothing is known, of routes [..., topk], arrays of NumPy or torch tensors."""
    return (routes == missing_in(routes.dtype)).all(-1)


def recoded(routes: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Writes routes in another dtype that holds all their experts: a checkpoint may have them in a wider one."""
    if routes.dtype == dtype:
        return routes
    return np.where(is_missing(routes)[..., None], missing_in(dtype), routes.astype(np.int64)).astype(dtype)


def end_to_end(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Routes of tokens one after the other, in the dtype of the first part."""
    return np.concatenate([recoded(part, parts[0].dtype) for part in parts])


@dataclass(frozen=True)
class RoutesHere:
    """Routes of some of a batch's tokens: those that a rank computes, in the layers that it has."""

    places: np.ndarray  # int64 [tokens of the batch]: row of `values`; -1: not here
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
    """What a model's routes look like."""

    num_layers: int  # of the model; engines tell of all of them
    moe_layers: tuple[int, ...]  # numbers (from 0) of the layers that have experts
    topk: int
    num_experts: int

    @classmethod
    def of(cls, model: HasExperts) -> "RouteShape":
        """The shape of routes through all of the model's layers with experts."""
        return cls(model.num_layers, model.moe_layers, model.num_experts_per_tok, model.num_experts)

    @property
    def per_token(self) -> tuple[int, int]:
        """The shape of one token's routes: (MoE layers, topk)."""
        return len(self.moe_layers), self.topk

    @property
    def dtype(self) -> np.dtype:
        """The narrowest that holds every expert and tells what is missing: a step of a large model has gigabytes of
        routes.
        """
        if self.num_experts <= 128:
            return np.dtype(np.int8)
        return np.dtype(np.uint8 if self.num_experts < 256 or (self.num_experts == 256 and self.topk > 1) else np.int16)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's routes."""
        return prod(self.per_token) * self.dtype.itemsize

    def from_engine(self, given: np.ndarray | None, tokens: int, whose: str) -> np.ndarray | None:
        """Routes of a sample of `tokens` tokens, prompt and response, from an engine's [tokens - 1, layers of the
        model, topk].

        None stays None. Raises DataError that names `whose` and says what is wrong.
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
        """Checks routes [tokens, MoE layers, topk], MISSING where they are, and returns them in `dtype`.

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
        # as narrow as can be before they are sorted, and with a sign
        signed = routes.astype(np.promote_types(self.dtype, np.int8))
        ordered = np.sort(signed, axis=-1)
        repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & (ordered[..., 0] != MISSING)
        partly = (ordered[..., 0] == MISSING) & (ordered[..., -1] != MISSING)
        for wrong, what in ((partly, "is missing in part"), (repeated, "names an expert twice")):
            if wrong.any():
                raise DataError(f"{whose}: the route {self._at(routes, wrong)} {what}")
        return signed.astype(self.dtype)  # of a byte without a sign -1 is 255

    def _at(self, routes: np.ndarray, wrong: np.ndarray) -> str:
        """The first of what is wrong and where it stands."""
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        return f"{routes[where].tolist()} at token {where[0]}, layer {self.moe_layers[where[1]]}"
