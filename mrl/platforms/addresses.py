"""Finds the address of this host that other nodes can reach, and its interface.

A host's name often resolves to loopback (Debian writes `127.0.1.1 NAME` into /etc/hosts), which no other node can
reach. gloo uses that address unless it is told another.
"""

import os
import socket

import psutil

from mrl.errors import EnvironmentFault

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # torch reads it for every gloo group that has no device of its own


def address_towards(host: str) -> str:
    """Returns the address from which this host would talk to `host`. Sends nothing.

    Raises EnvironmentFault if no route leads there.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError as error:
        raise EnvironmentFault(
            f"no route of this host ({socket.gethostname()}) leads to {host}: {error.strerror or error}"
        ) from error


def interface_of(address: str) -> str:
    """Returns the interface with `address`. Raises EnvironmentFault if this host has none."""
    names = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    # all of 127/8 belongs to loopback, which lists one address
    if address not in names and not address.startswith("127."):
        raise EnvironmentFault(
            f"no interface of this host ({socket.gethostname()}) has the address {address}; it has {sorted(names)}"
        )
    return names.get(address) or names["127.0.0.1"]


def gloo_environment(address: str) -> dict[str, str]:
    """Returns the variable that makes gloo groups use `address`, one of this host's. A variable that is set stays."""
    return {GLOO_INTERFACE: os.environ.get(GLOO_INTERFACE) or interface_of(address)}


def address_environment(address: str) -> dict[str, str]:
    """Returns variables with which an engine and its processes connect to others at `address`. Variables that are set
    stay.

    Returns none if no interface has the address: then it is translated on the way, which the cluster has to handle.
    """
    try:
        wanted = {GLOO_INTERFACE: interface_of(address), "VLLM_HOST_IP": address}
    except EnvironmentFault:
        return {}
    return {name: os.environ.get(name) or value for name, value in wanted.items()}
