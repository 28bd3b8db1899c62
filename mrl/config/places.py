"""Where a configuration's processes stand: nodes and devices of the actor's ranks and of the engines' workers."""

from mrl.config.schema import RunConfig
from mrl.model.device_grid import ClusterShape, Place, actor_places, engine_places
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.nearness import near_places
from mrl.platforms.hosting import get_hosting


def rollout_layout(config: RunConfig) -> RolloutLayout:
    """The engines' layout. Raises ConfigError for an expert_parallel_size that vLLM cannot have."""
    r = config.rollout
    return RolloutLayout(r.num_engines, r.tensor_model_parallel_size, r.data_parallel_size, r.expert_parallel_size)


def cluster_shape(config: RunConfig) -> ClusterShape:
    """Nodes and devices (on cpu: ranks) that the configuration states."""
    return ClusterShape(config.cluster.nnodes, config.cluster.n_gpus_per_node)


def rank_places(config: RunConfig) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Places of the actor's ranks and of the engines' workers, in the order of their numbers.

    Colocated, the workers of an engine stand on the devices of its node in the order in which most of what they need is
    there already (mrl/model/nearness.py): the n-th device that a process of the engine sees is its n-th worker's.
    Raises ConfigError when the cluster is too small.
    """
    cluster, layout, rollout = cluster_shape(config), config.actor.layout, rollout_layout(config)
    ranks = actor_places(layout.world_size, cluster)
    if config.cluster.placement != "colocated":
        return ranks, engine_places(rollout, cluster, layout.world_size)
    workers, ascending = engine_places(rollout, cluster), not get_hosting(config.cluster.device).orders_devices
    return ranks, near_places(TrainLayout.grids(layout), rollout, ranks, workers, ascending)
