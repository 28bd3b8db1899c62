"""Predicted cost of a weight sync, beside the lower bound of any plan without relays.

Seconds are predictions for a stated link.
"""

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mrl.reshard.plan import ReshardPlan
from mrl.reshard.streams import REMOTE, SAME_DEVICE, SAME_NODE, TIERS


@dataclass(frozen=True)
class Link:
    """Bytes per second that one device can send and, at the same time, receive: each device has an adapter of its own.

    Defaults: 92 % of a 400 Gb/s adapter between nodes, 350 GB/s inside a node, and a copy within a device's memory at
    1.2 TB/s.
    """

    between_nodes: float = 46e9
    inside_node: float = 350e9
    inside_device: float = 1.2e12

    @property
    def rates(self) -> np.ndarray:
        """By tier."""
        rates = np.zeros(len(TIERS))
        rates[[SAME_DEVICE, SAME_NODE, REMOTE]] = self.inside_device, self.inside_node, self.between_nodes
        return rates


def reshard_summary(plan: ReshardPlan, link: Link = Link(), plan_seconds: float | None = None) -> dict[str, Any]:
    """The `reshard` part of `mrl plan --json`.

    `predicted_seconds` is the plan's wire time under `link`, pack and unpack hidden behind it; `bound_seconds` the
    least that its bytes need when every one of them crosses the link once.
    """
    loads = plan.loads
    return {
        "bytes_required": plan.bytes_required,
        "bytes_moved": plan.bytes_moved,
        "bytes_local": plan.bytes_local,
        "bytes_remote": plan.bytes_remote,
        "rounds": plan.num_rounds,
        "budget_bytes": plan.budget_bytes,
        "peak_staging_bytes": plan.peak_staging_bytes,
        "peak_staging_bytes_trainer": plan.peak_staging_of(loads.sent),
        "peak_staging_bytes_engine": plan.peak_staging_of(loads.received),
        "predicted_seconds": round(predicted_seconds(plan, link), 6),
        "bound_seconds": round(bound_seconds(plan, link), 6),
        "link_bytes_per_second": asdict(link),
        "sent_bytes": loads.sent.sum(axis=(0, 1)).tolist(),  # of each rank
        "received_bytes": loads.received.sum(axis=(0, 1)).tolist(),  # of each worker
        "plan_seconds": plan_seconds,
        "hash": plan.hash,
    }


def predicted_seconds(plan: ReshardPlan, link: Link) -> float:
    """Round after round, each as long as its busiest device needs in one direction of one kind of link."""
    busiest = np.zeros((len(TIERS), plan.num_rounds))
    for loads, devices in ((plan.loads.sent, plan.devices.rank_device), (plan.loads.received, plan.devices.worker_device)):
        for device in np.unique(devices):
            busiest = np.maximum(busiest, loads[:, :, devices == device].sum(axis=2))
    return float((busiest / link.rates[:, None]).max(axis=0).sum())


def bound_seconds(plan: ReshardPlan, link: Link) -> float:
    """The largest of: what a worker must receive over each kind of link; what ranks that alone have something must send
    to other nodes, for each set of replicas, each pipeline stage and all ranks together.
    """
    ingress = (plan.loads.received.sum(axis=1) / link.rates[:, None]).max()
    demand = _remote_demand(plan)
    stage_size = plan.train.world_size // plan.train.pipeline
    groups: dict[frozenset[int], int] = defaultdict(int)
    for ranks, nbytes in demand.items():
        stages = {rank // stage_size for rank in ranks}
        whole_stages = frozenset(rank for stage in stages for rank in range(stage * stage_size, (stage + 1) * stage_size))
        for group in {ranks, whole_stages, frozenset(range(plan.train.world_size))}:
            groups[group] += nbytes
    rank_device = plan.devices.rank_device.tolist()
    egress = (nbytes / len({rank_device[rank] for rank in ranks}) for ranks, nbytes in groups.items())
    return float(max(ingress, max(egress, default=0) / link.between_nodes))


def _remote_demand(plan: ReshardPlan) -> dict[frozenset[int], int]:
    """Bytes that workers need from other nodes, by the set of ranks that have them."""
    demand: dict[frozenset[int], int] = defaultdict(int)
    for worker in range(plan.rollout.world_size):
        stream = plan.schedule.streams[worker % len(plan.schedule.streams)]
        tier = stream.candidates(plan.devices, worker).tier
        set_bytes = np.bincount(stream.holder_set, stream.nbytes, len(tier))
        for holder_set in np.flatnonzero(tier == REMOTE):
            demand[stream.holders[holder_set]] += int(set_bytes[holder_set])
    return demand
