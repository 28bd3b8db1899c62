"""Placement of actors that help engines and ranks."""

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def on_node(node: str | None = None) -> dict[str, Any]:
    """Returns options of an actor that reserves no processor, on the node with that id alone.

    Without an id it is this process's node.
    """
    there = node or ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(there, soft=False)}
