"""What a run needs of a cluster, as Ray resources. No Ray import, so that a machine that is too small is told at once."""

import os

from mrl.config.places import rank_places, rollout_layout
from mrl.config.schema import RunConfig
from mrl.errors import EnvironmentFault
from mrl.platforms.hosting import Hosting, get_hosting


def own_cpus() -> int:
    """CPUs that this process may use, and so the CPUs of a cluster that the run starts for itself."""
    return len(os.sched_getaffinity(0))


def needed_resources(config: RunConfig, actor: bool = True) -> dict[str, float]:
    """Ray resources of the whole run, by name; without `actor` those of its engines alone."""
    hosting = get_hosting(config.cluster.device)
    total: dict[str, float] = {}
    for bundle in [*(actor_bundles(config, hosting) if actor else ()), *engine_bundles(config, hosting)]:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def actor_bundles(config: RunConfig, hosting: Hosting) -> list[dict[str, float]]:
    """Resources of each actor rank."""
    return [hosting.ray_resources(config.cluster.cpus_per_actor, devices=1)] * config.actor.layout.world_size


def engine_bundles(config: RunConfig, hosting: Hosting) -> list[dict[str, float]]:
    """Resources of each engine's process; its workers share one node. Raises ConfigError when engines do not fit."""
    layout, _ = rollout_layout(config), rank_places(config)
    return [hosting.ray_resources(config.cluster.cpus_per_engine, devices=layout.workers_per_engine)] * layout.num_engines


def check_size(config: RunConfig, have: dict[str, float], names: tuple[str, ...] | None = None, actor: bool = True) -> None:
    """Raises EnvironmentFault when the run needs more than `have`. `names`: only these are known; `actor`: see needed_resources."""
    need = needed_resources(config, actor)
    short = {n: amount for n, amount in need.items() if (names is None or n in names) and have.get(n, 0.0) + 1e-6 < amount}
    if not short:
        return
    lines = [f"{name}: the run needs {amount:g}, {have.get(name, 0.0):g} are there" for name, amount in short.items()]
    raise EnvironmentFault(
        f"the cluster is too small: {'; '.join(lines)}. {config.actor.layout.world_size if actor else 0} actor ranks "
        f"(cluster.cpus_per_actor {config.cluster.cpus_per_actor:g}) and {config.rollout.num_engines} engines "
        f"(cluster.cpus_per_engine {config.cluster.cpus_per_engine:g}) must fit at once; "
        "add nodes, choose a smaller layout or lower the CPUs per process"
    )
