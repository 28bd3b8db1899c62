"""The weight sync of a plan: the reshard plan's own summary, for the places where ranks and workers stand."""

from time import perf_counter
from typing import Any

from mrl.model.device_grid import Place
from mrl.plan.devices import Device
from mrl.plan.inputs import PlanInputs
from mrl.reshard.plan import Place as SyncPlace
from mrl.reshard.plan import Topology, plan_reshard
from mrl.reshard.summary import Link, reshard_summary

_MIB = 1024**2


def sync_section(inputs: PlanInputs, ranks: tuple[Place, ...], workers: tuple[Place, ...]) -> dict[str, Any]:
    """Bytes, rounds, staging and predicted seconds of one sync, with the hash that both sides will compare.

    `plan_seconds` is measured and differs from run to run.
    """
    config, begun = inputs.config, perf_counter()
    plan = plan_reshard(
        inputs.model,
        inputs.train,
        inputs.rollout,
        dialect=config.cluster.device,
        dtype=config.rollout_dtype,
        topology=Topology(tuple(SyncPlace(*place) for place in ranks), tuple(SyncPlace(*place) for place in workers)),
        budget_bytes=config.reshard.budget_mb * _MIB,
    )
    link = device_link(inputs.device, inputs.assumptions.link_share)
    return reshard_summary(plan, link, plan_seconds=perf_counter() - begun)


def device_link(device: Device, share: float) -> Link:
    """The rates of a device's links; a copy on the device reads and writes its memory."""
    return Link(device.network_rate * share, device.node_rate * share, device.memory_rate * share / 2)
