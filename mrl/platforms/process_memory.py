"""What one process and its host hold, in bytes: on the device, tensor by tensor where nobody else counts, and in all.

On cuda and npu the device's allocator knows what is live. On the CPU nobody does: storages are found through Python's
garbage collector, so that one which only C++ holds (a packed linear, what autograd saved) is not seen and has to be
added by who knows of it.
"""

import ctypes
import gc
import platform
import resource
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.units import KIB

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

HEAPS = 2
_ARENA_MAX = -8  # M_ARENA_MAX in glibc's malloc.h
_baseline_bytes = 0  # of this process, see `note_baseline`


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of one process at one moment."""

    live_bytes: int  # storages on the device; what an offload put on the host is none of them
    free_bytes: int | None  # what the device has left for anybody; None on the CPU
    resident_bytes: int  # the process's resident set, with libraries and heap
    baseline_bytes: int  # the same after its imports, before it had a model; 0 where nobody noted it

    @property
    def grown_bytes(self) -> int:
        """Resident set above that after the imports: what a plan of device and host bytes can be compared with."""
        return self.resident_bytes - self.baseline_bytes


def note_baseline() -> None:
    """Remembers the resident set as it is now; to be called after the imports, before the first large tensor.

    What the imports made is set aside for good. These are some 600,000 objects, which the collector and the ledger
    below would else go through again and again.
    """
    global _baseline_bytes
    gc.collect()
    gc.freeze()
    _baseline_bytes = resident_bytes()


def resident_bytes() -> int:
    """Resident set of this process."""
    import psutil

    return psutil.Process().memory_info().rss


def reset_peak_resident() -> None:
    """Starts a new peak for `peak_resident_bytes`, where the kernel lets a process do so (proc_pid_clear_refs(5))."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident_bytes() -> int:
    """Largest resident set of this process since `reset_peak_resident`, or since it began."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def host_bytes_used() -> int:
    """Memory in use on this host, by all of its processes."""
    import psutil

    return psutil.virtual_memory().used


def cpu_name() -> str:
    """The processor's name in /proc/cpuinfo, or the machine's architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def give_back_heap() -> None:
    """Returns freed memory to the operating system, where the C library can be asked to:
    it keeps what was made in small pieces.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def process_memory(
    device: str,
    on_host: "Iterable[Tensor]" = (),
    roots: "Iterable[Tensor]" = (),
    unseen_bytes: int = 0,
    absent_bytes: int = 0,
) -> ProcessMemory:
    """What this process holds now.

    `device`: cpu, cuda or npu. `on_host`: places of what left the device, which count on the CPU for none of it.
    `roots`: tensors that the garbage collector may not know any more. `unseen_bytes`: held out of Python's sight.
    `absent_bytes`: of whole blocks that the allocator holds and that are mapped nowhere, as in a sleeping engine.
    """
    if device == "cpu":
        live = live_bytes(on_host, roots)
        free = None
    else:
        import torch

        accelerator = getattr(torch, device)
        live = min(accelerator.memory_allocated(), accelerator.memory_reserved() - absent_bytes)
        free = accelerator.mem_get_info()[0]
    return ProcessMemory(live + unseen_bytes, free, resident_bytes(), _baseline_bytes)


def live_bytes(on_host: "Iterable[Tensor]" = (), roots: "Iterable[Tensor]" = ()) -> int:
    """Bytes of all CPU storages that Python knows of, each once, without those under `on_host`.

    The collector does not list what `gc.freeze` set aside, as `note_baseline` and vLLM do: such tensors have to be
    among `roots`.
    """
    import torch

    known = gc.get_objects()
    kinds = {kind for kind in set(map(type, known)) if issubclass(kind, torch.Tensor)}  # few kinds, many objects
    tensors = [item for item in known if type(item) in kinds]
    storages = _storages([*tensors, *roots])
    for identity in _storages(on_host):
        storages.pop(identity, None)
    return sum(storage.nbytes() for storage in storages.values())


def _storages(tensors: "Iterable[Tensor]") -> "dict[int, UntypedStorage]":
    """CPU storages under tensors and their gradients, by an identity that lasts as long as the storage."""
    storages = {}
    for tensor in tensors:
        for holder in (tensor, tensor.grad if tensor.is_leaf else None):
            if holder is not None and (storage := _storage(holder)) is not None:
                storages[storage._cdata] = storage
    return storages


def _storage(tensor: "Tensor") -> "UntypedStorage | None":
    """The storage of a tensor; None for one elsewhere, and for one without a storage (meta, fake, sparse)."""
    if tensor.device.type != "cpu":
        return None
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # sparse
        return None
    if storage.device.type == "cpu":
        return storage
    return None


def few_heaps() -> bool:
    """Has threads that begin from now on share few heaps of glibc's; returns whether that could be asked.

    Else each of Ray's threads, dozens in a process, may have a heap (eight a core in all) and keeps what was freed
    there. In a driver that held 1,024 responses, this was 1.6 of 9 KB a response.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_ARENA_MAX, HEAPS) == 1
