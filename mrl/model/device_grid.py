"""Assigns ranks and engine workers to the devices of a cluster: rank -> node -> device, as pure integers.

Devices are numbered node by node. The actor takes the first ones in rank order, so that Megatron's fastest axis, tensor
parallelism, stays inside a node. Engines follow (separate) or share the same devices (colocated). Processes that
communicate in every layer stay on one node: a whole engine if it fits, else each data-parallel rank of it.

Where actor and engine share devices, a weight sync copies within the device what the rank there holds. So the workers
of a node are ordered such that each finds most weights on its device. Example: the actor has tensor parallelism 2, an
engine 4. Ranks 0 and 2 hold the first half of every matrix, ranks 1 and 3 the second. Workers 0 and 1 need the quarters
of the first half. So workers 0 to 3 get devices 0, 2, 1, 3.

What a worker needs and a rank holds are intervals: of experts, of rows or columns within an expert, and of rows or
columns outside the experts. Their overlap is counted in integers. Experts come first, because they are nearly all bytes
of a mixture. Other overlaps decide between equal ones. Without a gain the usual order stays.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mrl.errors import ConfigError, EnvironmentFault
from mrl.model.layout import RolloutLayout, TrainLayout

__all__ = [
    "ClusterShape",
    "DeviceId",
    "actor_devices",
    "best_assignment",
    "bundles_of_devices",
    "engine_devices",
    "near_devices",
    "rank_order",
    "unit_size",
]


class DeviceId(NamedTuple):
    """One device: the number of its node, and its number on the node, both from 0."""

    node: int
    device: int


@dataclass(frozen=True)
class ClusterShape:
    """Equal nodes with equal devices."""

    nodes: int
    devices_per_node: int

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def device_at(self, device: int) -> DeviceId:
        """Returns the `device`-th device of the cluster. Raises IndexError past its end."""
        if not 0 <= device < self.devices:
            raise IndexError(
                f"device {device} is outside a cluster of {self.nodes} nodes with {self.devices_per_node} devices"
            )
        return DeviceId(*divmod(device, self.devices_per_node))


def actor_devices(world_size: int, cluster: ClusterShape) -> tuple[DeviceId, ...]:
    """Returns the device of every actor rank, in rank order. Raises ConfigError when the cluster is too small."""
    if world_size > cluster.devices:
        raise ConfigError(
            f"actor.layout.world_size = {world_size} needs more than the {cluster.devices} devices of "
            f"cluster.nnodes x n_gpus_per_node = {cluster.nodes} x {cluster.devices_per_node}"
        )
    return tuple(cluster.device_at(rank) for rank in range(world_size))


def unit_size(rollout: RolloutLayout, devices_per_node: int) -> int:
    """Returns how many workers must share one node: those of an engine, or of a data-parallel rank of it.

    Raises ConfigError when a tensor group is larger than a node.
    """
    for size in (rollout.workers_per_engine, rollout.tensor):
        if size <= devices_per_node:
            return size
    raise ConfigError(
        f"rollout.tensor_model_parallel_size = {rollout.tensor} is more than a node's {devices_per_node} devices, "
        "and an engine's tensor workers need one node"
    )


def engine_devices(rollout: RolloutLayout, cluster: ClusterShape, first: int = 0) -> tuple[DeviceId, ...]:
    """Returns the device of every engine worker, in worker order. `first` is the number of the first usable device.

    A unit never spans nodes; devices of a node that are too few for a unit stay idle. Raises ConfigError when the
    engines do not fit.
    """
    size = unit_size(rollout, cluster.devices_per_node)
    per_node = cluster.devices_per_node
    devices: list[DeviceId] = []
    for _ in range(rollout.num_engines * rollout.workers_per_engine // size):
        if first % per_node + size > per_node:
            first += per_node - first % per_node
        if first + size > cluster.devices:
            raise ConfigError(
                f"rollout.num_engines = {rollout.num_engines} engines of {rollout.workers_per_engine} workers do not "
                f"fit: only {len(devices)} of {rollout.num_engines * rollout.workers_per_engine} workers found a "
                f"device on {cluster.nodes} x {per_node}, where {size} have to share a node; give fewer engines or "
                "more nodes"
            )
        devices += [cluster.device_at(first + i) for i in range(size)]
        first += size
    return tuple(devices)


def rank_order(nodes: Sequence[str], together: int = 1) -> tuple[int, ...]:
    """Returns the bundle of each rank, given the node of each bundle: node by node, `together` ranks on one node if
    possible.

    Ray may scatter bundles, and give a node a number of them that `together` does not divide. The remainder comes last,
    so that as few groups of ranks as possible are spread.
    """
    by_node = _bundles_by_node(nodes)
    whole = [i for bundles in by_node.values() for i in bundles[: len(bundles) // together * together]]
    rest = [i for bundles in by_node.values() for i in bundles[len(bundles) // together * together :]]
    return (*whole, *rest)


def _bundles_by_node(nodes: Sequence[str]) -> dict[str, list[int]]:
    """Returns the bundles of each node, given the node of each bundle. Nodes are sorted by name."""
    bundles: dict[str, list[int]] = {node: [] for node in sorted(set(nodes))}
    for bundle, node in enumerate(nodes):
        bundles[node].append(bundle)
    return bundles


def bundles_of_devices(devices: Sequence[DeviceId], nodes: Sequence[str]) -> tuple[int, ...]:
    """Returns the bundle of each place, given the node of each bundle.

    Devices of one planned node are on one real node, which may also have those of another planned node. Raises
    EnvironmentFault when Ray provides them in other portions than the layout needs.
    """
    left = _bundles_by_node(nodes)
    wanted = Counter(device.node for device in devices)
    bundles: dict[int, list[int]] = {}
    for planned, size in sorted(wanted.items(), key=lambda item: (-item[1], item[0])):
        fitting = [node for node in left if len(left[node]) >= size]
        if not fitting:
            raise EnvironmentFault(_other_portions(wanted, Counter(nodes)))
        node = min(fitting, key=lambda name: (len(left[name]), name))
        bundles[planned], left[node] = left[node][:size], left[node][size:]
    free = {planned: iter(indices) for planned, indices in bundles.items()}
    return tuple(next(free[device.node]) for device in devices)


def _other_portions(wanted: Counter[int], found: Counter[str]) -> str:
    portions = " + ".join(str(count) for count in sorted(found.values(), reverse=True))
    planned = " + ".join(str(count) for _, count in sorted(wanted.items()))
    return (
        f"the nodes are not of one size: placement colocated needs devices in portions of {planned}, a node each, and "
        f"Ray has them as {portions}. Take nodes with equal numbers of free devices and state that number in "
        "cluster.n_gpus_per_node"
    )


def near_devices(
    train: TrainLayout,
    rollout: RolloutLayout,
    ranks: Sequence[DeviceId],
    workers: Sequence[DeviceId],
    ascending: bool = False,
) -> tuple[DeviceId, ...]:
    """Returns the places of all workers in worker order, with those of one engine permuted within each node.

    `ascending`: devices of one tensor group keep their order. A process of Ascend sees the devices of
    ASCEND_RT_VISIBLE_DEVICES, which CANN accepts in ascending order only. Data-parallel ranks are processes of their
    own and are exchanged as a whole.
    """
    rank_at = {device: rank for rank, device in enumerate(ranks)}
    together = 1
    if ascending:
        together = rollout.tensor

    def gain(unit: range, at: range) -> int:
        pairs = ((worker, rank_at.get(workers[index])) for worker, index in zip(unit, at, strict=True))
        return sum(_overlap(train, rollout, rank, worker) for worker, rank in pairs if rank is not None)

    devices = list(workers)
    for units in _exchangeable(rollout, workers, together):
        scale = len(units) + 1  # keeping the place of a unit is worth less than any overlap
        order = best_assignment([[gain(unit, at) * scale + (unit == at) for at in units] for unit in units])
        for unit, column in zip(units, order, strict=True):
            devices[unit.start : unit.stop] = [workers[at] for at in units[column]]
    return tuple(devices)


def _exchangeable(rollout: RolloutLayout, workers: Sequence[DeviceId], together: int) -> list[list[range]]:
    """Returns groups of units of `together` workers that may be exchanged: of one engine, on one node."""
    groups: dict[tuple[int, int], list[range]] = {}
    for first in range(0, len(workers), together):
        groups.setdefault((rollout.coords(first).engine, workers[first].node), []).append(
            range(first, first + together)
        )
    return list(groups.values())


def _overlap(train: TrainLayout, rollout: RolloutLayout, rank: int, worker: int) -> int:
    """Returns how much the rank holds of what the worker needs; experts dominate."""
    expert = train.expert_coords(rank)
    dense = train.dense_coords(rank)
    ep, etp = rollout.expert_coords(worker)
    whole = _common(expert.ep, train.expert, ep, rollout.expert)
    inside = _common(expert.etp, train.expert_tensor, etp, rollout.expert_tensor)
    outside = _common(dense.tp, train.tensor, rollout.coords(worker).tp, rollout.tensor)
    return whole * inside * (rollout.world_size * train.tensor * rollout.tensor + 1) + outside


def _common(first: int, of_first: int, second: int, of_second: int) -> int:
    """Returns the overlap of part `first` of `of_first` and part `second` of `of_second`, in 1 / (of_first x
    of_second).
    """
    return max(0, min((first + 1) * of_second, (second + 1) * of_first) - max(first * of_second, second * of_first))


def best_assignment(gains: Sequence[Sequence[int]]) -> list[int]:
    """Returns the column of each row that maximises the sum of gains. `gains`: [n, n].

    The Hungarian method with potentials: each row searches for the cheapest way to displace earlier ones (Jonker and
    Volgenant, Computing 38, 1987). n^3 steps.
    """
    size = len(gains)
    row_price = [0] * (size + 1)
    column_price = [0] * (size + 1)
    row_of = [0] * (size + 1)  # of each column; both count from 1, and column 0 holds the searching row
    for row in range(1, size + 1):
        row_of[0], column = row, 0
        least = [None] * (size + 1)
        before = [0] * (size + 1)
        used = [False] * (size + 1)
        while row_of[column]:
            used[column] = True
            current = row_of[column]
            step = None
            following = 0
            for other in range(1, size + 1):
                if used[other]:
                    continue
                cost = -gains[current - 1][other - 1] - row_price[current] - column_price[other]
                if least[other] is None or cost < least[other]:
                    least[other], before[other] = cost, column
                if step is None or least[other] < step:
                    step = least[other]
                    following = other
            for other in range(size + 1):
                if used[other]:
                    row_price[row_of[other]] += step
                    column_price[other] -= step
                elif least[other] is not None:
                    least[other] -= step
            column = following
        while column:
            row_of[column] = row_of[before[column]]
            column = before[column]
    columns = [0] * size
    for column in range(1, size + 1):
        columns[row_of[column] - 1] = column - 1
    return columns
