"""What moving weights between processes needs of a device: a process group of one's own, and memory that two processes
see.

Apart from the platforms themselves because it is used in engine processes too, where nothing of Megatron's is replaced.
"""

import base64
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.errors import EnvironmentFault


class Transfer(Protocol):
    """One kind of device."""

    shares_memory: bool  # processes can open each other's device memory

    @property
    def device(self) -> torch.device:
        """The device of this process, chosen before."""

    def synchronize(self) -> None:
        """Waits for all work of this device."""

    def point_to_point_group(self, store: dist.Store, number: int, size: int, timeout_s: float, host: str) -> dist.Backend:
        """A process group that is registered nowhere. `host`: where the store is."""

    def share_memory(self, tensor: Tensor) -> dict[str, Any]:
        """A handle of a whole uint8 tensor on this device, as plain data. The tensor must outlive its users."""

    def open_memory(self, handle: dict[str, Any]) -> Tensor:
        """The tensor behind another process's handle."""


class CpuTransfer:
    """gloo; host memory is shared as files, not through here."""

    shares_memory = False
    device = torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def point_to_point_group(self, store: dist.Store, number: int, size: int, timeout_s: float, host: str) -> dist.Backend:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        # otherwise gloo listens on what the host's name resolves to, which on a laptop may be nothing
        local = host in ("127.0.0.1", "localhost")
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo") if local else dist.ProcessGroupGloo.create_default_device()]
        return dist.ProcessGroupGloo(store, number, size, options)

    def share_memory(self, tensor: Tensor) -> dict[str, Any]:
        raise EnvironmentFault("the CPU has no device memory to share; the pair goes through a shared-memory file")

    def open_memory(self, handle: dict[str, Any]) -> Tensor:
        raise EnvironmentFault("the CPU has no device memory to share; the pair goes through a shared-memory file")


class CudaTransfer:
    """NCCL, and CUDA's own inter-process handles. Written against torch's interfaces; untested on hardware."""

    shares_memory = True
    _FIELDS = ("device", "handle", "size", "offset", "counter", "counter_offset", "event", "event_sync")

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def point_to_point_group(self, store: dist.Store, number: int, size: int, timeout_s: float, host: str) -> dist.Backend:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupNCCL(store, number, size, options)

    def share_memory(self, tensor: Tensor) -> dict[str, Any]:
        parts = dict(zip(self._FIELDS, tensor.untyped_storage()._share_cuda_(), strict=True))
        return {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in parts.items()} | {"bytes": tensor.numel()}

    def open_memory(self, handle: dict[str, Any]) -> Tensor:
        torch.cuda.init()
        parts = [base64.b64decode(handle[k]) if isinstance(handle[k], str) else handle[k] for k in self._FIELDS]
        parts[0] = torch.cuda.current_device()  # a scheduler may number the same device otherwise in each process
        storage = torch.UntypedStorage._new_shared_cuda(*parts)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)[: handle["bytes"]]


class NpuTransfer(CpuTransfer):
    """HCCL through torch_npu. Written against its documentation; untested on hardware. Devices share no memory here: host memory serves."""

    @property
    def device(self) -> torch.device:
        return torch.device("npu", torch.npu.current_device())

    def synchronize(self) -> None:
        torch.npu.synchronize()

    def point_to_point_group(self, store: dist.Store, number: int, size: int, timeout_s: float, host: str) -> dist.Backend:
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        options = ProcessGroupHCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return ProcessGroupHCCL(store, number, size, options)


_TRANSFERS = {"cpu": CpuTransfer, "cuda": CudaTransfer, "npu": NpuTransfer}


def get_transfer(device: str) -> Transfer:
    """By the device's name, which is also that of vLLM's dialect. Raises EnvironmentFault for one that is not known."""
    if device not in _TRANSFERS:
        raise EnvironmentFault(f"no weight transfer for device {device!r}; known: {', '.join(_TRANSFERS)}")
    return _TRANSFERS[device]()
