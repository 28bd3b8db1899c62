"""A transfer for tests on the CPU that waits where NCCL and HCCL do and gloo does not; ranks and workers as processes.

* The first send or receive of a pair blocks its caller until the peer's.
* Sends and receives are kernels of one device. They run in the order in which they were begun, and each holds the
  device until the peer's has come to its turn, too.
* `synchronize` waits for all of them.
* Device memory that another process opens is a file.
"""

import multiprocessing
import queue
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reshard_world import DictWriter, expected, hf_weights, shards_of

from mrl.platforms import transfer as platform
from mrl.platforms.hosting import Hosting
from mrl.platforms.transfer import CpuTransfer
from mrl.reshard import connect, transport_shm
from mrl.reshard import setup as sync_setup
from mrl.reshard.connect import connect_receiver, connect_sender
from mrl.reshard.setup import SyncSetup

_TURN = 1 << 30  # added to a message's tag: its kernel has come to its turn
_FIRST_USE = 1 << 30  # no message has the tag 0


class Kernel:
    """A send or receive that was begun."""

    def __init__(self, run: Callable[[], None]):
        self.run = run
        self.ended = threading.Event()
        self.error: Exception | None = None


class Device:
    """Runs kernels in their order."""

    def __init__(self):
        self._kernels: queue.Queue[Kernel] = queue.Queue()
        self._last: Kernel | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def begin(self, run: Callable[[], None]) -> Kernel:
        self._last = kernel = Kernel(run)
        self._kernels.put(kernel)
        return kernel

    def synchronize(self) -> None:
        if self._last is not None:
            self._last.ended.wait()

    def _work(self) -> None:
        while True:
            kernel = self._kernels.get()
            try:
                kernel.run()
            except Exception as error:
                kernel.error = error
            kernel.ended.set()


class Group:
    """A gloo group with communicators of pairs, as NCCL's."""

    def __init__(self, group: dist.Backend, device: Device, timeout_s: float):
        self._group, self._device, self._timeout_s = group, device, timeout_s
        self._met: set[int] = set()

    def send(self, tensors: list, peer: int, tag: int) -> Kernel:
        return self._begin(self._group.send, tensors, peer, tag)

    def recv(self, tensors: list, peer: int, tag: int) -> Kernel:
        return self._begin(self._group.recv, tensors, peer, tag)

    def abort(self) -> None:
        self._group.abort()

    def _begin(self, move: Callable, tensors: list, peer: int, tag: int) -> Kernel:
        if peer not in self._met:
            self._meet(peer, _FIRST_USE)
            self._met.add(peer)

        def run() -> None:
            self._meet(peer, _TURN | tag)
            self._wait(move(tensors, peer, tag))

        return self._device.begin(run)

    def _meet(self, peer: int, tag: int) -> None:
        mine, theirs = torch.zeros(1), torch.zeros(1)
        works = [self._group.send([mine], peer, tag), self._group.recv([theirs], peer, tag)]
        for work in works:
            self._wait(work)

    def _wait(self, work: dist.Work) -> None:
        work.wait(timedelta(seconds=self._timeout_s))


class NcclLike(CpuTransfer):
    """One process's device."""

    def __init__(self, folder: Path):
        self._folder, self._device = folder, Device()

    def synchronize(self) -> None:
        self._device.synchronize()

    def point_to_point_group(self, store, number, size, timeout_s, host) -> Group:
        return Group(super().point_to_point_group(store, number, size, timeout_s, host), self._device, timeout_s)

    def wait(self, work: Kernel, timeout_s: float) -> bool:
        has_ended = work.ended.wait(timeout_s)
        if work.error is not None:
            raise work.error
        return has_ended

    def abort(self, group: Group) -> None:
        group.abort()

    def arena(self, nbytes: int) -> torch.Tensor:
        self._path = str(self._folder / uuid.uuid4().hex)
        return torch.from_file(self._path, shared=True, size=nbytes, dtype=torch.uint8)

    def share_memory(self, tensor: torch.Tensor) -> dict[str, Any]:
        return {"path": self._path, "bytes": tensor.numel()}

    def open_memory(self, handle: dict[str, Any]) -> torch.Tensor:
        return torch.from_file(handle["path"], shared=True, size=handle["bytes"], dtype=torch.uint8)


def use(monkeypatch, folder: Path) -> None:
    """Gives this process and those forked from it such devices; each process of a node can open the memory of all."""
    monkeypatch.setattr(platform, "_TRANSFERS", {"cpu": lambda: NcclLike(folder)})
    hosting = Hosting("cpu", None, checks_batch_order=True, memory_reach="node")
    for module in (connect, transport_shm, sync_setup):
        monkeypatch.setattr(module, "get_hosting", lambda device: hosting)


def at_once(calls: dict[Any, Callable[[], Any]], timeout_s: float) -> dict[Any, Any]:
    """What each call returned, each in a process of its own; an error as its text, None where it did not end."""
    forking = multiprocessing.get_context("fork")
    answers = forking.Queue()

    def run(name: Any, call: Callable[[], Any]) -> None:
        try:
            answers.put((name, call()))
        except Exception as error:
            answers.put((name, f"{type(error).__name__}: {error}"))

    processes = [forking.Process(target=run, args=item, daemon=True) for item in calls.items()]
    for process in processes:
        process.start()
    found: dict[Any, Any] = dict.fromkeys(calls)
    try:
        for _ in calls:
            name, answer = answers.get(timeout=timeout_s)
            found[name] = answer
    except queue.Empty:
        pass
    for process in processes:
        process.kill()
        process.join()
    return found


def send_all(setup: SyncSetup, rank: int, updates: int) -> list[dict[int, dict[str, int]]]:
    """A rank's syncs: the digests of each."""
    held = shards_of(setup, rank, hf_weights(setup))
    sender = connect_sender(setup, rank, lambda name, chunk: held[name, chunk])
    return [sender.send(update, setup.workers).digests for update in range(1, updates + 1)]


def receive_all(setup: SyncSetup, worker: int, updates: int) -> list[dict[str, int]]:
    """A worker's syncs: the digests of each, after a comparison of every element."""
    weights, receiver, digests = hf_weights(setup), connect_receiver(setup, worker), []
    wanted = expected(setup, worker, weights)
    for update in range(1, updates + 1):
        writer = DictWriter(setup, worker)
        receiver.receive(writer, update)
        assert [name for name in wanted if not torch.equal(writer.tensors[name], wanted[name])] == []
        digests.append(writer.digests)
    return digests
