"""Routes: which experts the engine's routers chose for each token of a sample, to be chosen again in training (R3).

Plain numpy.

A sample's routes are [tokens, MoE layers, topk], prompt then response; MISSING throughout a (token, layer) of which
nothing is known. Nobody knows them of the last token, which was sampled and never computed.
"""

from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

from mrl.errors import DataError

MISSING = -1
ASKED = "mrl_routes"  # marks requests to an engine whose routes are wanted, where mrl collects them itself


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
        """That of all its layers with experts."""
        return cls(model.num_layers, model.moe_layers, model.num_experts_per_tok, model.num_experts)

    @property
    def per_token(self) -> tuple[int, int]:
        """(MoE layers, topk)."""
        return len(self.moe_layers), self.topk

    @property
    def dtype(self) -> np.dtype:
        """The narrowest that holds every expert and MISSING: a step of a large model has gigabytes of routes."""
        return np.dtype(np.int8 if self.num_experts <= 128 else np.int16)

    @property
    def token_bytes(self) -> int:
        """Of one token's routes."""
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
        return np.concatenate(
            [self.checked(of_moe, tokens - 1, whose), np.full((1, *self.per_token), MISSING, self.dtype)]
        )

    def checked(self, routes: np.ndarray, tokens: int, whose: str) -> np.ndarray:
        """The same routes [tokens, MoE layers, topk] in `dtype`.

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
        routes = routes.astype(self.dtype)
        ordered = np.sort(routes, axis=-1)
        repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & (ordered[..., 0] != MISSING)
        partly = (ordered[..., 0] == MISSING) & (ordered[..., -1] != MISSING)
        for wrong, what in ((partly, "is missing in part"), (repeated, "names an expert twice")):
            if wrong.any():
                raise DataError(f"{whose}: the route {self._at(routes, wrong)} {what}")
        return routes

    def _at(self, routes: np.ndarray, wrong: np.ndarray) -> str:
        """The first of what is wrong and where it stands."""
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        return f"{routes[where].tolist()} at token {where[0]}, layer {self.moe_layers[where[1]]}"
