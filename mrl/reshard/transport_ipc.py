"""Device memory that trainer and engine share: the arena's data lies on the worker's device and the ranks of that device write into it.

Control words stay in a shared-memory file, as in mrl.reshard.transport_shm. Chosen only where the platform can share memory; elsewhere the
pair goes through shared memory.
"""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mrl.errors import EnvironmentFault
from mrl.reshard.messages import Message
from mrl.reshard.setup import SyncSetup
from mrl.reshard.transport_shm import ON_DEVICE, Arena, SharedMemoryReceiver, SharedMemorySender, arena_path


class DeviceReceiver(SharedMemoryReceiver):
    """A worker's arena on its device."""

    def _make(self, path: Path, half: int) -> Arena:
        self._data_elsewhere = torch.empty(2 * half, dtype=torch.uint8, device=self._transfer.device)
        self._transfer.synchronize()
        arena = Arena(_beside(path), len(self._ranks), 0, create=True)
        arena.half_bytes = half
        note = json.dumps(self._transfer.share_memory(self._data_elsewhere)).encode()
        if len(note) >= arena.note.size:
            raise EnvironmentFault(f"a device-memory handle of {len(note)} bytes does not fit; set reshard.transport: shm")
        arena.note[: len(note)] = np.frombuffer(note, np.uint8)
        return arena

    def release(self, messages: list[Message]) -> None:
        self._transfer.synchronize()  # what was unpacked from the half must have been read before it is granted again
        super().release(messages)

    def close(self) -> None:
        super().close()
        self._data_elsewhere = None


class DeviceSender(SharedMemorySender):
    """A rank's places in arenas on its own device."""

    kind = "ipc"

    def _find(self, path: Path, ranks: int, half: int) -> tuple[Arena, Tensor]:
        arena = Arena(path, ranks, 0, create=False)
        handle = json.loads(arena.note.tobytes().rstrip(b"\0"))
        return arena, self._transfer.open_memory(handle)

    def _path(self, setup: SyncSetup, worker: int) -> Path:
        return _beside(arena_path(setup, worker))


def _beside(path: Path) -> Path:
    """A worker may have an arena in host memory as well, for the ranks of other devices."""
    return path.with_name(path.name + ON_DEVICE)
