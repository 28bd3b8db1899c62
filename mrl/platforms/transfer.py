"""What moving weights between processes needs from a device: a private process group, and memory that two processes
share.

Separate from the platforms because engine processes use it too, where no part of Megatron is replaced.
"""

import base64
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.errors import EnvironmentFault
from mrl.platforms.addresses import address_towards

_POLL_S = 1e-4
_WATCHDOG = 4  # the group's own deadline, as a multiple of mrl's: a watchdog reports it, and no fence needs its report
_NO_DEVICE = "the CPU has no device memory to share; the pair goes through a shared-memory file"


class Transfer(Protocol):
    """The transfer functions of one kind of device."""

    loads_kernels_lazily: bool  # a kernel's first launch may wait for all that the device has begun

    @property
    def device(self) -> torch.device:
        """The device of this process, which was chosen before."""

    def device_for_thread(self) -> Callable[[], None]:
        """Returns a function that another thread calls to work on this thread's device. Each thread begins with the
        first one.
        """

    def mark(self) -> Callable[[], bool]:
        """Returns a function that tells whether the work of the current stream up to here has ended.

        Not of the whole device, which may also hold sends and receives of later rounds. They end only when their peers
        come, and a peer that is gone would hold the host for good.
        """

    def free_bytes(self) -> int | None:
        """Returns the free bytes of this device over all processes; None if it has no memory apart from the host's."""

    def point_to_point_group(
        self, store: dist.Store, number: int, size: int, timeout_s: float, host: str
    ) -> dist.Backend:
        """Makes a process group that is not registered anywhere. A peer that fails does not end this process.

        `host` has the store. `timeout_s` is the longest timeout that `wait` will get.
        """

    def wait(self, work: dist.Work, timeout_s: float) -> bool:
        """Tells whether the group's send or receive has finished within `timeout_s`. Later work of the caller is
        ordered after it.

        Raises RuntimeError if it failed.
        """

    def abort(self, group: dist.Backend) -> None:
        """Ends the group's communication, including what is in progress."""

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Makes host memory that processes share as fast for the device as its own memory. Returns a function that
        undoes it.
        """

    def arena(self, nbytes: int) -> Tensor:
        """Returns uint8 [nbytes] on this device, in memory that other processes can open while it lives.

        Takes a kept one where it is large enough. Raises EnvironmentFault if the allocator cannot give such memory.
        """

    def keep(self, arena: Tensor) -> None:
        """Takes an arena that is no longer used, for the next call of `arena`."""

    def share_memory(self, tensor: Tensor) -> dict[str, Any]:
        """Returns a handle of a whole arena, as plain data.

        The arena must outlive its users. Raises EnvironmentFault for other memory.
        """

    def open_memory(self, handle: dict[str, Any]) -> Tensor:
        """Returns the arena of another process's handle. It stays mapped here until its last tensor is gone."""


def _nothing() -> None:
    """Does nothing: undoes a `pin` that did nothing, or chooses the only device."""


class CpuTransfer:
    """Uses gloo. Host memory is shared as files, not here."""

    loads_kernels_lazily = False
    device = torch.device("cpu")

    def device_for_thread(self) -> Callable[[], None]:
        return _nothing

    def mark(self) -> Callable[[], bool]:
        return lambda: True

    def free_bytes(self) -> int | None:
        return None

    def point_to_point_group(
        self, store: dist.Store, number: int, size: int, timeout_s: float, host: str
    ) -> dist.Backend:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        # By default gloo listens on the address of the host's name, often loopback. A group with options ignores the
        # environment.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host))]
        return dist.ProcessGroupGloo(store, number, size, options)

    def wait(self, work: dist.Work, timeout_s: float) -> bool:
        return work.wait(timedelta(seconds=timeout_s))  # a send of gloo only finishes when somebody waits for it

    def abort(self, group: dist.Backend) -> None:
        group.abort()

    def pin(self, memory: Tensor) -> Callable[[], None]:
        return _nothing

    def arena(self, nbytes: int) -> Tensor:
        raise EnvironmentFault(_NO_DEVICE)

    def keep(self, arena: Tensor) -> None:
        raise EnvironmentFault(_NO_DEVICE)

    def share_memory(self, tensor: Tensor) -> dict[str, Any]:
        raise EnvironmentFault(_NO_DEVICE)

    def open_memory(self, handle: dict[str, Any]) -> Tensor:
        raise EnvironmentFault(_NO_DEVICE)


class _DeviceMemory:
    """Inter-process handles of a torch allocator: of CUDA, and of torch_npu, which has the same ones under other names.

    A handle begins with the allocator's version and a letter for the kind of segment (`ShareableHandleType` in both
    allocators): c for one piece, e for expandable. Expandable segments are refused. Their physical pages come and go,
    and opening them needs more from the system. Two releases of torch had defects there (pytorch 179220 and 190860).
    Memory of a private pool is refused too: vLLM's sleep unmaps the pages of its pool, although other processes have
    them open.

    **Memory that was shared is never freed, so it is kept.** torch counts one opening for each sharing, in an unsigned
    number (CudaIPCTypes.h), and frees at 0 alone. Several ranks that open one arena, and a rank that is killed, leave
    another number behind (vLLM issue 51258, verl pull request 6958). Each new connection would take an arena more.
    """

    name: str  # of the torch module
    loads_kernels_lazily = True
    _FIELDS = ("device", "handle", "size", "offset", "counter", "counter_offset", "event", "event_sync")
    _EXPANDABLE = b"e"
    _kept: ClassVar[list[Tensor]] = []  # of this process

    @property
    def _module(self) -> Any:
        return getattr(torch, self.name)

    @property
    def device(self) -> torch.device:
        return torch.device(self.name, self._module.current_device())

    def device_for_thread(self) -> Callable[[], None]:
        return partial(self._module.set_device, self._module.current_device())

    def mark(self) -> Callable[[], bool]:
        event = self._module.Event()
        event.record()
        return event.query

    def free_bytes(self) -> int | None:
        return self._module.mem_get_info()[0]

    def wait(self, work: dist.Work, timeout_s: float) -> bool:
        # After its own deadline torch's `wait` would abort the communicator (ProcessGroupNCCL.cpp, also of HCCL). So it
        # is called when nothing is left to wait for. It raises the error, because the group waits blockingly.
        deadline = time.monotonic() + timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return work.wait(timedelta(seconds=timeout_s))

    def arena(self, nbytes: int) -> Tensor:
        for number, kept in enumerate(self._kept):
            if kept.numel() >= nbytes:
                return self._kept.pop(number)[:nbytes]
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._module.synchronize()
        if pool := _private_pool(self._module.memory_snapshot(), tensor.data_ptr()):
            raise EnvironmentFault(
                f"an arena for weight syncs would lie in the private memory pool {pool} (vLLM's, which sleeps). "
                "So other processes must not open it; set reshard.transport: shm"
            )
        return tensor

    def keep(self, arena: Tensor) -> None:
        self._kept.append(arena.new_empty(0).set_(arena.untyped_storage()))

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
        parts[0] = self._module.current_device()  # a scheduler may number the same device differently in each process
        # False for the event on which the maker's work on the memory would be awaited. It may be on a device that this
        # process cannot see, and `arena` has already waited for that work.
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
    """Returns the pool of an address; None for the allocator's own, and if the snapshot does not tell pools."""
    for segment in segments:
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            pool = tuple(segment.get("segment_pool_id", (0, 0)))
            if pool == (0, 0):
                return None
            return pool
    return None


@contextmanager
def _unhandled_errors(library: str) -> Iterator[None]:
    """Makes a group that is constructed inside leave its errors to who waits, whose `wait` raises them.

    Otherwise its watchdog ends this process about a second after a peer's process has ended, before any fence or retry.
    The variables are read in the constructor alone, so groups of training keep their values: with them, a process that
    ends must end its peers. `library` is the variables' prefix.
    """
    ours = {f"{library}_ASYNC_ERROR_HANDLING": "0", f"{library}_BLOCKING_WAIT": "1"}
    known = {variable: os.environ.get(variable) for variable in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for variable, value in known.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value


class CudaTransfer(_DeviceMemory):
    """Uses NCCL, and CUDA's inter-process handles. Follows torch's interfaces; untested on hardware.

    Memory of another device can be opened too, even of a device that this process cannot see. `cudaIpcOpenMemHandle`
    documents this, and torch asks it to enable peer access.
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
        with _unhandled_errors("TORCH_NCCL"):  # ErrorHandlingMode and blockingWait_, ProcessGroupNCCL.hpp
            return dist.ProcessGroupNCCL(store, number, size, options)

    def abort(self, group: dist.Backend) -> None:
        group.abort()


class NpuTransfer(_DeviceMemory):
    """Uses HCCL through torch_npu, and its inter-process handles (torch_npu/utils/storage.py, csrc/ipc; HDK 25.3 and
    CANN 8.3 or later). Follows its sources; untested on hardware.
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
        with _unhandled_errors("HCCL"):  # CheckUseHcclAsyncErrorHandleEnable, and blockingWait_
            return ProcessGroupHCCL(store, number, size, options)

    def abort(self, group: dist.Backend) -> None:
        # the inherited `abort` does nothing (csrc/distributed/Init.cpp)
        group.abort_hccl_comm("a weight sync was abandoned")


_TRANSFERS = {"cpu": CpuTransfer, "cuda": CudaTransfer, "npu": NpuTransfer}


def get_transfer(device: str) -> Transfer:
    """Returns the transfer of a device by name, which is also the name of vLLM's dialect.

    Raises EnvironmentFault for an unknown device.
    """
    if device not in _TRANSFERS:
        raise EnvironmentFault(f"no weight transfer for device {device!r}; known: {', '.join(_TRANSFERS)}")
    return _TRANSFERS[device]()
