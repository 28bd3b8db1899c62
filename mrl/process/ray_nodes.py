"""The node and devices that Ray gave to this process, and options that bind helpers to a node."""

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mrl.platforms.inventory import device_number


def on_node(node: str | None = None) -> dict[str, Any]:
    """Returns options of an actor that reserves no processor, on the node with that id alone.

    Without an id it is this process's node.
    """
    there = node or ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(there, soft=False)}


def own_devices() -> list[tuple[str, int]]:
    """Returns (node, device) of every accelerator that Ray gave this process."""
    context = ray.get_runtime_context()
    devices = next((ids for ids in context.get_accelerator_ids().values() if ids), [])
    return [(context.get_node_id(), device_number(device)) for device in devices]
