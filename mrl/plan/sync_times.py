"""Predicted cost of a weight sync, beside the lower bound that its bytes have in any plan without relays.

Seconds are predictions for stated rates. The wire is counted round after round. Beside it stands what every process
does to its bytes, which no wire hides: digests, vLLM's processing, and reading back what the engines then hold.
"""

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mrl.model.quantised_shards import fp8_count
from mrl.plan.devices import Starts, SyncRates
from mrl.reshard.plan import ReshardPlan
from mrl.reshard.streams import REMOTE, SAME_DEVICE, SAME_NODE, TIERS

H100_RATES = SyncRates()
_H100_MEMORY = 3.35e12  # bytes per second
_SCALE_TRAFFIC = 4  # bytes of an element: its largest and its smallest are found in two passes over 16 bits
# of a word: its scale is written in 32 bits; the product reads both and writes 32 bits; the cast reads them, writes 8
_WORD_TRAFFIC = 4 + (2 + 4 + 4) + (4 + 1)
USUAL_STARTS = Starts()


@dataclass(frozen=True)
class Link:
    """Bytes per second that one device can send and, at the same time, receive. Each device has its own adapter.

    Defaults: 92 % of a 400 Gb/s adapter between nodes, 350 GB/s inside a node. A copy within a device's memory runs at
    1.2 TB/s.
    """

    between_nodes: float = 46e9
    inside_node: float = 350e9
    inside_device: float = 1.2e12

    @property
    def rates(self) -> np.ndarray:
        """Bytes per second, by tier."""
        rates = np.zeros(len(TIERS))
        rates[[SAME_DEVICE, SAME_NODE, REMOTE]] = self.inside_device, self.inside_node, self.between_nodes
        return rates


def reshard_summary(
    plan: ReshardPlan,
    link: Link = Link(),
    rates: SyncRates = H100_RATES,
    plan_seconds: float | None = None,
    starts: Starts = USUAL_STARTS,
    memory_rate: float = _H100_MEMORY,
) -> dict[str, Any]:
    """Returns the `reshard` part of `mrl plan --json`.

    `predicted_seconds` is a whole verified sync, the sum of `seconds_of`: wire time under `link`, launches, and steps
    at `rates`. Packing and unpacking hide their bytes behind the wire, so only their launches count. Words of weights,
    for engines in FP8, are made at `memory_rate`, bytes per second of a device's memory. `bound_seconds` is
    the least time on the wire if every byte crosses it once, and local bytes not at all.
    """
    loads = plan.loads
    seconds = {"wire": wire_seconds(plan, link), "launches": launch_seconds(plan, starts)} | step_seconds(plan, rates)
    if plan.fp8_block:
        seconds["words"] = fp8_seconds(plan, memory_rate)
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
        "predicted_seconds": round(sum(seconds.values()), 6),
        "seconds_of": {name: round(value, 6) for name, value in seconds.items()},
        "bound_seconds": round(bound_seconds(plan, link), 6),
        "link_bytes_per_second": asdict(link),
        "step_bytes_per_second": asdict(rates),
        "copies": most_copies(plan),
        "messages": most_messages(plan),
        "sent_bytes": loads.sent.sum(axis=(0, 1)).tolist(),  # of each rank
        "received_bytes": loads.received.sum(axis=(0, 1)).tolist(),  # of each worker
        "plan_seconds": plan_seconds,
        "hash": plan.hash,
    }


def wire_seconds(plan: ReshardPlan, link: Link) -> float:
    """Adds up the rounds. Each takes as long as its busiest device, in one direction of one kind of link."""
    busiest = np.zeros((len(TIERS), plan.num_rounds))
    for loads, devices in (
        (plan.loads.sent, plan.devices.rank_device),
        (plan.loads.received, plan.devices.worker_device),
    ):
        for device in np.unique(devices):
            busiest = np.maximum(busiest, loads[:, :, devices == device].sum(axis=2))
    return float((busiest / link.rates[:, None]).max(axis=0).sum())


def step_seconds(plan: ReshardPlan, rates: SyncRates) -> dict[str, float]:
    """Returns what the busiest process needs beside the wire.

    A worker digests what arrives while a rank digests what it sent. All other steps are the workers', one after the
    other.
    """
    received = int(plan.loads.received.sum(axis=(0, 1)).max())
    sent = int(plan.loads.sent.sum(axis=(0, 1)).max())
    return {
        "digest": max(received, sent) / rates.digest,
        "finalise": received / rates.finalise,
        "read_back": received / rates.read_back,
    }


def fp8_seconds(plan: ReshardPlan, memory_rate: float) -> float:
    """Returns the seconds in which the busiest rank makes its scales and FP8 values (mrl/reshard/quantise.py).

    It makes scales of all that it holds, and FP8 values of what it sends. Nobody has measured it: passes over memory
    are counted, and all that is sent as FP8 values.
    """
    size = plan.train.world_size // plan.train.pipeline
    held = max(fp8_count(plan.model, plan.train, stage * size) for stage in range(plan.train.pipeline))
    sent = int(plan.loads.sent.sum(axis=(0, 1)).max())
    return (_SCALE_TRAFFIC * held + _WORD_TRAFFIC * sent) / memory_rate


def launch_seconds(plan: ReshardPlan, starts: Starts) -> float:
    """Returns the seconds that the busiest process spends on starting copies and on waiting for the device, once a
    message.

    This is an upper bound: each copy counts by itself, while runs of copies are launched as one (mrl.reshard.copies).
    """
    return most_copies(plan) * starts.copy + most_messages(plan) * starts.wait


def most_copies(plan: ReshardPlan) -> int:
    """Returns the copies of the worker with most. If the mean of the ranks is more, returns that.

    Each box is packed by one rank and unpacked by one worker, so fewer ranks have more copies each.
    """
    copies = [len(choices) for choices in plan.schedule.choices]
    return max(max(copies), -(-sum(copies) // plan.train.world_size))


def most_messages(plan: ReshardPlan) -> int:
    """Returns the messages of the first worker, which stands for all. If the mean of the ranks is more, returns
    that.
    """
    flow = plan.schedule.flow(0)
    of_worker = len(np.unique(flow.round.astype(np.int64) * plan.train.world_size + flow.source))
    return max(of_worker, -(-of_worker * plan.rollout.world_size // plan.train.world_size))


def bound_seconds(plan: ReshardPlan, link: Link) -> float:
    """Returns the least seconds of a sync: the larger of what a worker must receive and what ranks must send.

    Receiving is counted by kind of link. Sending counts bytes to other nodes that only some ranks have: for each set of
    replicas, each pipeline stage, and all ranks together.
    """
    ingress = (plan.loads.received.sum(axis=1) / link.rates[:, None]).max()
    demand = remote_demand(plan)
    stage_size = plan.train.world_size // plan.train.pipeline
    groups: dict[frozenset[int], int] = defaultdict(int)
    for ranks, nbytes in demand.items():
        stages = {rank // stage_size for rank in ranks}
        whole_stages = frozenset(
            rank for stage in stages for rank in range(stage * stage_size, (stage + 1) * stage_size)
        )
        for group in {ranks, whole_stages, frozenset(range(plan.train.world_size))}:
            groups[group] += nbytes
    rank_device = plan.devices.rank_device.tolist()
    egress = []
    for ranks, nbytes in groups.items():
        devices = {rank_device[rank] for rank in ranks}
        egress.append(nbytes / len(devices))
    return float(max(ingress, max(egress, default=0) / link.between_nodes))


def remote_demand(plan: ReshardPlan) -> dict[frozenset[int], int]:
    """Returns the bytes that workers need from other nodes, by the set of ranks that have them."""
    demand: dict[frozenset[int], int] = defaultdict(int)
    streams = plan.schedule.streams
    for position, stream in enumerate(streams):
        workers = range(position, plan.rollout.world_size, len(streams))
        nearest = [stream.nearness(plan.devices, worker).min(axis=1) for worker in workers]
        far = np.sum([tier == REMOTE for tier in nearest], axis=0)  # workers that have no holder of a set at hand
        set_bytes = np.bincount(stream.holder_set, stream.nbytes, len(far))
        for holder_set in np.flatnonzero(far):
            demand[stream.holders[holder_set]] += int(far[holder_set]) * int(set_bytes[holder_set])
    return demand
