"""Which of a host's addresses other nodes reach, and the interface that has it.

What a host's name resolves to is often loopback (Debian writes `127.0.1.1 NAME` into /etc/hosts), where no other node
can answer. gloo takes that address unless it is told another.
"""

import os
import socket

import psutil

from mrl.errors import EnvironmentFault

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # torch reads it for every gloo group that is given no device of its own


def address_towards(host: str) -> str:
    """The address under which this host speaks to `host`: of its networks, that on which the two meet. Nothing is sent.

    Raises EnvironmentFault where no route leads there.
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
    """The interface that has `address`. Raises EnvironmentFault where none of this host has."""
    names = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    if address not in names and not address.startswith("127."):  # all of 127/8 is loopback's, which lists one address
        raise EnvironmentFault(
            f"no interface of this host ({socket.gethostname()}) has the address {address}; it has {sorted(names)}"
        )
    return names.get(address) or names["127.0.0.1"]


def gloo_environment(address: str) -> dict[str, str]:
    """The variable by which gloo groups meet at `address`, which is this host's own; what is set already stays."""
    return {GLOO_INTERFACE: os.environ.get(GLOO_INTERFACE) or interface_of(address)}


def address_environment(address: str) -> dict[str, str]:
    """Variables by which an engine and its processes meet others at `address`; what is set already stays.

    None where no interface here has it: an address that is translated on its way is the cluster's to deal with.
    """
    try:
        wanted = {GLOO_INTERFACE: interface_of(address), "VLLM_HOST_IP": address}
    except EnvironmentFault:
        return {}
    return {name: os.environ.get(name) or value for name, value in wanted.items()}
