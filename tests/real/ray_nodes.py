"""A Ray cluster over the nodes of network.py: a raylet a node, started by launch/, and mrl's commands
inside it.
"""

import os
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from network import Network, Node

ROOT = Path(__file__).resolve().parents[2]
PORT, DASHBOARD = 6379, 8265
START_S = 90.0
_STORE_BYTES = 300_000_000


@dataclass
class RayNodes:
    """Raylets on nodes; the head on the first."""

    net: Network
    cpus: Sequence[int]  # of each node, as Ray is told: what is placed where
    arguments: Sequence[str] = ()  # of `ray start`, everywhere
    environments: dict[int, dict[str, str]] = field(default_factory=dict)  # of single nodes, beside what all have
    token: str = field(default_factory=lambda: secrets.token_hex(32))

    @property
    def head(self) -> Node:
        return self.net.nodes[0]

    @property
    def address(self) -> str:
        return f"{self.head.address}:{PORT}"

    @property
    def environment(self) -> dict[str, str]:
        """Of every process on a node."""
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "RAY_ADDRESS": self.address, "DEVICE": "cpu"}
        return (
            os.environ
            | own
            | {
                "PYTHONPATH": str(ROOT),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            }
        )

    def start(self) -> None:
        """Starts all, the head first; raises RuntimeError with what was said when a node does not come up."""
        self.start_node(self.head, self.cpus[0])
        with ThreadPoolExecutor() as together:
            list(together.map(self.start_node, self.net.nodes[1:], self.cpus[1:]))

    def start_node(self, node: Node, cpus: int) -> None:
        """The head on the first node, a worker of it on any other."""
        script = "start_head.sh" if node is self.head else "start_worker.sh"
        own = {"HEAD": self.address, "CPUS": str(cpus), "TEMP": str(self.net.own / "ray"), "POLL_S": "0.2"}
        own |= {"HOST": node.address} if node is self.head else {}
        environment = self.environment | own | self.environments.get(node.number, {})
        more = ["--object-store-memory", str(_STORE_BYTES), *self.arguments]
        done = node.run(str(ROOT / "launch" / script), *more, env=environment, check=False, timeout=START_S)
        if done.returncode:
            raise RuntimeError(f"{script} on node {node.number + 1}: {done.stdout[-1500:]}{done.stderr[-1500:]}")

    def mrl(self, *arguments: str, node: Node | None = None, **options: Any) -> subprocess.Popen:
        """An mrl command on the head's node, or another; its output is kept."""
        given = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
            "env": self.environment,
            "cwd": self.net.folder,
        } | options
        folder = given.pop("cwd")  # who enters a node's mounts stands at their root
        return (node or self.head).start("env", f"--chdir={folder}", "mrl", *arguments, **given)


def wait_for(happened: Callable[[], bool], seconds: float, what: str) -> None:
    """Polls until `happened()`; raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.1)
