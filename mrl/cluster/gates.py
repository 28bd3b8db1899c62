"""Checks, before something moves onto a shared device, that it has room for the next phase of the plan.

Example: an 80 GiB device before `train_to_sync`, for which the plan gives the actor 12 GiB and the engine 10. The rank
has 10 live there and the sleeping engine 0, so 2 + 10 are still to come. A healthy device has 70 GiB free. If the
rank's optimizer had stayed, only 9 would be free. Then the step would end here, naming the rank and its 61 GiB.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mrl.cluster.actor_group import ActorGroup
from mrl.cluster.rollout_group import RolloutGroup
from mrl.errors import Interrupted
from mrl.plan.memory_phases import ACTOR, ENGINE, phase_bytes
from mrl.platforms.process_memory import ProcessMemory
from mrl.units import GIB


@dataclass(frozen=True)
class MemoryHolder:
    """One process on a device, and its memory there."""

    name: str
    kind: str  # ACTOR or ENGINE
    memory: ProcessMemory


@dataclass(frozen=True)
class PhaseMemory:
    """The plan's bytes of tensors for each kind of process on a device in a phase.

    `available` is the limit for all of them.
    """

    phase: str
    planned: dict[str, int]
    available: int

    @classmethod
    def of(cls, plan: dict[str, Any], phase: str) -> "PhaseMemory":
        """`plan` comes from mrl.plan.run_plan. Raises ConfigError for a phase that it does not have."""
        planned = phase_bytes(plan, phase)
        tensors = planned.holders[ENGINE] - planned.untracked  # free memory already excludes contexts and graphs
        return cls(phase, {**planned.holders, ENGINE: tensors}, planned.available)

    def to_come(self, holders: Sequence[MemoryHolder]) -> dict[str, int]:
        """Returns the bytes that each kind of process has yet to allocate."""
        live: dict[str, int] = defaultdict(int)
        for holder in holders:
            live[holder.kind] += holder.memory.live_bytes
        return {kind: max(0, self.planned[kind] - size) for kind, size in live.items()}


def shortage(need: PhaseMemory, holders: Sequence[MemoryHolder]) -> str | None:
    """Returns why the phase has no room on the device of these processes; None if it has."""
    coming = need.to_come(holders)
    free = _free(need, holders)
    if sum(coming.values()) <= free:
        return None
    parts = " and ".join(f"{size / GIB:.2f} GiB of the {kind}" for kind, size in coming.items() if size)
    each = ", ".join(f"{holder.name} {holder.memory.live_bytes / GIB:.2f} GiB" for holder in _largest_first(holders))
    return f"{parts} are still planned for this device, {free / GIB:.2f} GiB are free; in use: {each}"


def _free(need: PhaseMemory, holders: Sequence[MemoryHolder]) -> int:
    """Returns what the device reports, or on CPU the plan's limit minus what its processes hold."""
    reported = [holder.memory.free_bytes for holder in holders if holder.memory.free_bytes is not None]
    if reported:
        return min(reported)
    return need.available - sum(holder.memory.live_bytes for holder in holders)


def _largest_first(holders: Sequence[MemoryHolder]) -> list[MemoryHolder]:
    return sorted(holders, key=lambda holder: -holder.memory.live_bytes)


class MemoryGate:
    """Asks all processes about their memory, and lets a phase begin only if it has room."""

    def __init__(self, plan: dict[str, Any], actor: ActorGroup, engines: RolloutGroup) -> None:
        self._plan = plan
        self._actor = actor
        self._engines = engines
        self._rank_devices: dict[str, list] | None = None  # (node, device) of each rank, by name

    def __call__(self, phase: str) -> None:
        """Raises Interrupted with every device that lacks room, and with the memory of its processes."""
        need = PhaseMemory.of(self._plan, phase)
        shortages = {device: shortage(need, holders) for device, holders in self._holders(phase).items()}
        if short := {device: why for device, why in shortages.items() if why}:
            in_order = dict.fromkeys(node for node, _ in shortages)
            nodes = {node: number for number, node in enumerate(in_order)}
            lines = "; ".join(f"device {device} of node {nodes[node]}: {why}" for (node, device), why in short.items())
            cure = self._plan["memory"]["phases"][phase]["change"]
            raise Interrupted(f"no room for phase {phase}: {lines}" + (f". Change: {cure}" if cure else ""))

    def _holders(self, phase: str) -> dict[tuple[str, int], list[MemoryHolder]]:
        """Returns the processes and their memory for every device that ranks and engines share."""
        if self._rank_devices is None:
            self._rank_devices = self._actor.answers("devices", "asking for the devices of ranks")
        at = self._rank_devices | self._engines.process_devices
        devices: dict[tuple[str, int], list[MemoryHolder]] = defaultdict(list)
        for name, memory in self._memory(f"measuring memory before {phase}").items():
            workers = memory if isinstance(memory, list) else [memory]
            for number, (device, one) in enumerate(zip(at[name], workers, strict=True)):
                who = name if len(workers) == 1 else f"{name} worker {number}"
                devices[tuple(device)].append(MemoryHolder(who, ACTOR if name.startswith("rank") else ENGINE, one))
        return devices

    def _memory(self, phase: str) -> dict[str, Any]:
        """Returns the memory of ranks and of live engines, by name."""
        return self._actor.answers("memory", phase) | self._engines.answers("memory", phase)
