"""Places the processes of a configuration: nodes and devices of the actor's ranks and the engines' workers."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mrl.config.schema import ClusterConfig, LayoutConfig, RolloutConfig, RunConfig
from mrl.data.samples import ImageStore
from mrl.model.device_grid import ClusterShape, DeviceId, actor_devices, engine_devices, near_devices
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.platforms.hosting import get_hosting
from mrl.record.run_dir import RunDir


@dataclass(frozen=True)
class Deployment:
    """The sections that say how many processes there are, and which devices they use."""

    cluster: ClusterConfig
    layout: LayoutConfig  # of the actor's ranks
    rollout: RolloutConfig  # of the engines

    @classmethod
    def of(cls, config: RunConfig) -> "Deployment":
        """Returns the deployment that a configuration asks for."""
        return cls(config.cluster, config.actor.layout, config.rollout)

    @property
    def is_colocated(self) -> bool:
        """Whether ranks and engines share their devices."""
        return self.cluster.placement == "colocated"

    @property
    def devices(self) -> int:
        """Devices that actor and engines use together. Colocated, both use the same ones."""
        actor = self.layout.world_size
        engines = self.rollout.num_engines * self.rollout.workers_per_engine
        if self.is_colocated:
            return max(actor, engines)
        return actor + engines


def image_store(config: RunConfig, run_dir: Path) -> ImageStore | None:
    """Returns where a run has the images of its prompts; None for a run that sees none."""
    if config.model.vision is None:
        return None
    return ImageStore(str(RunDir(run_dir).images), config.data.max_image_pixels)


def rollout_layout(rollout: RolloutConfig) -> RolloutLayout:
    """Returns the engines' layout. Raises ConfigError for an expert_parallel_size that vLLM cannot have."""
    return RolloutLayout(
        rollout.num_engines,
        rollout.tensor_model_parallel_size,
        rollout.data_parallel_size,
        rollout.expert_parallel_size,
    )


def cluster_shape(cluster: ClusterConfig) -> ClusterShape:
    """Returns the nodes, and the devices of each (on cpu: ranks), that the configuration states."""
    return ClusterShape(cluster.nnodes, cluster.n_gpus_per_node)


_near_devices = lru_cache(maxsize=4)(near_devices)  # a plan calls it several times


def rank_devices(deployment: Deployment) -> tuple[tuple[DeviceId, ...], tuple[DeviceId, ...]]:
    """Returns the devices of the actor's ranks and of the engines' workers, each in the order of their numbers.

    Colocated workers of an engine use the devices of its node. They are ordered so that most of the weights that they
    need are there already (mrl/model/device_grid.py). The n-th device that an engine's process sees belongs to its n-th
    worker. Raises ConfigError when the cluster is too small.
    """
    cluster = cluster_shape(deployment.cluster)
    layout = deployment.layout
    rollout = rollout_layout(deployment.rollout)
    ranks = actor_devices(layout.world_size, cluster)
    if not deployment.is_colocated:
        return ranks, engine_devices(rollout, cluster, layout.world_size)
    workers = engine_devices(rollout, cluster)
    ascending = not get_hosting(deployment.cluster.device).orders_devices
    return ranks, _near_devices(TrainLayout.grids(layout), rollout, ranks, workers, ascending)
