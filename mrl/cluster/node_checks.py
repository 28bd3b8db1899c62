"""Whether the nodes of a cluster agree on the time and reach each other's ports: python -m mrl.cluster.node_checks
ADDRESS.

`mrl doctor` runs it as a program. One task on every node; each says what its clock shows and listens on two ports, one
of the range that mrl takes its meeting points from, one of the kernel's, where gloo and NCCL listen; then each tries
those of all others.
"""

import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

SKEW_S = 1.0  # between clocks of two nodes: lines of logs are told apart by seconds
_TRY_S = 2.0
_ANSWER_S = 30.0


@dataclass(frozen=True)
class Clock:
    """A node's clock, read between two readings of the asker's."""

    asked: float
    shown: float
    answered: float

    @property
    def skew_s(self) -> float:
        """How far it certainly is ahead (behind: negative) of the asker's; 0 where the readings allow that."""
        return min(self.shown - self.asked, 0.0) or max(self.shown - self.answered, 0.0)


def clock_faults(clocks: Mapping[str, Clock], limit_s: float = SKEW_S) -> list[str]:
    """By address; what is wrong between the nodes and the asker."""
    return [
        f"the clock of {address} is {abs(clock.skew_s):.1f} s {'ahead' if clock.skew_s > 0 else 'behind'}"
        for address, clock in clocks.items()
        if abs(clock.skew_s) > limit_s
    ]


def port_faults(closed: Mapping[str, Sequence[tuple[str, int]]]) -> list[str]:
    """`closed`: address of a node -> (address, port) that it could not reach."""
    return [f"{node} does not reach {host}:{port}" for node, targets in closed.items() for host, port in targets]


def reaches(targets: Sequence[tuple[str, int]], timeout_s: float = _TRY_S) -> list[tuple[str, int]]:
    """Those of `targets` to which no connection can be made from here."""
    closed = []
    for target in targets:
        try:
            socket.create_connection(target, timeout=timeout_s).close()
        except OSError:
            closed.append(target)
    return closed


class Listener:
    """On one node: its clock, two open ports, and what it reaches."""

    def __init__(self) -> None:
        import ray

        from mrl.cluster.prerequisites import free_port

        self.address = ray.util.get_node_ip_address()
        self._sockets = [socket.create_server((self.address, port)) for port in (free_port(), 0)]

    def clock(self) -> float:
        """Seconds, as this node has them."""
        return time.time()

    def ports(self) -> list[tuple[str, int]]:
        """Where it listens."""
        return [(self.address, held.getsockname()[1]) for held in self._sockets]

    def closed(self, targets: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """See `reaches`."""
        return reaches([target for target in targets if target[0] != self.address])


def check_nodes(address: str) -> tuple[int, list[str]]:
    """Nodes of the cluster at `address`, and what is wrong between them."""
    import ray

    from mrl.cluster.helper_actors import on_node

    ray.init(address=address, log_to_driver=False, logging_level="error", namespace="mrl-doctor")
    kind, nodes = ray.remote(Listener), [node for node in ray.nodes() if node["Alive"]]
    there = {node["NodeManagerAddress"]: kind.options(**on_node(node["NodeID"])).remote() for node in nodes}
    ports = ray.get([listener.ports.remote() for listener in there.values()], timeout=_ANSWER_S)
    clocks = {}
    for host, listener in there.items():
        asked = time.time()
        shown = ray.get(listener.clock.remote(), timeout=_ANSWER_S)
        clocks[host] = Clock(asked, shown, time.time())
    targets = [target for of_node in ports for target in of_node]
    refs = {host: listener.closed.remote(targets) for host, listener in there.items()}
    longest = _ANSWER_S + _TRY_S * len(targets)
    closed = {host: ray.get(ref, timeout=longest) for host, ref in refs.items()}
    return len(nodes), clock_faults(clocks) + port_faults(closed)


def main() -> None:
    """Prints one line; ends with 1 where something is wrong."""
    count, faults = check_nodes(sys.argv[1])
    if faults:
        with suppress(BrokenPipeError):
            print("; ".join(faults), file=sys.stderr)
        raise SystemExit(1)
    print(f"{count} nodes: clocks agree to {SKEW_S:g} s, ports are open from each to each")


if __name__ == "__main__":
    main()
