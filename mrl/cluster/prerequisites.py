"""What a run needs of its cluster, checked before Ray is imported: a head that answers, a free port, enough devices."""

import os
import random
import re
import socket
import sys
from contextlib import suppress
from pathlib import Path

from mrl.config.places import rank_places, rollout_layout
from mrl.config.schema import RunConfig
from mrl.errors import EnvironmentFault
from mrl.model.device_grid import Place
from mrl.platforms.hosting import Hosting, get_hosting
from mrl.units import GIB

CONNECT_TIMEOUT_S = 10.0
# RFC 9113: preface, empty SETTINGS frame
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_PORT_TRIES = 100


def ray_address(config: RunConfig) -> str | None:
    """Address of the cluster to join; None when the run starts one of its own."""
    address = config.cluster.address or os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def check_reachable(address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Raises EnvironmentFault unless a gRPC server, which a Ray head is, answers at `address` in time.

    Ray itself would try for minutes and then end the process.
    """
    if address == "auto":  # Ray looks for a cluster of this machine and says at once when there is none
        return
    match = re.fullmatch(r"(?:ray://)?\[?([^/\]]+?)\]?:(\d{1,5})", address)
    if match is None:
        raise unreachable(address, "it does not read HOST:PORT")
    try:
        with socket.create_connection((match[1], int(match[2])), timeout=timeout_s) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "1":
                return
            connection.sendall(_HTTP2_HELLO)
            answer = connection.recv(9)
    except (OSError, OverflowError) as error:
        raise unreachable(address, str(error)) from error
    if len(answer) < 9 or answer[3] != _SETTINGS:
        raise unreachable(
            address, "something else listens there; the dashboard's port, where jobs are submitted, is not the head's"
        )


def unreachable(address: str, why: str) -> EnvironmentFault:
    """What is said when a cluster cannot be joined."""
    return EnvironmentFault(
        f"no Ray head answers at {address} (from cluster.address or $RAY_ADDRESS): {why}; start one with "
        "launch/start_head.sh and give HOST:6379, or unset both and the run starts a cluster of its own"
    )


def check_port_free(port: int) -> None:
    """Raises EnvironmentFault when something listens on `port` of this machine."""
    with socket.socket() as probe:
        # a connection that lingers after its run is no obstacle
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            raise EnvironmentFault(
                f"cluster.port {port} is in use; choose another, or leave it out for a free one"
            ) from error


def free_port() -> int:
    """A TCP port of this host that nobody listens on now, and that the kernel hands to nobody before it is used.

    A port of the kernel's ephemeral range may become some connection's own between this look and the listening.
    """
    ports = _own_ports()
    for port in random.SystemRandom().sample(ports, k=min(_PORT_TRIES, len(ports))):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _own_ports() -> range:
    """Ports between those of Ray's workers (10002 to 19999) and Kubernetes' (30000 to 32767),
    below the ephemeral ones.
    """
    try:
        first_ephemeral = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return range(0)
    return range(20000, min(30000, first_ephemeral))


def ask_for_token_authentication() -> None:
    """Says Ray's own default for clusters that it starts, which spares its warning; a value of the user's stays.

    Ray reads the variable when it is imported, and a change after that would split the cluster in two minds.
    """
    if "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def own_cpus() -> int:
    """CPUs that this process may use, and so the CPUs of a cluster that the run starts for itself."""
    return len(os.sched_getaffinity(0))


def needed_resources(config: RunConfig, actor: bool = True) -> dict[str, float]:
    """Ray resources of the whole run, by name; without `actor` those of its engines alone."""
    hosting = get_hosting(config.cluster.device)
    if actor and config.cluster.placement == "colocated":
        bundles = device_bundles(config, hosting)
    else:
        bundles = [*(actor_bundles(config, hosting) if actor else ()), *engine_bundles(config, hosting)]
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def actor_bundles(config: RunConfig, hosting: Hosting) -> list[dict[str, float]]:
    """Resources of each actor rank."""
    return [hosting.ray_resources(config.cluster.cpus_per_actor, devices=1)] * config.actor.layout.world_size


def engine_bundles(config: RunConfig, hosting: Hosting) -> list[dict[str, float]]:
    """Resources of each data-parallel rank of each engine, whose tensor workers share one node.

    Raises ConfigError when engines do not fit.
    """
    layout, _ = rollout_layout(config), rank_places(config)
    return (
        [hosting.ray_resources(config.cluster.cpus_per_engine / layout.data, devices=layout.tensor)]
        * layout.num_engines
        * layout.data
    )


def shared_devices(config: RunConfig) -> tuple[Place, ...]:
    """The devices of a colocated run, node by node. Raises ConfigError when engines do not fit."""
    ranks, workers = rank_places(config)
    return tuple(sorted({*ranks, *workers}))


def device_bundles(config: RunConfig, hosting: Hosting) -> list[dict[str, float]]:
    """Resources of each device of a colocated run.

    They are alike, so that whichever node Ray finds one on, it can be any of them.
    """
    devices = len(shared_devices(config))
    ranks, engines = actor_bundles(config, hosting), engine_bundles(config, hosting)
    cpus = sum(bundle["CPU"] for bundle in (*ranks, *engines)) / devices
    return [hosting.ray_resources(cpus, devices=1)] * devices


def check_size(
    config: RunConfig, have: dict[str, float], names: tuple[str, ...] | None = None, actor: bool = True
) -> None:
    """Raises EnvironmentFault when the run needs more than `have`.

    `names`: only these are known; `actor`: see needed_resources.
    """
    need = needed_resources(config, actor)
    short = {
        n: amount for n, amount in need.items() if (names is None or n in names) and have.get(n, 0.0) + 1e-6 < amount
    }
    if not short:
        return
    lines = [f"{name}: the run needs {amount:g}, {have.get(name, 0.0):g} are there" for name, amount in short.items()]
    raise EnvironmentFault(
        f"the cluster is too small: {'; '.join(lines)}. {config.actor.layout.world_size if actor else 0} actor ranks "
        f"(cluster.cpus_per_actor {config.cluster.cpus_per_actor:g}) and {config.rollout.num_engines} engines "
        f"(cluster.cpus_per_engine {config.cluster.cpus_per_engine:g}) must fit at once; "
        "add nodes, choose a smaller layout or lower the CPUs per process"
    )


def check_object_stores(need: int, have: dict[str, int]) -> None:
    """Raises EnvironmentFault where a node's object store is smaller than `need`, both in bytes; `have` by the node's
    name.

    Ray would spill what does not fit to the node's disk, several times a step, and end the run when that is full.
    """
    small = {node: size for node, size in have.items() if size < need}
    if not small:
        return
    node, size = min(small.items(), key=lambda known: known[1])
    raise EnvironmentFault(
        f"the object store of {len(small)} of {len(have)} nodes is too small: Ray on {node} has one of "
        f"{size / GIB:.2f} GiB, and the responses that exist at once take {need / GIB:.2f} GiB of a node when all are "
        f"as long as data.max_response_length allows. Start Ray there with --object-store-memory {need} or more "
        "(launch/start_head.sh and start_worker.sh hand it on), or lower data.train_batch_size, rollout.n, "
        "data.max_response_length, trainer.max_staleness or data.val_max_samples; routes of "
        "actor.router_replay: R3 are most of it where they are on"
    )
