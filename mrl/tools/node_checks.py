"""Checks that the nodes of a cluster fit together: devices, drivers, software, shared memory, clocks, variables of
communicators, and reachable ports.

Run by python -m mrl.tools.node_checks ADDRESS DEVICE. `mrl doctor` starts it as a program, and the ladder of
scripts/hardware calls it. Each node has one actor, which reports facts and its clock. It listens on two ports: one from
mrl's own range, one from the kernel's, where gloo and NCCL listen. Then each actor tries the ports of all others.
"""

import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from mrl.errors import EnvironmentFault
from mrl.platforms.device_state import read_device_state
from mrl.platforms.inventory import find_devices, network_setting_faults, network_settings
from mrl.process.same_software import check_same, software
from mrl.tools.doctor.host_checks import SHM_LEAST
from mrl.units import GIB

SKEW_S = 1.0  # between the clocks of two nodes: lines of logs are ordered by seconds
_TRY_S = 2.0
_AT_ONCE = 64  # connections that a node tries together
_ANSWER_S = 60.0
_CLOCKS = "set the clocks by one server (chrony)"
_PORTS = (
    "open TCP 1024 to 65535 between the nodes: Ray's ports, 20000 to 29999 for meetings, and those of the kernel "
    "(ip_local_port_range), where gloo and NCCL listen"
)


@dataclass(frozen=True)
class NodeFacts:
    """The facts of a node."""

    devices: str  # kinds
    driver: str
    software: dict[str, str]
    shm_gib: float  # size of /dev/shm
    network: dict[str, str] = field(default_factory=dict)  # variables that communicators read, of its raylet
    interfaces: list[str] = field(default_factory=list)

    @classmethod
    def here(cls, device: str) -> "NodeFacts":
        """Returns the facts of this node for such devices."""
        driver = ""
        if device != "cpu":
            driver = find_devices(device).driver or "unknown"
        shm_gib = shutil.disk_usage("/dev/shm").total / GIB
        interfaces = [name for _, name in socket.if_nameindex()]
        return cls(_kinds(device), driver, software(), shm_gib, network_settings(os.environ), interfaces)


def _kinds(device: str) -> str:
    if names := {gpu.name for gpu in read_device_state(device).gpus}:
        return " and ".join(sorted(names))
    from mrl.platforms import get_platform

    try:
        return get_platform(device).device_name()
    except EnvironmentFault as fault:
        return f"none ({fault})"


@dataclass(frozen=True)
class Clock:
    """A node's clock, read between two readings of the caller's."""

    asked: float
    shown: float
    answered: float

    @property
    def skew_s(self) -> float:
        """How far it is certainly ahead (negative: behind) of the caller's; 0 if the readings allow equality."""
        return min(self.shown - self.asked, 0.0) or max(self.shown - self.answered, 0.0)


def unlike_faults(nodes: Mapping[str, NodeFacts]) -> list[str]:
    """Returns what differs between nodes, given by address, each with its cure."""
    problems = [
        _unlike({address: node.devices for address, node in nodes.items()}, "devices", "give a run one kind of them"),
        _unlike({address: node.driver for address, node in nodes.items()}, "drivers", "install one on every node"),
    ]
    small = [f"{address} {node.shm_gib:.2f} GiB" for address, node in nodes.items() if node.shm_gib < SHM_LEAST]
    if small:
        problems.append(f"/dev/shm is small ({', '.join(small)}): give containers --shm-size=16g or --ipc=host")
    network = {address: node.network for address, node in nodes.items()}
    problems += network_setting_faults(network, {address: node.interfaces for address, node in nodes.items()})
    try:
        check_same({f"node {address}": (address, node.software) for address, node in nodes.items()})
    except EnvironmentFault as fault:
        problems.append(str(fault))
    return [fault for fault in problems if fault]


def _unlike(values: Mapping[str, str], what: str, cure: str) -> str:
    addresses: dict[str, list[str]] = {}
    for address, value in values.items():
        addresses.setdefault(value, []).append(address)
    if len(addresses) < 2:
        return ""
    listed = "; ".join(f"{value} on {', '.join(having)}" for value, having in addresses.items())
    return f"several {what} ({listed}): {cure}"


def clock_faults(clocks: Mapping[str, Clock], limit_s: float = SKEW_S) -> list[str]:
    """Returns differences between the caller's clock and those of nodes, given by address."""
    return [
        f"the clock of {address} is {abs(clock.skew_s):.1f} s {'ahead' if clock.skew_s > 0 else 'behind'}"
        for address, clock in clocks.items()
        if abs(clock.skew_s) > limit_s
    ]


def port_faults(closed: Mapping[str, Sequence[tuple[str, int]]]) -> list[str]:
    """Describes unreachable ports. `closed`: address of a node -> (address, port) that it could not reach."""
    return [f"{node} does not reach {host}:{port}" for node, targets in closed.items() for host, port in targets]


def reaches(targets: Sequence[tuple[str, int]], timeout_s: float = _TRY_S) -> list[tuple[str, int]]:
    """Returns the `targets` to which no connection can be made from here.

    They are tried in parallel, because a firewall drops connections, and each try then takes the whole time.
    """
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        is_open = list(threads.map(lambda target: _is_open(target, timeout_s), targets))
    return [target for target, reached in zip(targets, is_open, strict=True) if not reached]


def _is_open(target: tuple[str, int], timeout_s: float) -> bool:
    try:
        socket.create_connection(target, timeout=timeout_s).close()
    except OSError:
        return False
    return True


class Listener:
    """An actor on one node: its facts, its clock, two open ports, and what it can reach."""

    def __init__(self) -> None:
        import ray

        from mrl.process.free_ports import free_port

        self.address = ray.util.get_node_ip_address()
        self._sockets = [socket.create_server((self.address, port)) for port in (free_port(), 0)]

    def facts(self, device: str) -> dict:
        """Returns the fields of NodeFacts."""
        return asdict(NodeFacts.here(device))

    def clock(self) -> float:
        """Returns the seconds of this node's clock."""
        return time.time()

    def ports(self) -> list[tuple[str, int]]:
        """Returns the addresses and ports on which it listens."""
        return [(self.address, held.getsockname()[1]) for held in self._sockets]

    def closed(self, targets: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Returns the `targets` on other nodes to which no connection can be made from here."""
        return reaches([target for target in targets if target[0] != self.address])


def check_nodes(address: str, device: str) -> tuple[int, list[str]]:
    """Returns the number of nodes of the cluster at `address`, and the faults between them for such devices, with
    cures.
    """
    import ray

    from mrl.process.ray_nodes import on_node

    ray.init(address=address, log_to_driver=False, logging_level="error", namespace="mrl-doctor")
    kind = ray.remote(Listener)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    there = {node["NodeManagerAddress"]: kind.options(**on_node(node["NodeID"])).remote() for node in nodes}

    def all_of(method: str, *arguments: object) -> dict:
        refs = {host: getattr(listener, method).remote(*arguments) for host, listener in there.items()}
        return {host: ray.get(ref, timeout=_ANSWER_S) for host, ref in refs.items()}

    facts = {host: NodeFacts(**found) for host, found in all_of("facts", device).items()}
    targets = [target for of_node in all_of("ports").values() for target in of_node]
    clocks = {host: _asked(ray, listener) for host, listener in there.items()}
    apart = ((clock_faults(clocks), _CLOCKS), (port_faults(all_of("closed", targets)), _PORTS))
    return len(nodes), [*unlike_faults(facts), *(f"{', '.join(found)}: {cure}" for found, cure in apart if found)]


def _asked(ray, listener) -> Clock:
    asked = time.time()
    return Clock(asked, ray.get(listener.clock.remote(), timeout=_ANSWER_S), time.time())


def main() -> None:
    """Prints one line. Ends with status 1 if there are faults."""
    count, faults = check_nodes(*sys.argv[1:])
    if faults:
        with suppress(BrokenPipeError):
            print("; ".join(faults), file=sys.stderr)
        raise SystemExit(1)
    print(f"{count} nodes: of one kind, clocks agree to {SKEW_S:g} s, ports are open from each to each")


if __name__ == "__main__":
    main()
