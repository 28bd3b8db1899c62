"""Device memory of the point-to-point communicators of weight syncs: one for every rank and worker that NCCL or HCCL
joins.

Both libraries make one for two processes at their first message (ProcessGroupNCCL.cpp and ProcessGroupHCCL.cpp,
pointToPoint). It has its own buffers, which are missing in the measured memory of engines. It stays as long as the two
are connected. The number of pairs cannot be reduced. In layouts that spread experts over all ranks, each rank holds
some that no other has. Every engine needs them.
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
    """Returns the pairs at the device with most, if every rank sends to every worker. With many experts nearly each
    does.

    Returns 0 for processes that do not fit on the cluster, which other code reports.
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
    """Returns the places of ranks and workers like `rank_places`, except for the order of workers inside a node.

    That order does not change the counts.
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
    """Returns how many processes on the other side p2p joins with a process at `place`. `others`: their places by
    node.
    """
    kind = config.reshard.transport
    reach = get_hosting(config.cluster.device).memory_reach
    served = 0
    for node, there in others.items():
        if node == place.node:
            served += sum(pair_route(kind, place, other, reach) == "p2p" for other in there)
        elif pair_route(kind, place, there[0], reach) == "p2p":  # the same for all processes of another node
            served += len(there)
    return served
