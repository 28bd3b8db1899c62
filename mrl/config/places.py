"""Where a configuration's processes stand: nodes and devices of the actor's ranks and of the engines' workers."""

from mrl.config.schema import RunConfig
from mrl.model.device_grid import ClusterShape, Place, actor_places, engine_places
from mrl.model.layout import RolloutLayout


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
