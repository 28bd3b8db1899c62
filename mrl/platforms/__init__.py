"""The only package that knows devices by name: cpu, cuda or npu. Other code asks a `Platform`, or `Hosting` without
torch.

`torch_platforms` computes on a device, `hosting` starts processes for it, `inventory` looks for it on this host.
`versions` lists the packages that it needs, `transfer` moves weights between its processes, `process_memory` counts the
memory of a process. `cpu_patches` is the table of replacements in torch and Megatron. Imports nothing of mrl but errors
and units. Without torch: this module, hosting, inventory, versions, imports, patching, process_memory,
collective_trail and npu_mindspeed.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from mrl.errors import ConfigError

if TYPE_CHECKING:
    import torch

PLATFORMS = ("cpu", "cuda", "npu")


class Platform(Protocol):
    """One kind of device. Implementations have no state of their own except the chosen device index."""

    name: str
    distributed_backend: str  # of torch.distributed

    @property
    def device(self) -> "torch.device":
        """The device of this process."""

    def set_device(self, local_rank: int) -> None:
        """Chooses the device of this process from its rank on the host."""

    def apply_patches(self) -> None:
        """Replaces parts of torch and Megatron that do not work on this device.

        Call it only in Megatron worker processes, before a model is built.
        """

    def deterministic(self) -> None:
        """Makes equal inputs give equal bits from now on, in this process."""

    def rng_state(self) -> "torch.Tensor":
        """Returns the state of the device's generator, uint8."""

    def set_rng_state(self, state: "torch.Tensor") -> None:
        """Restores what `rng_state` returned."""

    def synchronize(self) -> None:
        """Waits for all work of this device."""

    def beside(self) -> AbstractContextManager[Any]:
        """Runs copies of the block beside the computation, after everything that was enqueued before.

        `synchronize` waits for both. Allocate the targets of the copies outside of the block.
        """

    def device_name(self) -> str:
        """Returns the vendor's name of the device."""

    def reset_peak_memory(self) -> None:
        """Starts a new peak for `max_memory_allocated_gb`, where the device can."""

    def max_memory_allocated_gb(self) -> float:
        """Returns the peak of memory in use by this process, GiB; on the CPU that of its resident set."""

    def max_memory_reserved_gb(self) -> float:
        """Returns the peak of memory reserved by this process, GiB; on the CPU that of its resident set."""

    def network_environment(self, master_addr: str) -> dict[str, str]:
        """Returns environment variables to set before torch.distributed starts with this rendezvous address."""

    def host_memory(self, nbytes: int) -> "torch.Tensor":
        """Returns uint8 [nbytes] on the host, in memory that the device reads and writes at full speed.

        Contents are undefined.
        """

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Names the work of the block in profiles that are being made."""

    def profiled(self) -> "list[torch.profiler.ProfilerActivity]":
        """Returns what torch's profiler records on this device."""

    def capture(self, begins: bool) -> None:
        """Tells an outer profiler of the device that it begins, or ends, to record."""

    def release_cache(self) -> None:
        """Returns cached memory to the device, so that other processes can use it."""


def get_platform(name: str) -> Platform:
    """Returns the platform `name`. Raises ConfigError for an unknown name, EnvironmentFault where it cannot work."""
    if name not in PLATFORMS:
        raise ConfigError(f"cluster.device: {name!r} is not a platform; allowed: {', '.join(PLATFORMS)}")
    from mrl.platforms.torch_platforms import CpuPlatform, CudaPlatform, NpuPlatform

    return {"cpu": CpuPlatform, "cuda": CudaPlatform, "npu": NpuPlatform}[name]()


def prepare_process(device: str, layout: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Prepares the process of a Megatron rank before Megatron is imported. Only Ascend needs this.

    `layout` has parallel sizes, `overrides` fields of the transformer config, both with Megatron's names. Returns the
    overrides that Megatron itself gets. Raises EnvironmentFault.
    """
    if device != "npu":
        return dict(overrides)
    from mrl.platforms.npu_mindspeed import MINDSPEED_FIELDS, adapt

    adapt(layout, overrides)
    return {name: value for name, value in overrides.items() if name not in MINDSPEED_FIELDS}
