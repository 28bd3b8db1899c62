"""What trainer and engines agree on before a weight sync, as plain data. Both sides build plan and routes from it."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from mrl.errors import EnvironmentFault
from mrl.model import ModelSpec, model_spec
from mrl.model.device_grid import DeviceId
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.platforms.hosting import MemoryReach, get_hosting
from mrl.reshard.messages import Topology
from mrl.reshard.plan import ReshardPlan, plan_reshard
from mrl.units import MIB

BUCKET_BYTES = 512 * MIB  # full tensors, on the slow path through the driver


@dataclass(frozen=True)
class SyncSetup:
    """Inputs of the plan, and where the two sides meet."""

    hf_config: dict[str, Any]  # the model's config.json
    train: dict[str, Any]  # degrees of the actor, as TrainLayout.build takes them
    rollout: dict[str, int]  # fields of RolloutLayout
    dialect: str  # how the engine lays weights out: "cpu", "cuda" or "npu"
    dtype: str  # of the engines, and on the wire
    topology: dict[str, list[list[int]]]  # "ranks" and "workers": [node, device] of each
    budget_bytes: int  # limit for one worker's or one rank's data in one round
    timeout_s: float  # longest wait for one peer
    # "kind" (reshard.transport), "name" of this connection, "address" of the point-to-point group, and "workers" that
    # take part: all by default
    transport: dict[str, Any]
    fp8_block: int = 0  # rows and columns that have one scale, where engines hold words; 0: they hold none
    vision: str | None = None  # model.vision: a vision tower that is trained is synced with the text model

    def to_json(self) -> dict[str, Any]:
        """Returns plain data, which `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "SyncSetup":
        """Reads what `to_json` made."""
        return cls(**data)

    @cached_property
    def model(self) -> ModelSpec:
        return model_spec(self.hf_config, self.vision)

    @cached_property
    def train_layout(self) -> TrainLayout:
        return TrainLayout.build(self.train, self.model)

    @cached_property
    def rollout_layout(self) -> RolloutLayout:
        return RolloutLayout(**self.rollout)

    @cached_property
    def devices(self) -> Topology:
        ranks = tuple(DeviceId(*device) for device in self.topology["ranks"])
        workers = tuple(DeviceId(*device) for device in self.topology["workers"])
        return Topology(ranks, workers)

    @property
    def workers(self) -> list[int]:
        """Numbers of the workers that take part in this connection. The plan covers all workers."""
        return self.transport.get("workers", list(range(self.rollout_layout.world_size)))

    def plan(self) -> ReshardPlan:
        """Returns the plan. It is built once in a process, however the two sides connect."""
        return _plan(json.dumps(replace(self, timeout_s=0.0, transport={}).to_json(), sort_keys=True))

    def check_hash(self, expected: str, who: str) -> None:
        """Raises EnvironmentFault when `who`, this process, makes another plan than the driver."""
        if self.plan().hash != expected:
            raise EnvironmentFault(
                f"{who} plans the weight sync as {self.plan().hash[:12]}, the driver as {expected[:12]}: they do not "
                "run the same mrl; install one version on every host"
            )

    def worker(self, engine: int, position: int) -> int:
        """Returns the number of the worker at `position` in its engine: data-parallel rank, then tensor rank."""
        return engine * self.rollout_layout.workers_per_engine + position

    def engine_of(self, worker: int) -> int:
        """Returns the number of the engine that a worker belongs to."""
        return self.rollout_layout.coords(worker).engine


@lru_cache(maxsize=2)
def _plan(text: str) -> ReshardPlan:
    setup = SyncSetup.from_json(json.loads(text))
    return plan_reshard(
        setup.model,
        setup.train_layout,
        setup.rollout_layout,
        dialect=setup.dialect,
        dtype=setup.dtype,
        topology=setup.devices,
        budget_bytes=setup.budget_bytes,
        fp8_block=setup.fp8_block,
    )


def route(setup: SyncSetup, rank: int, worker: int, reach: MemoryReach) -> str:
    """Returns the transport of the pair. Raises EnvironmentFault for shm between hosts. `reach`: see `pair_route`."""
    kind = setup.transport["kind"]
    transport = pair_route(kind, setup.devices.ranks[rank], setup.devices.workers[worker], reach)
    if transport == "p2p" and kind == "shm":
        raise EnvironmentFault(
            f"reshard.transport: shm reaches no other host; rank {rank} and worker {worker} are on two; use auto"
        )
    return transport


def pair_route(kind: str, rank: DeviceId, worker: DeviceId, reach: MemoryReach) -> str:
    """Returns the transport of a rank and a worker, when `kind` (reshard.transport) is requested.

    `auto` uses device memory as far as another process can open it, which `reach` tells. Between further devices of a
    node it uses the transport for two nodes. `ipc` uses host memory there. A platform without device memory uses host
    memory on one node in any case. Two processes on one device cannot have a communicator (NCCL: "Duplicate GPU
    detected"), so with `p2p` they use device memory.
    """
    if rank.node != worker.node:
        return "p2p"
    if kind == "p2p":
        return "ipc" if rank == worker and reach != "process" else "p2p"
    if kind == "shm" or reach == "process":
        return "shm"
    if reach == "node" or rank == worker:
        return "ipc"
    if kind == "auto":
        return "p2p"
    return "shm"


def describe_routes(setup: SyncSetup) -> str:
    """Describes, at the start of a run, how many pairs of rank and worker each transport serves."""
    reach = get_hosting(setup.dialect).memory_reach
    workers = [setup.devices.workers[number] for number in setup.workers]
    pairs = ((rank, worker) for rank in setup.devices.ranks for worker in workers)
    served = Counter(pair_route(setup.transport["kind"], rank, worker, reach) for rank, worker in pairs)
    return ", ".join(f"{count} pairs of rank and worker by {kind}" for kind, count in sorted(served.items()))


def p2p_members(setup: SyncSetup) -> list[tuple[str, int]]:
    """Returns ("rank", r) and ("worker", w) for all members of the point-to-point group, in its order."""
    ranks = range(setup.train_layout.world_size)
    workers = setup.workers
    reach = get_hosting(setup.dialect).memory_reach
    pairs = [(r, w) for r in ranks for w in workers if route(setup, r, w, reach) == "p2p"]
    sending = {rank for rank, _ in pairs}
    receiving = {worker for _, worker in pairs}
    return [("rank", rank) for rank in sorted(sending)] + [("worker", worker) for worker in sorted(receiving)]
