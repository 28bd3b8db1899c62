"""Collects the experts that vLLM 0.32's routers choose, request by request, where vLLM itself returns none.

Its `enable_return_routed_experts` works only with model runner V2, which needs Triton, so the CPU build refuses it. Its
routers report their choices all the same. This module assigns a step's choices to its requests, in the order of model
runner V1.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrl.data.routes import ASKED, MISSING
from mrl.errors import EnvironmentFault

_PLAIN_NAMES = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"  # a variable of vLLM


class RouteCapture:
    """Stands between a worker and its model runner.

    A request's routes are kept until `take` returns them or `forget` drops them.
    """

    def __init__(self, runner: Any, bind: Callable[[Any, "RouteCapture"], None]):
        """`bind(model, self)` makes every router of the model call `capture`: vLLM's bind_routed_experts_capturer.

        Raises EnvironmentFault when vLLM is set to name requests in another way than is expected here.
        """
        if os.environ.get(_PLAIN_NAMES, "0") not in ("", "0"):
            raise EnvironmentFault(
                f"{_PLAIN_NAMES} is set, but routes are found by request names with a random end; unset it"
            )
        self._runner = runner
        self._execute = runner.execute_model
        self._layers = runner.model_config.get_total_num_hidden_layers()
        self._step: dict[int, Tensor] = {}  # layer -> experts [tokens of the step, topk]
        # request -> (first position, [tokens, layers, topk]) of each step
        self._kept: dict[str, list[tuple[int, np.ndarray]]] = {}
        # a fault is raised when routes are taken, since an error inside a step would end the engine
        self._fault = ""
        bind(runner.get_model(), self)
        runner.execute_model = self._execute_and_keep

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Records the choice of one router; every router calls it in every forward pass."""
        self._step[layer_id] = topk_ids.to(torch.int16)

    def _execute_and_keep(self, scheduled: Any, *arguments: Any, **named: Any) -> Any:
        self._step.clear()
        output = self._execute(scheduled, *arguments, **named)
        tokens = sum(scheduled.num_scheduled_tokens.values())
        wrong = {layer: len(chosen) for layer, chosen in self._step.items() if len(chosen) != tokens}
        if wrong:
            self._fault = f"routers chose for other tokens than the {tokens} of a step: {wrong} (layer: tokens)"
        elif self._step:
            self._keep(scheduled)
        return output

    def _keep(self, scheduled: Any) -> None:
        """Cuts the choices of a step by request; the runner has them in the order of its input batch."""
        cached = scheduled.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduled.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            if new.sampling_params is not None and (new.sampling_params.extra_args or {}).get(ASKED):
                self._kept[_name(new.req_id)] = []
        rows = self._rows()
        first = 0
        for request in self._runner.input_batch.req_ids:
            last = first + scheduled.num_scheduled_tokens[request]
            if (kept := self._kept.get(_name(request))) is not None:
                kept.append((starts[request], rows[first:last]))
            first = last

    def _rows(self) -> np.ndarray:
        """Returns int16 [tokens, layers of the model, topk]; zeros where a layer has no experts, as vLLM's own capture
        does.
        """
        any_layer = next(iter(self._step.values()))
        rows = np.zeros((len(any_layer), self._layers, any_layer.shape[1]), np.int16)
        for layer, chosen in self._step.items():
            rows[:, layer] = chosen.cpu().numpy()
        return rows

    def forget(self) -> None:
        """Drops the routes of requests that nobody will take. Call it when no request is under way."""
        self._kept.clear()

    def take(self, name: str, computed: int) -> np.ndarray:
        """Returns a request's routes, int16 [computed, layers, topk], and forgets them. It finished after `computed`
        tokens.

        Tokens from the prefix cache have -1. Tokens that were scheduled beyond the request's end are left out. Raises
        RuntimeError when routers chose for other tokens than were scheduled: from there on routes cannot be assigned.
        """
        if self._fault:
            raise RuntimeError(self._fault)
        parts = self._kept.pop(name)
        routes = np.full((computed, *parts[0][1].shape[1:]), MISSING, np.int16)
        for start, rows in parts:
            routes[start : start + len(rows)] = rows[: max(computed - start, 0)]
        return routes


def _name(request: str) -> str:
    """Returns the request's name as the front end got it; vLLM appends a random end."""
    return request.rpartition("-")[0]
