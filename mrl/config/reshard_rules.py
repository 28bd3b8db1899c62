"""How weights reach the engines: what the chosen transport can connect."""

from collections.abc import Iterator

from mrl.config.schema import RunConfig
from mrl.config.violation import Broken
from mrl.model import ModelSpec

_ONE_HOST = ("shm", "ipc")


def reshard_rules(config: RunConfig, model: ModelSpec) -> Iterator[Broken]:
    kind, nodes = config.reshard.transport, config.cluster.nnodes
    if kind in _ONE_HOST and nodes > 1:
        why = f"{kind} connects processes of one host, and cluster.nnodes is {nodes}"
        yield Broken("reshard.transport", "must be auto or p2p on more than one node", why, ("auto", "p2p"))


def reshard_notes(config: RunConfig) -> Iterator[str]:
    """A transport that the device does not have."""
    if config.reshard.transport == "ipc" and config.cluster.device != "cuda":
        yield f"reshard.transport ipc: {config.cluster.device} has no device memory to share; weights go through shared memory of the host"
