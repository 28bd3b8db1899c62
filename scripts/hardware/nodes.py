"""The nodes of a Ray cluster beside each other (RAY_ADDRESS): kinds of devices, versions, clocks, shared memory, open
ports.
"""

import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from checks import Figures, Machine, Skip, Wrong, check

SKEW_S = 1.0  # between nodes' clocks; what is read from logs and spans of several nodes is off by as much
SHM_LEAST_GIB = 1.0
PORTS = 8  # of mrl's own range that are tried from every node to every other
WITHIN_S = 30


@dataclass(frozen=True)
class Node:
    """What one node says of itself. `clock_s`: its clock less the asker's, at the middle of the question."""

    name: str
    device: str
    driver: str
    versions: str
    clock_s: float
    shm_gib: float
    closed: tuple[str, ...] = ()  # HOST:PORT that it could not connect to while somebody listened there


def faults(nodes: Iterable[Node]) -> list[str]:
    """What does not belong together, each with its cure."""
    every = list(nodes)
    found = [
        _unlike(every, "device", "devices", "a job takes one kind: leave the others out of the cluster"),
        _unlike(every, "driver", "drivers", "install one driver on all nodes; NCCL and IPC go over both"),
        _unlike(every, "versions", "versions of mrl's packages", "install the same row on every node"),
    ]
    clocks = [node.clock_s for node in every]
    if max(clocks) - min(clocks) > SKEW_S:
        late = max(every, key=lambda node: abs(node.clock_s - sorted(clocks)[len(clocks) // 2]))
        found.append(
            f"clocks differ by {max(clocks) - min(clocks):.1f} s ({late.name} is off): run chrony or ntpd on all nodes"
        )
    for node in every:
        if node.shm_gib < SHM_LEAST_GIB:
            found.append(f"{node.name}: /dev/shm has {node.shm_gib * 1024:.0f} MiB: give its container --shm-size=16g")
        if node.closed:
            found.append(f"{node.name} cannot reach {', '.join(node.closed)}: open TCP between the nodes (firewall)")
    return [text for text in found if text]


def _unlike(nodes: list[Node], field: str, what: str, cure: str) -> str:
    values: dict[str, list[str]] = {}
    for node in nodes:
        values.setdefault(getattr(node, field), []).append(node.name)
    if len(values) < 2:
        return ""
    return (
        f"several {what}: "
        + "; ".join(f"{value} on {', '.join(names)}" for value, names in values.items())
        + f". {cure}"
    )


def facts(device: str) -> dict[str, Any]:
    """Of this node; run on each."""
    import shutil

    from mrl.platforms import get_platform
    from mrl.platforms.inventory import find_devices
    from mrl.platforms.versions import installed_versions

    packages = " ".join(f"{name} {version}" for name, version in installed_versions().items())
    return {"device": get_platform(device).device_name(), "driver": find_devices(device).driver or "",
            "versions": packages,
            "shm_gib": shutil.disk_usage("/dev/shm").total / 2**30, "clock": time.time()}  # fmt: skip


class Listener:
    """A few of mrl's own ports of a node, listened on."""

    def __init__(self) -> None:
        from mrl.cluster.prerequisites import free_port

        self._sockets = [socket.create_server(("", free_port()), backlog=64) for _ in range(PORTS)]

    def ports(self) -> list[int]:
        """Their numbers."""
        return [each.getsockname()[1] for each in self._sockets]


def closed_of(addresses: list[tuple[str, int]], timeout_s: float = 3.0) -> list[str]:
    """HOST:PORT that cannot be connected to from here."""
    closed = []
    for host, port in addresses:
        try:
            socket.create_connection((host, port), timeout_s).close()
        except OSError:
            closed.append(f"{host}:{port}")
    return closed


@check()
def nodes(machine: Machine) -> Figures:
    """All nodes of the cluster at RAY_ADDRESS say what they are, and reach each other."""
    if not os.environ.get("RAY_ADDRESS"):
        raise Skip("no cluster: RAY_ADDRESS is not set")
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="error")
    alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    on = {one: {"scheduling_strategy": NodeAffinitySchedulingStrategy(one, soft=False), "num_cpus": 0} for one in alive}
    listeners = {one: ray.remote(Listener).options(**on[one]).remote() for one in alive}
    open_ports = [
        (alive[one], port) for one, who in listeners.items() for port in ray.get(who.ports.remote(), timeout=WITHIN_S)
    ]
    asked = {
        one: ray.remote(closed_of).options(**on[one]).remote([a for a in open_ports if a[0] != alive[one]])
        for one in alive
    }
    closed = {one: tuple(ray.get(ref, timeout=WITHIN_S)) for one, ref in asked.items()}
    told = [_asked(ray, machine.device, alive[one], on[one], closed[one]) for one in alive]
    if wrong := faults(told):
        raise Wrong("; ".join(wrong))
    return {
        "nodes": len(told),
        "device": told[0].device,
        "skew_s": max(n.clock_s for n in told) - min(n.clock_s for n in told),
    }


def _asked(ray: Any, device: str, name: str, options: dict[str, Any], closed: tuple[str, ...]) -> Node:
    """Twice, so that the answer of a process that runs tells the clock."""
    ask = ray.remote(facts).options(**options)
    ray.get(ask.remote(device), timeout=WITHIN_S)
    began = time.time()
    said = ray.get(ask.remote(device), timeout=WITHIN_S)
    clock = said.pop("clock") - (began + time.time()) / 2
    return Node(name=name, clock_s=clock, closed=closed, **said)
