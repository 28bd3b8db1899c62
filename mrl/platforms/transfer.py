"""What moving weights between processes needs of a device: a process group of one's own, and memory that two processes
see.

Apart from the platforms themselves because it is used in engine processes too, where nothing of Megatron's is replaced.
"""

import base64
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.errors import EnvironmentFault
from mrl.platforms.addresses import address_towards

_POLL_S = 1e-4
# The group's own deadline, in times of ours: where it passes, a watchdog ends the process, and nobody could fence or
# sync again.
_WATCHDOG = 4
_NO_DEVICE = "the CPU has no device memory to share; the pair goes through a shared-memory file"


class Transfer(Protocol):
    """One kind of device."""

    @property
    def device(self) -> torch.device:
        """The device of this process, chosen before."""

    def synchronize(self) -> None:
        """Waits for all work of this device."""

    def free_bytes(self) -> int | None:
        """Free bytes of this device, whoever has the rest; None where there is no memory apart from the host's."""

    def point_to_point_group(
        self, store: dist.Store, number: int, size: int, timeout_s: float, host: str
    ) -> dist.Backend:
        """A process group that is registered nowhere.

        `host`: where the store is. `timeout_s`: the longest that `wait` will be told to.
        """

    def wait(self, work: dist.Work, timeout_s: float) -> bool:
        """Whether the group's send or receive is over by then; the caller, and what it enqueues next, come after it.

        Raises RuntimeError where it failed.
        """

    def abort(self, group: dist.Backend) -> None:
        """Ends the group's communication, also what is under way."""

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Makes host memory that is shared with other processes as quick for the device as memory of its own;
        the answer undoes it.
        """

    def arena(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] on this device, in memory that other processes can open for as long as it lives.

        Raises EnvironmentFault where the allocator gives none.
        """

    def share_memory(self, tensor: Tensor) -> dict[str, Any]:
        """A handle of a whole arena, as plain data.

        The arena must outlive its users. Raises EnvironmentFault for other memory.
        """

    def open_memory(self, handle: dict[str, Any]) -> Tensor:
        """The arena behind another process's handle. It is mapped here until the last tensor on it is gone."""


def _nothing() -> None:
    """Undoes nothing, since nothing was done."""


class CpuTransfer:
    """gloo; host memory is shared as files, not through here."""

    device = torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def free_bytes(self) -> int | None:
        return None

    def point_to_point_group(
        self, store: dist.Store, number: int, size: int, timeout_s: float, host: str
    ) -> dist.Backend:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        # Otherwise gloo listens at what the host's name resolves to, often loopback; a group that has options reads no
        # environment.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host))]
        return dist.ProcessGroupGloo(store, number, size, options)

    def wait(self, work: dist.Work, timeout_s: float) -> bool:
        return work.wait(timedelta(seconds=timeout_s))  # gloo's is over only once somebody has waited for it

    def abort(self, group: dist.Backend) -> None:
        group.abort()

    def pin(self, memory: Tensor) -> Callable[[], None]:
        return _nothing

    def arena(self, nbytes: int) -> Tensor:
        raise EnvironmentFault(_NO_DEVICE)

    def share_memory(self, tensor: Tensor) -> dict[str, Any]:
        raise EnvironmentFault(_NO_DEVICE)

    def open_memory(self, handle: dict[str, Any]) -> Tensor:
        raise EnvironmentFault(_NO_DEVICE)


class _DeviceMemory:
    """Inter-process handles of a torch allocator: of CUDA, and of torch_npu, which has the same ones by other names.

    A handle begins with the allocator's version and a letter for the kind of segment (`ShareableHandleType` in both
    allocators). The letter is c for one made in one piece, e for an expandable one. Those are refused. Their physical
    pages come and go, opening them needs more of the system, and two releases of torch had it wrong (pytorch 179220 and
    190860). Memory of a private pool is refused as well: vLLM's sleep takes the pages of its pool away under whoever
    has it open.
    """

    name: str  # of the torch module
    _FIELDS = ("device", "handle", "size", "offset", "counter", "counter_offset", "event", "event_sync")
    _EXPANDABLE = b"e"

    @property
    def _module(self) -> Any:
        return getattr(torch, self.name)

    @property
    def device(self) -> torch.device:
        return torch.device(self.name, self._module.current_device())

    def synchronize(self) -> None:
        self._module.synchronize()

    def free_bytes(self) -> int | None:
        return self._module.mem_get_info()[0]

    def wait(self, work: dist.Work, timeout_s: float) -> bool:
        # Its own `wait` makes the stream wait, not the host, whatever time it is given (ProcessGroupNCCL.cpp,
        # ProcessGroupHCCL.cpp, where it also "always" returns true).
        deadline = time.monotonic() + timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return work.wait()

    def arena(self, nbytes: int) -> Tensor:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.synchronize()
        if pool := _private_pool(self._module.memory_snapshot(), tensor.data_ptr()):
            raise EnvironmentFault(
                f"an arena for weight syncs would lie in the private memory pool {pool} (vLLM's, which sleeps), so "
                "other processes must not open it; set reshard.transport: shm"
            )
        return tensor

    def share_memory(self, tensor: Tensor) -> dict[str, Any]:
        share = getattr(tensor.untyped_storage(), f"_share_{self.name}_")
        parts = dict(zip(self._FIELDS, share(), strict=True))
        if parts["handle"][1:2] == self._EXPANDABLE:
            raise EnvironmentFault(
                "an arena for weight syncs lies in an expandable segment, which other processes must not open: leave "
                "expandable_segments out of PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF and PYTORCH_NPU_ALLOC_CONF of "
                "engines, or set reshard.transport: shm"
            )
        return {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in parts.items()} | {
            "bytes": tensor.numel()
        }

    def open_memory(self, handle: dict[str, Any]) -> Tensor:
        self._module.init()
        parts = [base64.b64decode(handle[k]) if isinstance(handle[k], str) else handle[k] for k in self._FIELDS]
        parts[0] = self._module.current_device()  # a scheduler may number the same device otherwise in each process
        # Of an event by which the maker's work on the memory would be waited for: it may be on a device that this
        # process is not shown, and `arena` has waited for that work already.
        parts[self._FIELDS.index("event_sync")] = False
        try:
            storage = getattr(torch.UntypedStorage, f"_new_shared_{self.name}")(*parts)
        except RuntimeError as error:
            raise EnvironmentFault(
                f"another process's memory cannot be opened from this device ({error}): the two may not reach each "
                "other; set reshard.transport: p2p, or shm within a node"
            ) from error
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)[: handle["bytes"]]


def _private_pool(segments: Iterable[Mapping[str, Any]], address: int) -> tuple[int, int] | None:
    """The pool in which an address lies; None for the allocator's own, and where the snapshot tells of no pools."""
    for segment in segments:
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            pool = tuple(segment.get("segment_pool_id", (0, 0)))
            if pool == (0, 0):
                return None
            return pool
    return None


class CudaTransfer(_DeviceMemory):
    """NCCL, and CUDA's own inter-process handles. Written against torch's interfaces; untested on hardware.

    Another device's memory can be opened too, also of a device that this process is not shown. `cudaIpcOpenMemHandle`
    says so, and torch asks it to let the two devices reach each other.
    """

    name = "cuda"

    def pin(self, memory: Tensor) -> Callable[[], None]:
        runtime, address = torch.cuda.cudart(), memory.data_ptr()
        if error := int(runtime.cudaHostRegister(address, memory.numel(), 0)):
            print(
                "weight syncs through host memory will be slow: cudaHostRegister says "
                f"{error}; is ulimit -l unlimited?",
                file=sys.stderr,
            )
            return _nothing
        return lambda: runtime.cudaHostUnregister(address)

    def point_to_point_group(
        self, store: dist.Store, number: int, size: int, timeout_s: float, host: str
    ) -> dist.Backend:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_WATCHDOG * timeout_s)
        return dist.ProcessGroupNCCL(store, number, size, options)

    def abort(self, group: dist.Backend) -> None:
        group.abort()


class NpuTransfer(_DeviceMemory):
    """HCCL through torch_npu, and its inter-process handles (torch_npu/utils/storage.py, csrc/ipc; HDK 25.3 and CANN
    8.3 or later). Written against its sources; untested on hardware.
    """

    name = "npu"

    def pin(self, memory: Tensor) -> Callable[[], None]:
        return _nothing  # torch_npu 2.10 has no call for it

    def point_to_point_group(
        self, store: dist.Store, number: int, size: int, timeout_s: float, host: str
    ) -> dist.Backend:
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        options = ProcessGroupHCCL.Options()
        options._timeout = timedelta(seconds=_WATCHDOG * timeout_s)
        return ProcessGroupHCCL(store, number, size, options)

    def abort(self, group: dist.Backend) -> None:
        # the `abort` that it inherits does nothing (csrc/distributed/Init.cpp)
        group.abort_hccl_comm("a weight sync was abandoned")


_TRANSFERS = {"cpu": CpuTransfer, "cuda": CudaTransfer, "npu": NpuTransfer}


def get_transfer(device: str) -> Transfer:
    """The transfer of a device, by its name, which is also that of vLLM's dialect.

    Raises EnvironmentFault for a device that is not known.
    """
    if device not in _TRANSFERS:
        raise EnvironmentFault(f"no weight transfer for device {device!r}; known: {', '.join(_TRANSFERS)}")
    return _TRANSFERS[device]()
