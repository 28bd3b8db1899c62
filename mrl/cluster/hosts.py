"""The hosts of a run: their peak compute, which MFU refers to, and how full their memory is."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from mrl.cluster.actor_group import ActorGroup
from mrl.cluster.calls import SETTLE_S, gather
from mrl.cluster.rollout_group import RolloutGroup
from mrl.config.deployment import Deployment
from mrl.errors import Interrupted
from mrl.plan.devices import published_flops
from mrl.platforms.process_memory import host_bytes_used


@dataclass(frozen=True)
class Speed:
    """The speed of one rank's device; on the CPU that of the whole host, whose cores ranks share."""

    device: str
    measured: float  # FLOP/s of a large matrix product in the model's dtype

    @property
    def peak(self) -> float:
        """The published figure, or the measured one if none is known."""
        return published_flops(self.device) or self.measured


@dataclass(frozen=True)
class Peak:
    """FLOP/s of all devices of ranks, and of all devices of the run."""

    actor: float
    run: float

    @classmethod
    def of(cls, deployment: Deployment, speeds: Iterable[Speed]) -> "Peak":
        """`speeds`: of every rank's device; on the CPU of every host with ranks."""
        each = [speed.peak for speed in speeds]
        cluster = deployment.cluster
        devices = cluster.nnodes if cluster.device == "cpu" else deployment.devices
        return cls(sum(each), sum(each) / len(each) * max(devices, len(each)))


class Hosts:
    """Asks one process on each node."""

    def __init__(self, deployment: Deployment, actor: ActorGroup, engines: RolloutGroup) -> None:
        self._deployment = deployment
        self._actor = actor
        self._engines = engines

    def speeds(self) -> list[Speed]:
        """Measures every rank's device; on the CPU every host with ranks.

        Nothing else should compute there meanwhile.
        """
        ranks = None
        if self._deployment.cluster.device == "cpu":
            ranks = self._first_ranks
        return [Speed(*found) for found in self._actor.answers("speed", "measuring devices", ranks).values()]

    def peak(self) -> Peak:
        """Returns the peak and prints its parts. Warns about different devices under one actor, because the slowest
        sets the pace.
        """
        speeds = self.speeds()
        print("\n".join(_describe(speeds)), flush=True)
        return Peak.of(self._deployment, speeds)

    def memory_used(self) -> int:
        """Returns the bytes of host memory in use on the fullest host.

        A host that has only engines is left out while none of them serves, or without an answer within SETTLE_S.
        """
        used = self._actor.answers("host_bytes_used", "measuring memory", self._first_ranks)
        bytes_used = [host_bytes_used(), *used.values()]
        with suppress(Interrupted):  # other calls report a lost engine
            serving = self._engines.fleet.serving()
            asked = {name: serving[name].worker.host_bytes_used.remote() for name in self._first_of(list(serving))}
            bytes_used += gather(asked, SETTLE_S, "measuring memory").values()
        return max(bytes_used)

    @cached_property
    def _rank_nodes(self) -> list[str]:
        return [devices[0][0] for devices in self._actor.call("devices")]

    @cached_property
    def _first_ranks(self) -> list[int]:
        """The first rank of every node that has ranks."""
        return first_of_each(self._rank_nodes)

    def _first_of(self, engines: list[str]) -> list[str]:
        """Returns the first of these engine processes on every node that has no ranks."""
        nodes = [self._engines.nodes[name] for name in engines]
        return [engines[number] for number in first_of_each(nodes) if nodes[number] not in self._rank_nodes]


def first_of_each(values: Iterable[str]) -> list[int]:
    """Returns the position of the first occurrence of each value."""
    positions: dict[str, int] = {}
    for number, value in enumerate(values):
        positions.setdefault(value, number)
    return list(positions.values())


def _describe(speeds: list[Speed]) -> list[str]:
    kinds: dict[str, list[float]] = {}
    for speed in speeds:
        kinds.setdefault(speed.device, []).append(speed.measured)
    lines = [
        f"{len(of_kind)} x {device}: {_tera(of_kind)} TFLOP/s in products{_published(device)}"
        for device, of_kind in kinds.items()
    ]
    if len(kinds) > 1:
        lines.append(
            "warning: the actor is on devices of several kinds; the slowest sets the pace, and a plan knows one kind"
        )
    return lines


def _tera(found: list[float]) -> str:
    low = min(found) / 1e12
    high = max(found) / 1e12
    if len(found) == 1 or f"{low:.2g}" == f"{high:.2g}":
        return f"{low:.3g}"
    return f"{low:.3g} to {high:.3g}"


def _published(device: str) -> str:
    figure = published_flops(device)
    if figure:
        return f", {figure / 1e12:.4g} published"
    return ""
