"""What point-to-point communicators of weight syncs take of a device: one for every pair of a rank and a worker that
NCCL or HCCL serves.

Both libraries make one for two processes at their first message (ProcessGroupNCCL.cpp and ProcessGroupHCCL.cpp,
pointToPoint), with buffers of its own, beside what the engines' memory was measured with; it stays as long as the two
are connected. Fewer pairs are not to be had: in layouts that spread experts over all ranks each rank holds some that no
other has, and every engine needs them.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from mrl.config.places import cluster_shape, rollout_layout
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError
from mrl.model.device_grid import Place, actor_places, engine_places
from mrl.platforms.hosting import get_hosting
from mrl.reshard.setup import pair_route


def most_pairs(config: RunConfig) -> int:
    """Pairs at the device that has most, were every rank to send to every worker; with many experts nearly each does.

    0 where processes cannot stand on the cluster, which who needs their places says.
    """
    if config.reshard.path != "fast":
        return 0
    try:
        ranks, workers = _places(config)
    except ConfigError:
        return 0
    pairs: Counter[Place] = Counter()
    for these, others in ((ranks, workers), (workers, ranks)):
        nodes = _by_node(others)
        for place, count in Counter(these).items():
            pairs[place] += count * _served(config, place, nodes)
    return max(pairs.values())


def _places(config: RunConfig) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Places of ranks and workers as `rank_places` has them, but for the order of workers inside a node.

    That order changes no count.
    """
    cluster = cluster_shape(config.cluster)
    world = config.actor.layout.world_size
    first = 0
    if config.cluster.placement != "colocated":
        first = world
    return actor_places(world, cluster), engine_places(rollout_layout(config.rollout), cluster, first)


def _by_node(places: Sequence[Place]) -> dict[int, list[Place]]:
    nodes: dict[int, list[Place]] = defaultdict(list)
    for place in places:
        nodes[place.node].append(place)
    return nodes


def _served(config: RunConfig, place: Place, others: Mapping[int, Sequence[Place]]) -> int:
    """How many processes on the other side p2p serves, seen from a process at `place`. `others`: by node."""
    kind = config.reshard.transport
    reach = get_hosting(config.cluster.device).memory_reach
    served = 0
    for node, there in others.items():
        if node == place.node:
            served += sum(pair_route(kind, place, other, reach) == "p2p" for other in there)
        elif pair_route(kind, place, there[0], reach) == "p2p":  # all of another node are served alike
            served += len(there)
    return served
