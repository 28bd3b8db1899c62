"""Which experts the routers choose: seen at the old log-probs, compared with in the update, and chosen again there when replay is on (R2).

Megatron-core 0.16.1 asks `router.router_replay` for the choice of experts; the objects here stand in that place. A router whose choice
is replayed still computes its scores with the current weights, so it still gets a gradient.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from torch import Tensor

from mrl.algo.metrics import FloatParts
from mrl.megatron.forward import MicroInputs


@dataclass
class _Chooser:
    """The choice of experts of one router, [tokens, topk], for the forward under way."""

    wanted: Tensor | None = None  # choose these instead of the highest scores
    training: bool = False
    chosen: Tensor | None = None  # what the latest forward chose
    pending: deque[Tensor] = field(default_factory=deque)  # choices of forwards that will be recomputed in backward, oldest first

    def get_replay_topk(self, scores: Tensor, topk: int, num_groups, group_topk, default: Callable) -> tuple[Tensor, Tensor]:
        """Megatron's name and signature. Values and indices of the chosen experts, both [tokens, topk]."""
        if torch._C._current_graph_task_id() != -1:  # recomputed inside a backward pass: what this forward chose the first time
            return _gathered(scores, self.pending.popleft())
        found = default(scores, topk, num_groups, group_topk) if self.wanted is None else _gathered(scores, self.wanted)
        self.chosen = found[1]
        if self.training and not torch.is_grad_enabled():  # a forward without graph in training is one that backward repeats
            self.pending.append(found[1])
        return found


def _gathered(scores: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    return scores.gather(1, index), index


class Routing:
    """The routers of one rank. Routes are kept by model chunk and micro-batch, so both passes must cut a batch alike."""

    def __init__(self, chunks: list[torch.nn.Module], num_experts: int, replay: bool):
        self.replay, self._num_experts = replay, num_experts
        cores = unwrap_model(chunks)
        self._routers = {id(core): [m for m in core.modules() if isinstance(m, TopKRouter)] for core in cores}
        for router in self._all():
            router.router_replay = _Chooser()
        self._recorded: dict[tuple[int, bytes], list[Tensor]] = {}
        self.begin_step()

    def _all(self) -> Iterator[TopKRouter]:
        return (router for routers in self._routers.values() for router in routers)

    def begin_step(self) -> None:
        """Forgets the routes and counts of the step before."""
        self._recorded.clear()
        self._differing = self._compared = 0
        self._load = torch.zeros(sum(map(len, self._routers.values())), self._num_experts, dtype=torch.int64)

    @contextmanager
    def recording(self, model: torch.nn.Module, inputs: MicroInputs) -> Iterator[None]:
        """Around one chunk's forward at the old log-probs."""
        core = unwrap_model(model)
        yield
        self._recorded[id(core), inputs.content] = [r.router_replay.chosen.to(torch.int16) for r in self._routers[id(core)]]

    @contextmanager
    def comparing(self, model: torch.nn.Module, inputs: MicroInputs) -> Iterator[None]:
        """Around one chunk's forward in the update. Raises RuntimeError when replay is on and nothing was recorded for it."""
        core = unwrap_model(model)
        routers, before = self._routers[id(core)], self._recorded.get((id(core), inputs.content))
        if self.replay and before is None:
            raise RuntimeError("no routes were recorded for a micro-batch of the update: it was cut otherwise at the old log-probs")
        for n, router in enumerate(routers):
            router.router_replay.training = True
            router.router_replay.wanted = before[n].long() if self.replay else None
        yield
        real = _real_tokens(inputs, core.config.sequence_parallel)
        first = self._first(core)
        for n, router in enumerate(routers):
            chooser: _Chooser = router.router_replay
            chooser.training, chooser.wanted = False, None
            self._load[first + n] += torch.bincount(chooser.chosen[real].flatten(), minlength=self._num_experts).cpu()
            if before is not None:
                was, now = before[n].long()[real].sort(-1).values, chooser.chosen[real].sort(-1).values
                self._differing += int((was != now).any(-1).sum())
                self._compared += len(now)

    def _first(self, core: torch.nn.Module) -> int:
        """Number of the chunk's first router among those of this rank."""
        chunks = list(self._routers)
        return sum(len(self._routers[c]) for c in chunks[: chunks.index(id(core))])

    def metrics(self) -> FloatParts:
        """Of the step's updates. Collective over the ranks that hold copies of the same layers; one of them hands the answer out.

        `router/drift` is the share of (token, layer) whose set of experts is another than at the old log-probs. Loads are of real tokens.
        """
        if not len(self._load):  # a stage of the embedding alone, as all ranks of its group have it
            return {}
        group = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
        counts = torch.cat([self._load.flatten(), torch.tensor([self._differing, self._compared])])
        counts = counts.to(next(self._all()).weight.device)
        dist.all_reduce(counts, group=group)
        if dist.get_rank(group) or not counts[:-2].any():
            return {}
        load = counts[:-2].view(self._load.shape).double()
        relative = load / load.mean(-1, keepdim=True)
        layers = float(len(relative))
        drift = {"router/drift": (float(counts[-2]), float(counts[-1]))} if counts[-1] else {}
        return drift | {
            "router/load/max": (float(relative.amax(-1).sum()), layers),
            "router/load/min": (float(relative.amin(-1).sum()), layers),
            "router/max_violation": (float((relative.amax(-1) - 1).sum()), layers),
        }


def _real_tokens(inputs: MicroInputs, sequence_parallel: bool) -> Tensor:
    """bool [tokens] in the order in which a router sees them: position by position, under sequence parallelism this rank's part."""
    real = inputs.real.t()
    if sequence_parallel:
        real = real.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]
    return real.flatten()
