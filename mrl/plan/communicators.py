"""Device memory of communicators of NCCL or HCCL: those of weight syncs, and those of models beside the actor.

A weight sync has one for every rank and worker that the library joins. Both libraries make it for two processes at
their first message (ProcessGroupNCCL.cpp and ProcessGroupHCCL.cpp, pointToPoint). It has its own buffers, which are
missing in the measured memory of engines. It stays as long as the two are connected. The number of pairs cannot be
reduced. In layouts that spread experts over all ranks, each rank holds some that no other has. Every engine needs them.

A teacher has process groups of its own on the actor's ranks. So has a critic in a layout of its own. Each group of
several ranks gets a communicator at its first collective. The actor's are in `Device.reserved`.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from mrl.config.places import cluster_shape, rollout_layout
from mrl.config.schema import RunConfig
from mrl.config.teacher_model import teacher_of
from mrl.errors import MrlError
from mrl.model import ModelSpec, planning_model_spec
from mrl.model.device_grid import Place, actor_places, engine_places
from mrl.model.layout import TrainLayout
from mrl.platforms.hosting import get_hosting
from mrl.reshard.setup import pair_route

# Axes of the groups in which Megatron's ranks of one model meet (parallel_state.py); each group has its communicator.
_PASSES = (("tp",), ("cp",), ("pp",))
_UPDATES = (("cp", "dp"),)  # beside one of all ranks, for the gradient's norm
_EXPERT_PASSES = (("ep",), ("etp",), ("etp", "ep"))
_EXPERT_UPDATES = (("edp",),)


def other_groups(config: RunConfig, model: ModelSpec) -> int:
    """Returns the process groups of several ranks that a rank has for the teacher and the critic, beside the actor's.

    A critic in the actor's layout uses the actor's. Returns 0 for illegal layouts, which other code reports.
    """
    count = 0
    try:
        teacher = teacher_of(config, lambda path: planning_model_spec(path)[0])
        if teacher is not None:
            count += groups_of(teacher.layout, teacher.model.is_moe, is_trained=False)
        critic = config.of_critic
        if critic is not None:
            layout = TrainLayout.build(critic.actor.layout.model_dump(), model)
            if layout != TrainLayout.build(config.actor.layout.model_dump(), model):
                count += groups_of(layout, model.is_moe, is_trained=True)
    except MrlError:
        return 0
    return count


def groups_of(layout: TrainLayout, is_moe: bool, is_trained: bool) -> int:
    """Returns the process groups of several ranks in which a rank of one model meets others."""
    dense = _PASSES + _UPDATES * is_trained
    sizes = [len(layout.dense_group(0, *axes)) for axes in dense]
    if is_moe:
        experts = _EXPERT_PASSES + _EXPERT_UPDATES * is_trained
        sizes += [len(layout.expert_group(0, *axes)) for axes in experts]
    if is_trained:
        sizes.append(layout.world_size)
    return sum(size > 1 for size in sizes)


def most_pairs(config: RunConfig) -> int:
    """Returns the pairs at the device with most, if every rank sends to every worker. With many experts nearly each
    does.

    Returns 0 for processes that do not fit on the cluster, which other code reports.
    """
    if config.reshard.path != "fast":
        return 0
    try:
        ranks, workers = _places(config)
    except MrlError:
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
