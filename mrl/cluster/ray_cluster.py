"""Joins or starts the Ray cluster of a run, and reserves a bundle for each rank and each engine.

Ray listens on all addresses, with a token.
"""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import parameter
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mrl.cluster.prerequisites import check_size, needed_resources, ray_address, unreachable
from mrl.cluster.ray_folder import ray_folder, remove_folders_of_the_dead
from mrl.config.deployment import Deployment
from mrl.errors import EnvironmentFault
from mrl.model.device_grid import rank_order
from mrl.platforms.process_memory import few_heaps
from mrl.platforms.process_tree import end_below, pids_below
from mrl.process.own import own_cpus

_OWN_SETTINGS = {
    "gcs_rpc_server_reconnect_timeout_s": 8,
    "health_check_period_ms": 1000,  # Ray misses a raylet after five looks that find no process
}
_STARTS = 3  # for a run's own cluster, each as long as Ray waits for its processes
_OUT_OF_TIME = re.compile(r"timed? ?out", re.I)


@contextmanager
def ray_cluster(deployment: Deployment, actor: bool = True) -> Iterator[None]:
    """Connects during the block.

    Raises EnvironmentFault when the cluster is unreachable or too small. Without `actor` only the engines have to fit.
    """
    address = ray_address(deployment.cluster)
    remove_folders_of_the_dead()
    few_heaps()
    with ExitStack() as stack:
        if address is None:
            _start_own(stack)
        else:
            stack.callback(ray.shutdown)
            _join(address)
        check_size(deployment, ray.cluster_resources(), actor=actor)
        yield


def _start_own(stack: ExitStack) -> None:
    """Starts a cluster for this run alone, which `stack` stops. Raises EnvironmentFault if none comes up.

    Ray gives its own processes 30 s to find each other, even on a busy machine. So a start that timed out is repeated
    after its remaining processes have ended.
    """
    for again in range(_STARTS):
        folder = stack.enter_context(ray_folder())
        stack.callback(ray.shutdown)
        before = pids_below()
        try:
            _init_own(folder)
            return
        except Exception as error:  # Ray raises a plain exception if a node does not start in time
            why = f"{type(error).__name__}: {error}"
            if not _OUT_OF_TIME.search(why) or again + 1 == _STARTS:
                tries = ""
                if again:
                    tries = f", {again + 1} times"
                raise EnvironmentFault(f"Ray did not start on this machine{tries}: {why}") from error
        ray.shutdown()
        end_below(pids_below() - before)
        print(f"Ray did not start in time, and is started again ({why})", flush=True)


def _init_own(folder: Path) -> None:
    # Ray would start a process for each CPU, wait for them, and never use one, as all of a run have own environments
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    with _without_watchers():
        ray.init(
            address="local",
            num_cpus=own_cpus(),
            include_dashboard=False,
            _temp_dir=str(folder),
            _node_ip_address="127.0.0.1",
            _system_config=_of_one_machine(),
            **_quiet(),
        )


@contextmanager
def _without_watchers() -> Iterator[None]:
    """Starts Ray without its autoscaler and its reader of logs. `ray start` has switches for them, `ray.init` has none.

    A run's own cluster is one machine, and nobody asks for lines of logs. Both processes take a second of the start,
    and then a hundredth of a core.
    """
    made = parameter.RayParams
    parameter.RayParams = partial(made, no_monitor=True, include_log_monitor=False)
    try:
        yield
    finally:
        parameter.RayParams = made


def _of_one_machine() -> dict[str, Any]:
    """Returns settings of Ray for a cluster whose processes reach each other without a network.

    Its GCS is lost when its process is, so nobody waits for it for Ray's minute. So is its raylet, whose looks are a
    second apart and not three. A value in the environment wins.
    """
    return {name: value for name, value in _OWN_SETTINGS.items() if f"RAY_{name}" not in os.environ}


def _join(address: str) -> None:
    try:
        ray.init(address=address, **_quiet())
    except Exception as error:
        raise unreachable(address, str(error)) from error


def _quiet() -> dict[str, Any]:
    return {"log_to_driver": False, "logging_level": "warning", "namespace": f"mrl-{os.getpid()}"}


def object_store_sizes(deployment: Deployment) -> dict[str, int]:
    """Returns the size in bytes, by address, of object stores on nodes that may run processes of the run."""
    wanted = needed_resources(deployment)
    nodes = [node for node in ray.nodes() if node["Alive"] and wanted.keys() <= node["Resources"].keys()]
    return {node["NodeManagerAddress"]: int(node["Resources"].get("object_store_memory", 0)) for node in nodes}


@dataclass(frozen=True)
class Reservation:
    """A reserved placement group, the node of each bundle, and the bundle indices in rank order."""

    group: PlacementGroup
    bundles: tuple[dict[str, float], ...]
    order: tuple[int, ...]
    nodes: tuple[str, ...] = ()

    def options(self, position: int) -> dict:
        """Returns the options of the Ray actor at `position` (a rank, or an engine number)."""
        index = self.order[position]
        return self._in_bundle(index, self.bundles[index]) | {"max_restarts": 0}

    def idle_options(self, index: int) -> dict:
        """Returns the options of a Ray actor that shares a bundle and takes none of its reserved resources."""
        return self._in_bundle(index, {}) | {"max_restarts": 0}

    def device_options(self, index: int) -> dict:
        """Returns the options of a Ray task that gets the device of a bundle."""
        return self._in_bundle(index, {k: v for k, v in self.bundles[index].items() if k != "CPU"})

    def _in_bundle(self, index: int, resources: dict[str, float]) -> dict:
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index),
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "resources": {k: v for k, v in resources.items() if k not in ("CPU", "GPU")},
        }

    def release(self) -> None:
        """Releases the bundles."""
        remove_placement_group(self.group)


def reserve(bundles: list[dict[str, float]], timeout_s: float, together: int = 1) -> Reservation:
    """Reserves all bundles at once. Every `together` neighbours in rank order share a node if possible.

    Raises EnvironmentFault when the cluster cannot provide them within the deadline.
    """
    group = placement_group(bundles, strategy="PACK")
    ready, _ = ray.wait([group.ready()], timeout=timeout_s)
    if not ready:
        remove_placement_group(group)
        raise EnvironmentFault(
            f"the cluster did not free {len(bundles)} bundles like {bundles[0]} within {timeout_s:g} s; is it busy?"
        )
    by_bundle = placement_group_table(group)["bundles_to_node_id"]
    nodes = tuple(by_bundle[i] for i in range(len(bundles)))
    return Reservation(group, tuple(bundles), rank_order(nodes, together), nodes)
