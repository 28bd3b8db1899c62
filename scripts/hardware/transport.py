"""Bytes from one process to another: device memory opened from another device, and shared host memory. What goes
between processes of one device is in several.py.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

from checks import Figures, Machine, Skip, Wrong, check, expect

from mrl.units import MIB

_MEET_S = 30


@check(fast=True)
def ipc_between_devices(machine: Machine) -> Figures:
    """Device memory of this process, opened and written by another on another device of the node, which is shown that
    one alone, as an engine is.
    """
    from mrl.platforms.hosting import get_hosting

    machine.needs_accelerator("memory of its own to open; `shared_memory` is its way")
    hosting = get_hosting(machine.device)
    if hosting.memory_reach != "node":
        raise Skip(f"{machine.device}: memory is opened on its own device alone")
    if machine.platform._torch.device_count() < 2:
        raise Skip("one device")
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    return _with_other("ipc", machine, _ipc, hosting.visible_devices([shown[1]]))


def _ipc(machine: Machine, number: int, port: int) -> Figures:
    import torch.distributed as dist

    from mrl.platforms.transfer import get_transfer

    machine.platform.set_device(0)
    transfer, size = get_transfer(machine.device), 512 * MIB
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=number == 0)
    if number == 0:
        arena = transfer.arena(size).fill_(0)
        store.set("handle", json.dumps(transfer.share_memory(arena)))
        store.wait(["written"])
        machine.platform.synchronize()
        expect(bool((arena == 7).all()), "what another process wrote is not in the memory that was opened")
        store.set("seen", "1")
        return json.loads(store.get("figures"))
    opened = transfer.open_memory(json.loads(store.get("handle")))
    mine = opened.new_full((size,), 7)
    seconds = machine.seconds(lambda: opened.copy_(mine))
    store.set("figures", json.dumps({"gb_per_s": size / seconds / 1e9, "bytes": size}))
    store.set("written", "1")
    store.wait(["seen"])
    return {}


@check(fast=True)
def shared_memory(machine: Machine) -> Figures:
    """Host memory that two processes share, written for the first time, again, and read; pinned where a device reads
    it.
    """
    import torch

    from mrl.platforms.transfer import get_transfer

    size, path = machine.size(512 * MIB, 32 * MIB), Path(f"/dev/shm/mrl_ladder_{os.getpid()}")
    transfer = get_transfer(machine.device)
    try:
        shared = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        data = torch.ones(size, dtype=torch.uint8, device=machine.torch_device)
        began = time.perf_counter()
        shared.copy_(data)
        first = time.perf_counter() - began
        undo = transfer.pin(shared)
        again, read = machine.seconds(lambda: shared.copy_(data)), machine.seconds(lambda: data.copy_(shared))
        undo()
    finally:
        path.unlink(missing_ok=True)
    return {
        f"{name}_gb_per_s": size / s / 1e9 for name, s in (("first_write", first), ("write", again), ("read", read))
    }


def _with_other(name: str, machine: Machine, both, environment: dict[str, str] | None = None) -> Figures:
    """Runs `both` here as process 0 and in another as process 1, which has `environment` besides; raises Wrong with
    what the other said.
    """
    from mrl.process.free_ports import free_port

    port = free_port()
    other = subprocess.Popen(
        [sys.executable, __file__, name, machine.device, str(port)], stderr=subprocess.PIPE, text=True,
        env=os.environ | (environment or {}),
    )  # fmt: skip
    try:
        figures = both(machine, 0, port)
    except Exception as error:
        other.kill()
        said = other.communicate()[1].strip().splitlines()
        raise Wrong(f"{type(error).__name__}: {error}; the other process: {said[-1] if said else 'nothing'}") from error
    err = other.communicate(timeout=_MEET_S)[1]
    expect(other.returncode == 0, f"the other process ended with {other.returncode}: {err.strip()[-300:]}")
    return figures


if __name__ == "__main__":
    {"ipc": _ipc}[sys.argv[1]](Machine(sys.argv[2]), 1, int(sys.argv[3]))
