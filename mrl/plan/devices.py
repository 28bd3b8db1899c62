"""Published figures of the devices that a plan can be made for: mrl/plan/devices.json, each with its source."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mrl.errors import ConfigError

_FILE = Path(__file__).with_name("devices.json")
_MIB, _GIB = 1024**2, 1024**3


@dataclass(frozen=True)
class Device:
    """One device, as a rank sees it. Rates are peaks in one direction; what is reached of them is an assumption of the plan."""

    name: str
    platform: str  # cluster.device
    memory: int  # bytes
    reserved: int  # bytes that context, communicators and the allocator's rest take (an estimate)
    flops: float  # dense bf16 multiply-adds count two, per second
    memory_rate: float  # bytes per second
    node_rate: float  # bytes per second to a device of the same node
    network_rate: float  # bytes per second to another node
    devices_per_node: int
    host_memory: int  # bytes of a node
    source: str

    @property
    def usable(self) -> int:
        """Bytes that a plan may fill."""
        return self.memory - self.reserved


@cache
def devices() -> dict[str, Device]:
    """All known devices by name."""
    rows = json.loads(_FILE.read_text(encoding="utf-8"))
    return {name: _device(name, row) for name, row in rows.items()}


def find_device(name: str) -> Device:
    """Raises ConfigError with all names for one that is not known."""
    if name not in devices():
        raise ConfigError(f"device {name}: is not known; known: {', '.join(devices())}")
    return devices()[name]


def default_device(platform: str) -> Device:
    """What a plan assumes where only `cluster.device` is given: the smaller memory, so that what fits here fits on the others."""
    return min((d for d in devices().values() if d.platform == platform), key=lambda d: (d.memory, -d.flops))


def _device(name: str, row: dict) -> Device:
    return Device(
        name=name,
        platform=row["platform"],
        memory=row["memory_mib"] * _MIB,
        reserved=row["reserved_mib"] * _MIB,
        flops=row["bf16_tflops"] * 1e12,
        memory_rate=row["memory_gb_per_s"] * 1e9,
        node_rate=row["node_link_gb_per_s"] * 1e9,
        network_rate=row["network_gb_per_s"] * 1e9,
        devices_per_node=row["devices_per_node"],
        host_memory=row["host_memory_gib"] * _GIB,
        source=row["source"],
    )
