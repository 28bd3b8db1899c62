"""Several nodes on one Linux machine: namespaces of network, processes, mounts and host name, joined by a bridge.

    with network(2, folder) as net:
        net.nodes[0].run("ip", "address")
        net.nodes[1].sent_bytes                   # by the interface's counter, headers included
        net.nodes[1].end()                        # a lost node: all of its processes are killed

A node has the address 10.77.0.N, an interface `eth0`, a host name of its own that resolves to loopback (as Debian's
installer writes it), and its own /dev/shm, /tmp/ray and `folder`/own; all other files are the machine's. Needs root,
iproute2 and util-linux. Every process of a node ends with the node's first one, which ends when this process does.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUBNET = "10.77.0"
INTERFACE = "eth0"
MTU = 9000  # bytes of a packet, as networks of clusters have it
# The first process of a node takes over orphans, which bash reaps, and ends when its input does.
_INIT = """
set -e
hostname "$1"
for own in /dev/shm /tmp/ray "$2/own"; do mkdir -p "$own"; mount -t tmpfs own "$own"; done
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$1" > "$2/hosts-$1"
mount --bind "$2/hosts-$1" /etc/hosts
ip link set lo up
echo ready
read -r _
"""
_NODE = ("--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")


def refusal() -> str | None:
    """Why nodes cannot be made here; None where they can."""
    if missing := [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not found (Debian: iproute2, util-linux)"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    pair = ("ip", "link", "add", "one", "type", "veth", "peer", "name", "other")
    tried = subprocess.run(["unshare", *_NODE, *pair], capture_output=True, text=True)
    return (
        f"this kernel makes no namespaces with links between them: {tried.stderr.strip()}" if tried.returncode else None
    )


@dataclass(frozen=True)
class Node:
    """One host, as far as its processes can tell."""

    number: int
    init: subprocess.Popen
    pid: int  # of its first process, as this machine counts

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.number + 1}"

    def command(self, *words: str) -> list[str]:
        """`words` as a command that enters the node."""
        return ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--pid", *words]

    def run(self, *words: str, **options: Any) -> subprocess.CompletedProcess:
        """Runs to the end; raises CalledProcessError. `options`: of subprocess.run."""
        return subprocess.run(self.command(*words), **{"check": True, "capture_output": True, "text": True} | options)

    def start(self, *words: str, **options: Any) -> subprocess.Popen:
        """Starts a process; `options`: of subprocess.Popen. Its end is seen here, a signal to it does not reach the
        node.
        """
        return subprocess.Popen(self.command(*words), **options)

    @property
    def sent_bytes(self) -> int:
        """Bytes that ever left the node, by its interface's counter: headers of Ethernet, IP and TCP included."""
        return self._counter("tx")

    @property
    def received_bytes(self) -> int:
        """Bytes that ever came to the node."""
        return self._counter("rx")

    def _counter(self, way: str) -> int:
        (link,) = json.loads(self.run("ip", "-j", "-s", "link", "show", "dev", INTERFACE).stdout)
        return link["stats64"][way]["bytes"]

    def end(self) -> None:
        """Kills every process of the node."""
        self.init.kill()  # which takes the first process along, and that all others
        self.init.wait()


@dataclass(frozen=True)
class Network:
    """The nodes, and the switch between them, which is a namespace of its own."""

    folder: Path  # shared by all nodes but for `own`
    nodes: tuple[Node, ...]
    switch: Node

    @property
    def own(self) -> Path:
        """A folder that every node has, each with other contents."""
        return self.folder / "own"


def _port(number: int) -> str:
    return f"port{number}"


@contextmanager
def network(count: int, folder: Path) -> Iterator[Network]:
    """`count` nodes that reach each other. `folder`: absolute, short (Ray's sockets lie below it)."""
    (folder / "own").mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        switch = _start(-1, ["--net", "--fork", "--kill-child"], "echo ready; read -r _", folder, stack)
        switch.run("ip", "link", "add", "switch", "type", "bridge")
        switch.run("ip", "link", "set", "switch", "up")
        nodes = tuple(_start(number, _NODE, _INIT, folder, stack) for number in range(count))
        for node in nodes:
            _plug_in(node, switch)
        yield Network(folder, nodes, switch)


def _start(number: int, namespaces: Sequence[str], script: str, folder: Path, stack: ExitStack) -> Node:
    words = ["unshare", *namespaces, "bash", "-c", script, "init", f"node-{number + 1}", str(folder)]
    init = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(_ended, init)
    if init.stdout.readline() != "ready\n":
        raise RuntimeError(f"node {number + 1} did not start: {refusal() or words}")
    child = Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()[0]
    return Node(number, init, int(child))


def _ended(init: subprocess.Popen) -> None:
    init.kill()
    init.wait()
    init.stdin.close()
    init.stdout.close()


def _plug_in(node: Node, switch: Node) -> None:
    port = _port(node.number)
    mine, theirs = ["netns", str(node.pid), "mtu", str(MTU)], ["netns", str(switch.pid), "mtu", str(MTU)]
    _ip("link", "add", INTERFACE, *mine, "type", "veth", "peer", "name", port, *theirs)
    switch.run("ip", "link", "set", port, "master", "switch", "up")
    node.run("ip", "address", "add", f"{node.address}/24", "dev", INTERFACE)
    node.run("ip", "link", "set", INTERFACE, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
