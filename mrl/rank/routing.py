"""Records which experts the routers choose at the old log-probs, compares them in the update, and replays them.

R2 replays in the update the choices made at the old log-probs. R3 replays in every pass the choices of the engine's
routers, which came with the samples. Megatron-core 0.16.1 asks `router.router_replay` for the choice of experts, and
the objects of this file take that place. A router whose choice is replayed still computes its scores with the current
weights, so it still gets a gradient.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from torch import Tensor

from mrl.algo.plain import FloatParts
from mrl.data.routes import is_missing
from mrl.model import ModelSpec
from mrl.rank.packing import MicroBatch

Replay = Literal["disabled", "R2", "R3"]


@dataclass
class _Chooser:
    """The choice of experts of one router, [tokens, topk], in the current forward."""

    wanted: Tensor | None = None  # choose these instead of the highest scores; any integer type
    has_gaps: bool = False  # some of `wanted` may be missing: there the router chooses itself
    training: bool = False
    chosen: Tensor | None = None  # the choice of the latest forward
    own: Tensor | None = None  # if `has_gaps`: the choice that the router would have made
    # choices of forwards that backward will recompute, oldest first
    pending: deque[Tensor] = field(default_factory=deque)

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups, group_topk, default: Callable
    ) -> tuple[Tensor, Tensor]:
        """Returns values and indices of the chosen experts, both [tokens, topk]. Name and signature are Megatron's."""
        # recomputed inside a backward pass: the choice of the first forward
        if torch._C._current_graph_task_id() != -1:
            return _gathered(scores, self.pending.popleft())
        if self.wanted is None:
            choice = default(scores, topk, num_groups, group_topk)
        elif self.has_gaps:
            self.own = default(scores, topk, num_groups, group_topk)[1]
            missing = is_missing(self.wanted).unsqueeze(-1)
            choice = _gathered(scores, torch.where(missing, self.own, self.wanted.long()))
        else:
            choice = _gathered(scores, self.wanted.long())
        self.chosen = choice[1]
        # backward repeats a forward without graph in training
        if self.training and not torch.is_grad_enabled():
            self.pending.append(choice[1])
        return choice


def _gathered(scores: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    return scores.gather(1, index), index


@dataclass
class _Counts:
    """Counts of (token, layer) pairs of a step on one rank. They stay on the device until `metrics`, so no forward
    waits.

    Padding does not count. A sequence's last token does not count in the update either: it never has an engine's route,
    and its output is unused.
    """

    differing: Tensor | int = 0  # in the update, another set of experts than at the old log-probs
    compared: Tensor | int = 0
    missing: Tensor | int = 0  # in the update, the router's own choice because the sample has no route
    routed: Tensor | int = 0
    disagreeing: Tensor | int = 0  # at the old log-probs, the engine's set differs from the router's own choice
    supplied: Tensor | int = 0


class Routing:
    """The routers of one rank.

    R2 stores routes by model chunk and micro-batch, so both passes must cut a batch alike.
    """

    def __init__(self, chunks: list[torch.nn.Module], model: ModelSpec, replay: Replay):
        self.replay = replay
        self._num_experts = model.num_experts
        cores = unwrap_model(chunks)
        self._routers = {id(core): [m for m in core.modules() if isinstance(m, TopKRouter)] for core in cores}
        for router in self._all():
            router.router_replay = _Chooser()
        layers = sorted(model.moe_layers.index(router.layer_number - 1) for router in self._all())
        # this rank's layers among those with experts, to select from the samples' routes
        self.layers = np.array(layers, np.int64)
        self._columns = {id(r): layers.index(model.moe_layers.index(r.layer_number - 1)) for r in self._all()}
        self._device = next((router.weight.device for router in self._all()), torch.device("cpu"))
        self._narrow = torch.uint8 if model.num_experts <= 256 else torch.int16  # a step's routes are on the device
        self._recorded: dict[tuple[int, bytes], list[Tensor]] = {}
        self.begin_step()

    def _all(self) -> Iterator[TopKRouter]:
        return (router for routers in self._routers.values() for router in routers)

    def begin_step(self) -> None:
        """Forgets the routes and counts of the previous step."""
        self._recorded.clear()
        for router in self._all():
            router.router_replay.pending.clear()  # left over from a step that was interrupted
        self._counts = _Counts()
        self._load = torch.zeros(
            sum(map(len, self._routers.values())), self._num_experts, dtype=torch.int64, device=self._device
        )

    @contextmanager
    def recording(self, model: torch.nn.Module, inputs: MicroBatch) -> Iterator[None]:
        """Records choices of experts during one chunk's forward at the old log-probs."""
        core = unwrap_model(model)
        with self.supplying(model, inputs):
            yield
        choosers = self._choosers(core)
        real = _in_routers_order(inputs.real, core)
        self._record((id(core), inputs.content), [c.chosen.to(self._narrow) for c in choosers], real)
        self._count_disagreeing(self._supplied(core, inputs), choosers, real)

    def _record(self, key: tuple[int, bytes], chosen: list[Tensor], real: Tensor) -> None:
        """Records one micro-batch's choices.

        Raises RuntimeError if runs must be deterministic and micro-batches of equal content chose differently.
        Otherwise rounding may make them differ, and the routes of either are valid.
        """
        before = []
        if torch.are_deterministic_algorithms_enabled():
            before = self._recorded.get(key, [])
        if any((_differ(earlier, now) & real).any() for earlier, now in zip(before, chosen, strict=False)):
            raise RuntimeError(
                "two micro-batches of the same tokens chose other experts; their routes cannot be distinguished"
            )
        self._recorded[key] = chosen

    @contextmanager
    def supplying(self, model: torch.nn.Module, inputs: MicroBatch) -> Iterator[None]:
        """Supplies the engine's routes, with R3, during one chunk's forward under any policy's weights.

        So the KL to a reference model that equals the policy is 0. Other routes would add the difference to the
        engine's numerics.
        """
        core = unwrap_model(model)
        with _choosing(self._choosers(core), self._supplied(core, inputs), has_gaps=True):
            yield

    @contextmanager
    def comparing(self, model: torch.nn.Module, inputs: MicroBatch) -> Iterator[None]:
        """Compares and replays choices during one chunk's forward in the update.

        Raises RuntimeError when R2 is on and nothing was recorded for it. An on-policy update has no earlier forward,
        and is itself the one at the old log-probs.
        """
        core = unwrap_model(model)
        choosers = self._choosers(core)
        before = self._recorded.get((id(core), inputs.content))
        if self.replay == "R2" and before is None:
            raise RuntimeError(
                "no routes were recorded for a micro-batch of the update: it was cut otherwise at the old log-probs"
            )
        supplied = self._supplied(core, inputs)
        wanted = before if self.replay == "R2" else supplied
        with _choosing(choosers, wanted, has_gaps=self.replay == "R3", training=True):
            yield
        real, predicting = (_in_routers_order(values, core) for values in (inputs.real, inputs.predicting))
        first = self._first(core)
        for n, chooser in enumerate(choosers):
            self._load[first + n].scatter_add_(
                0, chooser.chosen.flatten(), real[:, None].expand_as(chooser.chosen).flatten().long()
            )
            if before is not None:
                self._counts.differing += (_differ(before[n], chooser.chosen) & predicting).sum()
                self._counts.compared += predicting.sum()
        if self.replay == "R3":
            self._count_missing(supplied, predicting, len(choosers))
            if not self._recorded:  # no pass at the old log-probs has counted them
                self._count_disagreeing(supplied, choosers, real)

    def check_recomputed(self) -> None:
        """Checks that a backward pass recomputed everything.

        Raises RuntimeError if it did not, because the next pass would use the routes left over.
        """
        if left := sum(len(router.router_replay.pending) for router in self._all()):
            raise RuntimeError(f"{left} choices of experts were kept for a recomputation that did not come")

    def _count_missing(self, supplied: list[Tensor] | None, predicting: Tensor, layers: int) -> None:
        routed = predicting.sum() * layers
        self._counts.routed += routed
        self._counts.missing += (
            routed if supplied is None else sum((is_missing(s) & predicting).sum() for s in supplied)
        )

    def _count_disagreeing(self, supplied: list[Tensor] | None, choosers: list[_Chooser], real: Tensor) -> None:
        for chooser, wanted in zip(choosers, supplied, strict=True) if supplied is not None else ():
            known = real & ~is_missing(wanted)
            self._counts.disagreeing += (_differ(wanted, chooser.own) & known).sum()
            self._counts.supplied += known.sum()

    def _choosers(self, core: torch.nn.Module) -> list[_Chooser]:
        return [router.router_replay for router in self._routers[id(core)]]

    def _supplied(self, core: torch.nn.Module, inputs: MicroBatch) -> list[Tensor] | None:
        """Returns the samples' routes for each router of a chunk, [tokens, topk]; None without R3 or without routes."""
        if self.replay != "R3" or inputs.routes is None:
            return None
        routes = _in_routers_order(inputs.routes, core)
        return [routes[:, self._columns[id(router)]] for router in self._routers[id(core)]]

    def _first(self, core: torch.nn.Module) -> int:
        """Returns the number of the chunk's first router among those of this rank."""
        chunks = list(self._routers)
        return sum(len(self._routers[c]) for c in chunks[: chunks.index(id(core))])

    def metrics(self) -> FloatParts:
        """Returns metrics of routing over the step's updates.

        Collective over the ranks that hold copies of the same layers. One of them returns the metrics.

        Shares are of (token, layer) pairs. `router/drift`: their set of experts differs from that at the old log-probs.
        `router/missing_routes`: they should have an engine's route but have none. `router/rollout_drift`: the engine's
        set differs from the trainer's own choice at the old log-probs. Loads count real tokens.
        """
        if not len(self._load):  # a stage with only the embedding, as on all ranks of its group
            return {}
        group = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
        pairs = [torch.as_tensor(count, device=self._device) for count in vars(self._counts).values()]
        counts = torch.cat([self._load.flatten(), torch.stack(pairs)])
        dist.all_reduce(counts, group=group)
        load = counts[: -len(pairs)].view(self._load.shape).double()
        total = _Counts(*counts[-len(pairs) :].tolist())
        if dist.get_rank(group) or not load.any():
            return {}
        relative = load / load.mean(-1, keepdim=True)
        layers = float(len(relative))
        shares = {
            "router/drift": (float(total.differing), float(total.compared)),
            "router/missing_routes": (float(total.missing), float(total.routed)),
            "router/rollout_drift": (float(total.disagreeing), float(total.supplied)),
        }
        return {name: share for name, share in shares.items() if share[1]} | {
            "router/load/max": (float(relative.amax(-1).sum()), layers),
            "router/load/min": (float(relative.amin(-1).sum()), layers),
            "router/max_violation": (float((relative.amax(-1) - 1).sum()), layers),
        }


@contextmanager
def _choosing(
    choosers: list[_Chooser], wanted: list[Tensor] | None, has_gaps: bool, training: bool = False
) -> Iterator[None]:
    """Makes routers choose the wanted experts; without `wanted` they choose by themselves."""
    for n, chooser in enumerate(choosers):
        chooser.training = training
        chooser.has_gaps = has_gaps
        chooser.wanted = wanted[n] if wanted else None
    try:
        yield
    finally:
        for chooser in choosers:
            chooser.training = False
            chooser.wanted = None


def _differ(routes: Tensor, others: Tensor) -> Tensor:
    """Tells where two lists of routes, both [tokens, topk], name different sets of experts: bool [tokens]."""
    return (routes.long().sort(-1).values != others.long().sort(-1).values).any(-1)


def _in_routers_order(values: Tensor, core: torch.nn.Module) -> Tensor:
    """Returns [tokens, ...] from [batch, length, ...] in the order in which a router sees tokens.

    The order is position by position. Under sequence parallelism it has only this rank's part.
    """
    values = values.transpose(0, 1)
    if core.config.sequence_parallel:
        values = values.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]
    return values.flatten(0, 1)
