"""Places a run's processes. `separate`: each rank or engine has devices of its own. `colocated`: they share devices.

Colocated, Ray reserves a bundle for each device, and all processes on that device share its bundle. mrl itself assigns
the device: an actor that asks Ray for a device gets it exclusively, but a rank and a worker must share one.

Example: engines of TP2 on two nodes of two devices. Rank 3 is in the bundle of (node 1, device 1). Engine 1 has its
process in the bundle of (node 1, device 0). It sees devices 0 and 1 of that node and starts its two workers on them.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from mrl.cluster.calls import gather
from mrl.cluster.prerequisites import actor_bundles, device_bundles, engine_bundles, shared_devices
from mrl.cluster.ray_cluster import Reservation, reserve
from mrl.config.deployment import Deployment, rank_devices
from mrl.config.schema import ClusterConfig, LayoutConfig
from mrl.model.device_grid import bundles_of_devices
from mrl.platforms.hosting import Hosting, get_hosting


@dataclass(frozen=True)
class Seat:
    """What Ray reserves for one actor, and where."""

    options: dict[str, Any]  # of the Ray actor
    environment: dict[str, str]  # in addition to what every process of its kind has
    devices: list[tuple[str, int]] | None  # node and device of each worker; None: Ray chooses, and the process asks it


@dataclass(frozen=True)
class Seats:
    """The seats of a group's actors in its order, and the function that releases them."""

    seats: tuple[Seat, ...]
    release: Callable[[], None]


def actor_seats(cluster: ClusterConfig, layout: LayoutConfig, within_s: float | None = None) -> Seats:
    """Reserves devices for the ranks alone. Ranks that communicate in every layer share a node if possible.

    `within_s` is the deadline, by default that of a start.
    """
    bundles = actor_bundles(cluster, layout)
    return _own(reserve(bundles, within_s or cluster.start_timeout_s, layout.tensor_model_parallel_size))


def engine_seats(deployment: Deployment) -> Seats:
    """Reserves devices for the engines' data-parallel ranks. Those of an engine share a node if possible."""
    limit_s = deployment.cluster.start_timeout_s
    return _own(reserve(engine_bundles(deployment), limit_s, deployment.rollout.data_parallel_size))


def _own(reserved: Reservation) -> Seats:
    seats = tuple(Seat(reserved.options(position), {}, None) for position in range(len(reserved.bundles)))
    return Seats(seats, reserved.release)


@dataclass(frozen=True)
class SharedSeats:
    """Ranks and engines on the same devices. `release` releases the devices of both."""

    ranks: Seats
    engines: Seats
    release: Callable[[], None]


@dataclass(frozen=True)
class _Device:
    """One reserved device: its bundle, node, number on the node, and the name under which a process sees it."""

    options: dict[str, Any]
    node: str
    number: int
    name: str


def shared_seats(deployment: Deployment) -> SharedSeats:
    """Makes the seats of a colocated run.

    Raises EnvironmentFault when Ray cannot provide the devices node by node as the layout needs.
    """
    cluster = deployment.cluster
    hosting = get_hosting(cluster.device)
    ranks, workers = rank_devices(deployment)
    reserved = reserve(device_bundles(deployment), cluster.start_timeout_s)
    try:
        names = _device_names(reserved, hosting, cluster.start_timeout_s)
        # CANN supports no other order
        ascending = sorted(range(len(names)), key=lambda bundle: (len(names[bundle]), names[bundle]))
        ids = shared_devices(deployment)
        nodes = [reserved.nodes[bundle] for bundle in ascending]
        bundles = [ascending[i] for i in bundles_of_devices(ids, nodes)]
    except BaseException:
        reserved.release()
        raise
    numbers: Counter[str] = Counter()
    devices = {}
    for device, bundle in zip(ids, bundles, strict=True):
        node = reserved.nodes[bundle]
        devices[device] = _Device(reserved.idle_options(bundle), node, numbers[node], names[bundle])
        numbers[node] += 1
    of_ranks = [_seat([devices[device]], hosting, cluster.cpus_per_actor) for device in ranks]
    together = deployment.rollout.tensor_model_parallel_size  # an engine's tensor workers are children of one process
    groups = [workers[first : first + together] for first in range(0, len(workers), together)]
    of_engines = [_seat([devices[device] for device in group], hosting, cluster.cpus_per_engine) for group in groups]
    return SharedSeats(Seats(tuple(of_ranks), _keep), Seats(tuple(of_engines), _keep), reserved.release)


def _keep() -> None:
    """Does nothing: the devices stay reserved, because other processes on them continue."""


def _seat(devices: Sequence[_Device], hosting: Hosting, cpus: float) -> Seat:
    """Makes a seat in the first device's bundle.

    Ray counts no CPUs there, so it would not set the number of threads.
    """
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, int(cpus))))
    environment = {"OMP_NUM_THREADS": threads} | hosting.visible_devices([device.name for device in devices])
    return Seat(devices[0].options, environment, [(device.node, device.number) for device in devices])


def _device_names(reserved: Reservation, hosting: Hosting, timeout_s: float) -> list[str]:
    """Returns Ray's name for each bundle's device; empty on the CPU."""
    if hosting.ray_resource is None:
        return [""] * len(reserved.bundles)
    ask = ray.remote(max_retries=0)(_own_device)
    refs = {f"device {i}": ask.options(**reserved.device_options(i)).remote() for i in range(len(reserved.bundles))}
    return list(gather(refs, timeout_s, "asking Ray for the devices").values())


def _own_device() -> str:
    ids = ray.get_runtime_context().get_accelerator_ids()
    return next(str(owned[0]) for owned in ids.values() if owned)
