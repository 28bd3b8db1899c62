"""TCP ports of this host that nobody else will take."""

import random
import socket
from contextlib import suppress
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_PORT_TRIES = 100


def free_port() -> int:
    """Returns a free TCP port of this host that the kernel will not assign to another connection.

    A port of the kernel's ephemeral range could be assigned between this check and the listening.
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
    """Returns the ports between those of Ray's workers (10002 to 19999) and Kubernetes' (30000 to 32767), below the
    ephemeral range.
    """
    try:
        first_ephemeral = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return range(0)
    return range(20000, min(30000, first_ephemeral))
