"""The only room that knows a device by name: cpu, cuda or npu. Everything else asks a `Platform`, or `Hosting` where
torch must not be.

`torch_platforms` computes on a device, `hosting` starts processes for it, `inventory` looks for it on this host,
`versions` says which packages it needs, `transfer` moves weights between its processes, `process_memory` counts what
one of them holds; `cpu_patches` is the table of what is replaced in torch and Megatron. Imports nothing of mrl but
errors and units. Without torch: this module, hosting, inventory, versions, imports, patching, process_memory and
npu_mindspeed.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from mrl.errors import ConfigError

if TYPE_CHECKING:
    import torch

PLATFORMS = ("cpu", "cuda", "npu")


class Platform(Protocol):
    """One kind of device. Implementations hold no state of their own beyond the chosen device index."""

    name: str
    distributed_backend: str  # of torch.distributed

    @property
    def device(self) -> "torch.device":
        """The device of this process."""

    def set_device(self, local_rank: int) -> None:
        """Chooses the device of this process from its rank on the host."""

    def apply_patches(self) -> None:
        """Replaces in torch and Megatron what does not work here; in Megatron worker processes only,
        before a model is built.
        """

    def deterministic(self) -> None:
        """Makes equal inputs give equal bits from here on, in this process."""

    def rng_state(self) -> "torch.Tensor":
        """State of the device's generator, uint8."""

    def set_rng_state(self, state: "torch.Tensor") -> None:
        """Puts back what `rng_state` returned."""

    def synchronize(self) -> None:
        """Waits for all work of this device."""

    def beside(self) -> AbstractContextManager[Any]:
        """Copies that are enqueued in the block run beside what computes, after all that was enqueued before;
        `synchronize` waits for both. What they fill has to be allocated outside of it.
        """

    def device_name(self) -> str:
        """What the maker calls the device."""

    def reset_peak_memory(self) -> None:
        """Starts a new peak for `max_memory_allocated_gb`, where the device can."""

    def max_memory_allocated_gb(self) -> float:
        """Peak of memory in use by this process, GiB; on the CPU its resident set."""

    def max_memory_reserved_gb(self) -> float:
        """Peak of memory held by this process, GiB; on the CPU its resident set."""

    def network_environment(self, master_addr: str) -> dict[str, str]:
        """Environment variables that must be set before torch.distributed starts with this rendezvous address."""

    def host_memory(self, nbytes: int) -> "torch.Tensor":
        """uint8 [nbytes] on the host, in memory that the device reads and writes at full speed.

        Contents are not set.
        """

    def release_cache(self) -> None:
        """Gives freed device memory back to the device, so that other processes on it can have it."""


def get_platform(name: str) -> Platform:
    """The platform called `name`. Raises ConfigError for an unknown name, EnvironmentFault where it cannot work."""
    if name not in PLATFORMS:
        raise ConfigError(f"cluster.device: {name!r} is no platform; allowed: {', '.join(PLATFORMS)}")
    from mrl.platforms.torch_platforms import CpuPlatform, CudaPlatform, NpuPlatform

    return {"cpu": CpuPlatform, "cuda": CudaPlatform, "npu": NpuPlatform}[name]()


def prepare_process(device: str, layout: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What the process of a Megatron rank needs before anything in it imports Megatron; only Ascend needs something.

    `layout`: parallel sizes, `overrides`: fields of the transformer config, both under Megatron's names. Returns those
    of `overrides` that Megatron itself is to be given. Raises EnvironmentFault.
    """
    if device != "npu":
        return dict(overrides)
    from mrl.platforms.npu_mindspeed import MINDSPEED_FIELDS, adapt

    adapt(layout, overrides)
    return {name: value for name, value in overrides.items() if name not in MINDSPEED_FIELDS}
