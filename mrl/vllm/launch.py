"""How each rollout engine is started: its process groups, their nodes and devices, and vLLM's parallel arguments.

Pure functions of the configuration; no Ray and no vLLM here. Argument names are those of AsyncEngineArgs in vLLM 0.32
(0.23 has the same).

Each data-parallel rank of an engine is a Ray actor with a front end of its own (vLLM's external load balancing,
`data_parallel_rank`); they meet at the address of the first. vLLM could keep all ranks of a node behind one front
end, which then hands back only the first rank's answer to a call on all workers
(DPLBAsyncMPClient.call_utility_async), and a weight sync has to hear every worker.

Below an actor, vLLM's `mp` executor starts a process per worker; only a tensor group larger than a node needs its
`ray` executor, with one bundle a worker.
"""

from dataclasses import dataclass, replace
from typing import Any

from mrl.config.schema import RunConfig
from mrl.model.device_grid import ClusterShape, Place, actor_places, engine_places
from mrl.model.layout import RolloutLayout


@dataclass(frozen=True)
class EngineLaunch:
    """One Ray actor with a vLLM front end in it: an engine, or one data-parallel rank of an engine that has several."""

    engine: int
    data_rank: int
    workers: tuple[int, ...]  # numbers as in RolloutLayout
    places: tuple[Place, ...]  # of each worker
    executor: str  # "mp" or "ray": vLLM's distributed_executor_backend
    bundles: tuple[int, ...]  # devices of each Ray bundle that the actor needs; a bundle never straddles nodes
    arguments: dict[str, Any]  # of AsyncEngineArgs

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes that it stands on, ascending."""
        return tuple(sorted({place.node for place in self.places}))

    @property
    def needs_meeting_point(self) -> bool:
        """True when `at` has to be called before the start."""
        return "data_parallel_rank" in self.arguments

    def at(self, address: str, port: int) -> "EngineLaunch":
        """The launch with the address (data-parallel rank 0's node) and the port where the ranks of its engine meet."""
        met = self.arguments | {"data_parallel_address": address, "data_parallel_rpc_port": port}
        return replace(self, arguments=met)


def rollout_layout(config: RunConfig) -> RolloutLayout:
    """The engines' layout. Raises ConfigError for an expert_parallel_size that vLLM cannot have."""
    r = config.rollout
    return RolloutLayout(r.num_engines, r.tensor_model_parallel_size, r.data_parallel_size, r.expert_parallel_size)


def cluster_shape(config: RunConfig) -> ClusterShape:
    """Nodes and devices (on cpu: ranks) that the configuration states."""
    return ClusterShape(config.cluster.nnodes, config.cluster.n_gpus_per_node)


def rank_places(config: RunConfig) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Places of the actor's ranks and of the engines' workers. Raises ConfigError when the cluster is too small."""
    cluster, world = cluster_shape(config), config.actor.layout.world_size
    first = 0 if config.cluster.placement == "colocated" else world
    return actor_places(world, cluster), engine_places(rollout_layout(config), cluster, first)


def engine_launches(config: RunConfig) -> tuple[EngineLaunch, ...]:
    """Every actor to start, engine by engine, then data-parallel rank.

    Raises ConfigError for what no cluster of this shape can hold.
    """
    layout, per_node = rollout_layout(config), config.cluster.n_gpus_per_node
    _, places = rank_places(config)
    return tuple(_launch(layout, places, per_node, engine, rank) for engine in range(layout.num_engines) for rank in range(layout.data))


def _launch(layout: RolloutLayout, places: tuple[Place, ...], per_node: int, engine: int, rank: int) -> EngineLaunch:
    workers = tuple(layout.worker_of(engine, rank, tp) for tp in range(layout.tensor))
    one_node = layout.tensor <= per_node
    executor = "mp" if one_node else "ray"
    return EngineLaunch(
        engine=engine,
        data_rank=rank,
        workers=workers,
        places=tuple(places[w] for w in workers),
        executor=executor,
        bundles=(layout.tensor,) if one_node else (1,) * layout.tensor,
        arguments=_arguments(layout, rank, executor),
    )


def _arguments(layout: RolloutLayout, rank: int, executor: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "tensor_parallel_size": layout.tensor,
        "enable_expert_parallel": layout.expert > 1,
        # named, since inside a Ray actor vLLM would choose Ray workers of its own
        "distributed_executor_backend": executor,
    }
    if layout.data > 1:
        arguments |= {
            "data_parallel_size": layout.data, "data_parallel_backend": "mp", "data_parallel_rank": rank, "data_parallel_size_local": 1,
        }  # fmt: skip
    return arguments
