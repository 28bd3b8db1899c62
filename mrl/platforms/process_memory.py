"""Memory of one process and its host, in bytes: on the device, by tensor where no allocator counts, and in total.

On cuda and npu the device's allocator knows what is live. On the CPU nothing does, so storages are found through
Python's garbage collector. It does not see a storage that only C++ holds (a packed linear, tensors saved by autograd).
The caller has to add those.
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
_baseline_bytes = 0  # of this process, set by `note_baseline`


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of one process at one moment."""

    live_bytes: int  # storages on the device, without what an offload put on the host
    free_bytes: int | None  # what the device has left for any process; None on the CPU
    resident_bytes: int  # the process's resident set, with libraries and heap
    baseline_bytes: int  # the same after imports, before there was a model; 0 if nobody recorded it


def note_baseline() -> None:
    """Records the resident set. Call it after the imports, before the first large tensor.

    Objects of the imports, about 600,000, are frozen. Otherwise the collector and `live_bytes` would scan them each
    time.
    """
    global _baseline_bytes
    gc.collect()
    gc.freeze()
    _baseline_bytes = resident_bytes()


def resident_bytes() -> int:
    """Returns the resident set of this process."""
    import psutil

    return psutil.Process().memory_info().rss


def reset_peak_resident() -> None:
    """Starts a new peak for `peak_resident_bytes`, where the kernel allows it (proc_pid_clear_refs(5))."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident_bytes() -> int:
    """Returns the largest resident set of this process since `reset_peak_resident`, or since its start."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def host_bytes_used() -> int:
    """Returns the memory in use on this host, by all processes."""
    import psutil

    return psutil.virtual_memory().used


def cpu_name() -> str:
    """Returns the processor's name in /proc/cpuinfo, or the machine's architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def give_back_heap() -> None:
    """Returns freed memory to the operating system, where the C library supports it.

    Otherwise it keeps small pieces.
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
    """Returns what this process holds now.

    `device`: cpu, cuda or npu. `on_host`: copies of what left the device, which do not count as device memory on the
    CPU. `roots`: tensors that the garbage collector may no longer know. `unseen_bytes`: memory that Python does not
    see. `absent_bytes`: blocks that the allocator holds without physical memory, as in a sleeping engine.
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
    """Returns the bytes of all CPU storages that Python knows, each once, without those under `on_host`.

    The collector does not list what `gc.freeze` has frozen, as imports (mrl/platforms/imports.py), `note_baseline` and
    vLLM do. Pass such tensors in `roots`.
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
    """Returns the CPU storages of tensors and their gradients, by an identity that lasts as long as the storage."""
    storages = {}
    for tensor in tensors:
        for holder in (tensor, tensor.grad if tensor.is_leaf else None):
            if holder is not None and (storage := _storage(holder)) is not None:
                storages[storage._cdata] = storage
    return storages


def _storage(tensor: "Tensor") -> "UntypedStorage | None":
    """Returns the storage of a tensor; None for other devices, and for tensors without storage (meta, fake, sparse)."""
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
    """Makes later threads share few heaps of glibc's. Returns whether the C library supports it.

    Otherwise each of Ray's many threads may have a heap (up to eight for each core) that keeps freed memory. In a
    driver that held 1,024 responses, this was 1.6 of 9 KB for each response.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_ARENA_MAX, HEAPS) == 1
