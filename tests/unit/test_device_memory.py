"""Device memory that another process opens: once, for good, and never such as sleeps or moves.

Against stand-ins for the two allocators.

Their handles begin as those of torch's CUDACachingAllocator and torch_npu's NPUCachingAllocator do: a version, and `c`
or `e`.
"""

from types import SimpleNamespace

import pytest
import torch
from reshard_world import World, hf_weights, setup_for
from test_execute import check_engines
from torch.multiprocessing.reductions import StorageWeakRef

from mrl.errors import EnvironmentFault
from mrl.platforms import transfer as platform
from mrl.platforms.hosting import Hosting
from mrl.platforms.transfer import CpuTransfer, CudaTransfer, NpuTransfer
from mrl.reshard import connect, transport_shm
from mrl.reshard import setup as sync_setup

TWO = dict(world_size=2, tensor_model_parallel_size=2)


class OneDevice(CpuTransfer):
    """A device whose memory every thread of this process can open:
    each opening is a storage of its own on the same bytes.
    """

    def __init__(self, arenas: dict[str, torch.Tensor], opened: dict[str, list[StorageWeakRef]]):
        self.arenas, self.opened = arenas, opened
        self.kept: list[torch.Tensor] = []

    def arena(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def keep(self, arena):
        self.kept.append(arena)

    def share_memory(self, tensor):
        name = str(len(self.arenas))
        self.arenas[name] = tensor
        return {"name": name, "bytes": tensor.numel()}

    def open_memory(self, handle):
        mapped = torch.from_numpy(self.arenas[handle["name"]].numpy())
        self.opened.setdefault(handle["name"], []).append(StorageWeakRef(mapped.untyped_storage()))
        return mapped[: handle["bytes"]]


@pytest.fixture
def one_device(monkeypatch, request) -> dict[str, list[StorageWeakRef]]:
    """What was opened, by arena. The parameter says how far memory can be."""
    arenas, opened = {}, {}
    monkeypatch.setattr(platform, "_TRANSFERS", {"cpu": lambda: OneDevice(arenas, opened)})
    hosting = Hosting("cpu", None, checks_batch_order=True, memory_reach=getattr(request, "param", "device"))
    for module in (connect, transport_shm, sync_setup):
        monkeypatch.setattr(module, "get_hosting", lambda device: hosting)
    return opened


def shared_setup(workers: int, kind: str = "auto"):
    """Two ranks, and an engine of one worker on each of their devices."""
    places = [[0, 0], [0, 1]]
    return setup_for(TWO, dict(num_engines=workers), kind, topology={"ranks": places, "workers": places[:workers]})


# how far memory can be opened, the transport asked for: a worker's ends, and how often each arena is opened
NEIGHBOURS = [
    ("device", "auto", ["DeviceReceiver", "PointToPointReceiver"], 1),
    ("device", "ipc", ["SharedMemoryReceiver", "DeviceReceiver"], 1),
    ("node", "auto", ["DeviceReceiver"], 2),
]


@pytest.mark.parametrize(
    ("one_device", "kind", "ends", "openings"), NEIGHBOURS, indirect=["one_device"], ids=lambda value: str(value)
)
def test_memory_is_used_as_far_as_it_can_be_opened_and_handles_are_opened_once(one_device, kind, ends, openings):
    setup = shared_setup(2, kind)
    weights = hf_weights(setup)
    with World(setup, weights) as world:
        for receiver in world.receivers.values():
            assert [type(end).__name__ for end in getattr(receiver.end, "_ends", [receiver.end])] == ends
        for update in (1, 2, 3):
            outcome = world.sync(update)
            check_engines(world, outcome, weights)
        # over three syncs
        assert {name: len(times) for name, times in one_device.items()} == {"0": openings, "1": openings}
        assert all(report.bytes_local > 0 for report in outcome.receives.values())


def test_a_closed_sender_keeps_no_memory_of_its_peer(one_device):
    """Before the engine goes: what is mapped when its owner frees it is undefined by CUDA, and leaked elsewhere."""
    setup = shared_setup(1)
    weights = hf_weights(setup)
    with World(setup, weights) as world:
        for update in (1, 2):
            check_engines(world, world.sync(update), weights)
        ((mapped,),) = one_device.values()
        assert not mapped.expired()
        for sender in world.senders.values():
            sender.close()
        assert mapped.expired()
        (receiver,) = world.receivers.values()
        end = getattr(receiver.end, "_ends", [receiver.end])[0]
        transfer, arena = end._transfer, end._device_data
        receiver.close()
        receiver.close()
        assert [kept.data_ptr() for kept in transfer.kept] == [arena.data_ptr()], "for the next connection"


def device_module(pool: tuple[int, int] = (0, 0), expandable: bool = False) -> SimpleNamespace:
    """torch.cuda or torch.npu as far as it is used: the device is the host, its one segment lies everywhere."""
    segment = {"address": 0, "total_size": 1 << 62, "segment_pool_id": pool, "is_expandable": expandable}
    return SimpleNamespace(
        current_device=lambda: 3, synchronize=lambda: None, init=lambda: None, memory_snapshot=lambda: [segment]
    )  # fmt: skip


@pytest.fixture(params=[CudaTransfer, NpuTransfer], ids=["cuda", "npu"])
def allocator(request, monkeypatch):
    """(the transfer, a way to choose the module's answers, what was opened); a handle says c or e."""
    name, opened = request.param.name, []
    kind = {"letter": b"c"}

    def share(storage):
        return 7, b"\x02" + kind["letter"] + b"opaque", storage.nbytes(), 0, b"counter", 0, b"event", True

    def open_one(*parts):
        opened.append(parts)
        return torch.UntypedStorage(parts[2])

    monkeypatch.setattr(torch.UntypedStorage, f"_share_{name}_", share, raising=False)
    monkeypatch.setattr(torch.UntypedStorage, f"_new_shared_{name}", staticmethod(open_one), raising=False)
    monkeypatch.setattr(request.param, "device", torch.device("cpu"))

    def configure(letter: bytes = b"c", **module):
        kind["letter"] = letter
        monkeypatch.setattr(torch, name, device_module(**module), raising=False)

    configure()
    return request.param(), configure, opened


def test_a_handle_is_plain_data_and_opens_on_the_own_number_of_the_device(allocator):
    transfer, _, opened = allocator
    handle = transfer.share_memory(transfer.arena(256))
    assert handle["bytes"] == 256 and all(isinstance(value, str | int | bool) for value in handle.values())
    assert transfer.open_memory(handle).numel() == 256
    # the last: whether the maker's event is waited for, which would have to be opened
    assert opened == [(3, b"\x02copaque", 256, 0, b"counter", 0, b"event", False)]


def test_an_arena_that_is_no_longer_used_serves_the_next_connection(allocator, monkeypatch):
    """What was shared is never freed: torch's count of openings is of one a sharing (vLLM issue 51258)."""
    transfer, _, _ = allocator
    monkeypatch.setattr(transfer, "_kept", [])
    first, second = transfer.arena(256), transfer.arena(256)
    address = first.data_ptr()
    transfer.keep(first)
    again = transfer.arena(192)
    assert again.data_ptr() == address and again.numel() == 192 and transfer.share_memory(again)["bytes"] == 192
    assert transfer.arena(192).data_ptr() not in (address, second.data_ptr()), "it is one connection's"
    transfer.keep(again)
    assert transfer.arena(257).data_ptr() != address, "too small"
    assert transfer.arena(256).data_ptr() == address, "all of it again"


def test_memory_that_the_device_cannot_reach_is_said_with_the_cure(allocator, monkeypatch):
    transfer, _, _ = allocator
    handle = transfer.share_memory(transfer.arena(256))

    def refuse(*parts):
        raise RuntimeError("CUDA error: peer access is not supported between these two devices")

    monkeypatch.setattr(torch.UntypedStorage, f"_new_shared_{transfer.name}", staticmethod(refuse), raising=False)
    with pytest.raises(EnvironmentFault, match=r"peer access.*reshard\.transport: p2p"):
        transfer.open_memory(handle)


class Runtime:
    """torch.cuda.cudart(): what was registered, and what it says to it."""

    def __init__(self, error: int = 0):
        self.error, self.registered = error, {}

    def cudaHostRegister(self, address, size, flags):
        self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0


def test_host_memory_of_a_sync_is_registered_with_the_device_until_it_is_closed(monkeypatch, tmp_path):
    """Copies from and to pages that are not registered go through a small buffer of the driver's:
    a fraction of the rate.
    """
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    arena = transport_shm.Arena(tmp_path / "arena", ranks=1, half_bytes=4096, side=0)
    arena.pin(CudaTransfer())
    assert runtime.registered == {arena.data.data_ptr(): 2 * 4096}
    arena.unpin()
    arena.unpin()
    assert runtime.registered == {}


def test_memory_that_cannot_be_registered_is_used_as_it_is_and_said(monkeypatch, capsys):
    runtime = Runtime(error=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    CudaTransfer().pin(torch.empty(8, dtype=torch.uint8))()
    assert "ulimit -l" in capsys.readouterr().err and len(runtime.registered) == 1  # it is not undone


def test_expandable_segments_are_refused_by_name(allocator):
    transfer, configure, _ = allocator
    configure(letter=b"e")
    with pytest.raises(
        EnvironmentFault, match=r"expandable_segments.*PYTORCH_CUDA_ALLOC_CONF.*reshard\.transport: shm"
    ):
        transfer.share_memory(transfer.arena(256))


def test_a_pool_that_sleeps_is_refused(allocator):
    transfer, configure, _ = allocator
    configure(pool=(0, 5))
    with pytest.raises(EnvironmentFault, match=r"private memory pool \(0, 5\) \(vLLM's, which sleeps\)"):
        transfer.arena(256)


def test_the_cpu_has_none():
    for ask in (
        lambda: CpuTransfer().arena(1),
        lambda: CpuTransfer().share_memory(torch.empty(1)),
        lambda: CpuTransfer().open_memory({}),
    ):
        with pytest.raises(EnvironmentFault, match="no device memory to share"):
            ask()
