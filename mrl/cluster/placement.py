"""Where each process goes: one Ray bundle a rank and one an engine, ranks numbered so that neighbours share a node."""

from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mrl.errors import EnvironmentFault
from mrl.model.device_grid import rank_order


@dataclass(frozen=True)
class Places:
    """A reserved placement group and its bundle indices in rank order."""

    group: PlacementGroup
    bundles: tuple[dict[str, float], ...]
    order: tuple[int, ...]

    def options(self, position: int) -> dict:
        """Options of the Ray actor at `position` (a rank, or an engine number)."""
        bundle = self.bundles[self.order[position]]
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.order[position])
        own = {k: v for k, v in bundle.items() if k not in ("CPU", "GPU")}
        return {
            "scheduling_strategy": strategy,
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "resources": own,
            "max_restarts": 0,
        }

    def release(self) -> None:
        """Gives the bundles back."""
        remove_placement_group(self.group)


def reserve(bundles: list[dict[str, float]], timeout_s: float, together: int = 1) -> Places:
    """Reserves all bundles at once; every `together` neighbours in rank order share a node where that can be.

    Raises EnvironmentFault when the cluster cannot give them within the deadline.
    """
    group = placement_group(bundles, strategy="PACK")
    ready, _ = ray.wait([group.ready()], timeout=timeout_s)
    if not ready:
        remove_placement_group(group)
        raise EnvironmentFault(f"the cluster did not free {len(bundles)} bundles like {bundles[0]} within {timeout_s:g} s; is it busy?")
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return Places(group, tuple(bundles), rank_order([nodes[i] for i in range(len(bundles))], together))
