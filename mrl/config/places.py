"""Where a configuration's processes stand: nodes and devices of the actor's ranks and of the engines' workers."""

from dataclasses import dataclass
from functools import lru_cache

from mrl.config.schema import ClusterConfig, LayoutConfig, RolloutConfig, RunConfig
from mrl.model.device_grid import ClusterShape, Place, actor_places, engine_places
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.nearness import near_places
from mrl.platforms.hosting import get_hosting


@dataclass(frozen=True)
class Deployment:
    """The sections that say how many processes there are, and on what they stand."""

    cluster: ClusterConfig
    layout: LayoutConfig  # of the actor's ranks
    rollout: RolloutConfig  # of the engines

    @classmethod
    def of(cls, config: RunConfig) -> "Deployment":
        """The deployment that a configuration asks for."""
        return cls(config.cluster, config.actor.layout, config.rollout)

    @property
    def is_colocated(self) -> bool:
        """Whether ranks and engines share their devices."""
        return self.cluster.placement == "colocated"

    @property
    def devices(self) -> int:
        """Devices of actor and engines: beside each other, or on the same ones."""
        actor = self.layout.world_size
        engines = self.rollout.num_engines * self.rollout.workers_per_engine
        if self.is_colocated:
            return max(actor, engines)
        return actor + engines


def rollout_layout(rollout: RolloutConfig) -> RolloutLayout:
    """The engines' layout. Raises ConfigError for an expert_parallel_size that vLLM cannot have."""
    return RolloutLayout(
        rollout.num_engines,
        rollout.tensor_model_parallel_size,
        rollout.data_parallel_size,
        rollout.expert_parallel_size,
    )


def cluster_shape(cluster: ClusterConfig) -> ClusterShape:
    """Nodes and devices (on cpu: ranks) that the configuration states."""
    return ClusterShape(cluster.nnodes, cluster.n_gpus_per_node)


_near_places = lru_cache(maxsize=4)(near_places)  # a plan asks several times


def rank_places(deployment: Deployment) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Places of the actor's ranks and of the engines' workers, in the order of their numbers.

    Colocated, the workers of an engine stand on the devices of its node. Their order is one in which most of what they
    need is there already (mrl/model/nearness.py). The n-th device that a process of the engine sees is its n-th
    worker's. Raises ConfigError when the cluster is too small.
    """
    cluster = cluster_shape(deployment.cluster)
    layout = deployment.layout
    rollout = rollout_layout(deployment.rollout)
    ranks = actor_places(layout.world_size, cluster)
    if not deployment.is_colocated:
        return ranks, engine_places(rollout, cluster, layout.world_size)
    workers = engine_places(rollout, cluster)
    ascending = not get_hosting(deployment.cluster.device).orders_devices
    return ranks, _near_places(TrainLayout.grids(layout), rollout, ranks, workers, ascending)
