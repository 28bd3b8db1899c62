"""The transfer of CUDA on the CPU, with a process group that does what NCCL's does and gloo does not.

* The first send or receive of a pair blocks its caller until the peer's, without a deadline.
* Sends and receives are kernels of one device. They run in the order in which they were begun, and each holds the
  device until the peer's has come to its turn, too.
* Who waits for a stream waits for all of them, as with one hardware queue.
* A kernel whose peer is gone ends its process, unless errors were unhandled when the group was made (torch's
  ErrorHandlingMode).
* Device memory that another process opens is a file.

Ranks and workers are processes, made by a server that has imported this file.
"""

import multiprocessing
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from reshard_world import DictWriter, expected, hf_weights, shards_of
from sync_simulation import each_transport_two_rounds_ahead

from mrl.platforms import transfer as platform
from mrl.platforms.hosting import Hosting
from mrl.platforms.transfer import CpuTransfer, CudaTransfer
from mrl.reshard import connect, execute, transport_shm
from mrl.reshard import setup as sync_setup
from mrl.reshard.connect import connect_receiver, connect_sender, open_sender
from mrl.reshard.setup import SyncSetup
from mrl.reshard.transport import TransferError

FOREVER_S = 600.0
TOGETHER_S = 120.0
_TURN = 1 << 30  # added to a message's tag: its kernel has come to its turn
_FIRST_USE = 1 << 30  # no message has the tag 0


class Kernel:
    """A send or receive that was begun: what torch's Work is to a transfer."""

    def __init__(self, run: Callable[[], None]):
        self.run = run
        self.ended = threading.Event()
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: timedelta) -> bool:
        """As in a group that waits blockingly."""
        assert self.ended.wait(timeout.total_seconds())
        if self.error is not None:
            raise self.error
        return True


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

    def is_idle(self) -> bool:
        return self._last is None or self._last.ended.is_set()

    def _work(self) -> None:
        while True:
            kernel = self._kernels.get()
            try:
                kernel.run()
            except Exception as error:
                kernel.error = error
            kernel.ended.set()


class ProcessGroupNCCL:
    """A gloo group with communicators of pairs."""

    class Options:
        _timeout = timedelta(minutes=10)

    device: Device  # of this process
    communicators = 0  # that this process has made

    def __init__(self, store: dist.Store, number: int, size: int, options: Options):
        self._group = CpuTransfer().point_to_point_group(store, number, size, FOREVER_S, "127.0.0.1")
        self._handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
        assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1", "else `wait` raises nothing"
        self._met: set[int] = set()
        self._aborted = threading.Event()

    def send(self, tensors: list, peer: int, tag: int) -> Kernel:
        return self._begin(self._group.send, tensors, peer, tag)

    def recv(self, tensors: list, peer: int, tag: int) -> Kernel:
        return self._begin(self._group.recv, tensors, peer, tag)

    def abort(self) -> None:
        self._aborted.set()

    def _begin(self, move: Callable, tensors: list, peer: int, tag: int) -> Kernel:
        if peer not in self._met:
            self._meet(peer, _FIRST_USE)
            self._met.add(peer)
            ProcessGroupNCCL.communicators += 1

        def run() -> None:
            try:
                self._meet(peer, _TURN | tag)
                self._wait(move(tensors, peer, tag))
            except Exception:
                if self._handling != "0" and not self._aborted.is_set():
                    os._exit(134)  # of SIGABRT
                raise

        return self.device.begin(run)

    def _meet(self, peer: int, tag: int) -> None:
        mine, theirs = torch.zeros(1), torch.zeros(1)
        works = [self._group.send([mine], peer, tag), self._group.recv([theirs], peer, tag)]
        for work in works:
            self._wait(work)

    def _wait(self, work: dist.Work) -> None:
        """Waits until it has ended, its peer is gone, or the group was aborted."""
        error: list[Exception | None] = []

        def wait() -> None:
            try:
                work.wait(timedelta(seconds=FOREVER_S))
                error.append(None)
            except Exception as failed:
                error.append(failed)

        threading.Thread(target=wait, daemon=True).start()
        while not error:
            if self._aborted.is_set():
                raise RuntimeError("NCCL communicator was aborted")
            time.sleep(1e-4)
        if error[0] is not None:
            raise error[0]


class NcclLike(CudaTransfer):
    """One process's transfer."""

    device = torch.device("cpu")

    def __init__(self, folder: Path):
        self._folder = folder

    def mark(self) -> Callable[[], bool]:
        return ProcessGroupNCCL.device.is_idle

    def device_for_thread(self) -> Callable[[], None]:
        return lambda: None

    def free_bytes(self) -> None:
        return None

    def arena(self, nbytes: int) -> torch.Tensor:
        self._path = str(self._folder / uuid.uuid4().hex)
        return torch.from_file(self._path, shared=True, size=nbytes, dtype=torch.uint8)

    def keep(self, arena: torch.Tensor) -> None:
        """Leaves it to the process's end."""

    def share_memory(self, tensor: torch.Tensor) -> dict[str, Any]:
        return {"path": self._path, "bytes": tensor.numel()}

    def open_memory(self, handle: dict[str, Any]) -> torch.Tensor:
        return torch.from_file(handle["path"], shared=True, size=handle["bytes"], dtype=torch.uint8)


def _be_like_nccl(folder: Path, order_before: bool) -> None:
    """Gives this process such a device; each process of a node can open the memory of all."""
    ProcessGroupNCCL.device = Device()
    dist.ProcessGroupNCCL = ProcessGroupNCCL
    platform._TRANSFERS["cpu"] = lambda: NcclLike(folder)
    hosting = Hosting("cpu", None, checks_batch_order=True, memory_reach="node")
    for module in (connect, transport_shm, sync_setup):
        module.get_hosting = lambda device: hosting
    if order_before:
        execute.receiving = each_transport_two_rounds_ahead


def _answer(answers: Any, name: Any, folder: Path, order_before: bool, call: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    _be_like_nccl(folder, order_before)
    try:
        answers.put((name, call()))
    except Exception as error:
        answers.put((name, f"{type(error).__name__}: {error}"))


def at_once(
    calls: dict[Any, partial], folder: Path, order_before: bool = False, stopped: Collection[Any] = ()
) -> dict[Any, Any]:
    """What each call returned, each in a process of its own; an error as its text, None where it did not end.

    Those of `stopped` are not waited for.
    """
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload([__name__])
    answers = forking.Queue()
    processes = [
        forking.Process(target=_answer, args=(answers, name, folder, order_before, call), daemon=True)
        for name, call in calls.items()
    ]
    # the server does not take over this process's path
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        for process in processes:
            process.start()
    found: dict[Any, Any] = dict.fromkeys(calls)
    deadline = time.monotonic() + TOGETHER_S
    left = len(calls) - len(stopped)
    while left and time.monotonic() < deadline and any(process.is_alive() for process in processes):
        try:
            name, answer = answers.get(timeout=0.5)
        except queue.Empty:
            continue
        found[name] = answer
        left -= 1
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
    receiver = connect_receiver(setup, worker)
    return [_received(setup, worker, receiver, update) for update in range(1, updates + 1)]


def _received(setup: SyncSetup, worker: int, receiver: Any, update: int) -> dict[str, int]:
    writer, wanted = DictWriter(setup, worker), expected(setup, worker, hf_weights(setup))
    receiver.receive(writer, update)
    assert [name for name in wanted if not torch.equal(writer.tensors[name], wanted[name])] == []
    return writer.digests


def send_again(setup: SyncSetup, second: SyncSetup, rank: int) -> tuple[str, dict[int, dict[str, int]]]:
    """A rank's failed sync, and one over a second connection: the error, and digests."""
    held = shards_of(setup, rank, hf_weights(setup))
    sender = connect_sender(setup, rank, lambda name, chunk: held[name, chunk])
    said = ""
    try:
        sender.send(1, setup.workers)
    except TransferError as error:
        said = str(error)
    sender.close()
    sender = connect_sender(second, rank, lambda name, chunk: held[name, chunk])
    return said, sender.send(2, second.workers).digests


def receive_again(setup: SyncSetup, second: SyncSetup, worker: int) -> tuple[str, dict[str, int]]:
    """A worker's side of `send_again`; a worker that is not in the second connection ends in the first's middle."""
    receiver, said = connect_receiver(setup, worker), ""
    if worker not in second.workers:
        take, rounds = receiver.end.take, []

        def take_and_end(messages: Any) -> Any:
            rounds.append(messages)
            if len(rounds) == 3:
                os._exit(137)
            return take(messages)

        receiver.end.take = take_and_end
    try:
        _received(setup, worker, receiver, 1)
    except TransferError as error:
        said = str(error)
    receiver.close()
    return said, _received(second, worker, connect_receiver(second, worker), 2)


def send_to_all_and_one_again(engines: list[SyncSetup], again: SyncSetup, rank: int) -> list[tuple[int, int, Any]]:
    """A rank's syncs, over a connection for each engine, before and after one of them was made anew: communicators so
    far, bytes of staging, and digests.
    """
    held = shards_of(again, rank, hf_weights(again))
    sender = open_sender(again, rank, lambda name, chunk: held[name, chunk])
    everybody = [worker for setup in engines for worker in setup.workers]
    found = []
    for update, setups in enumerate((engines, [again]), 1):
        for setup in setups:
            sender.connect(setup)
        digests = sender.send(update, everybody).digests
        found.append((ProcessGroupNCCL.communicators, sender.end.staging_bytes, digests))
    return found


def receive_until_restart(setup: SyncSetup, worker: int, updates: int) -> list[tuple[int, dict[str, int]]]:
    """A worker's syncs over one connection: communicators so far, and digests. It ends after them, as if killed."""
    receiver = connect_receiver(setup, worker)
    received = (_received(setup, worker, receiver, update) for update in range(1, updates + 1))
    return [(ProcessGroupNCCL.communicators, digests) for digests in received]


def receive_after_restart(again: SyncSetup, worker: int) -> dict[str, int]:
    """The sync of a process that has begun in the place of another."""
    return _received(again, worker, connect_receiver(again, worker), 2)


def stop_while_connecting(setup: SyncSetup, worker: int) -> str:
    """A worker that meets nobody, though it has joined the group."""
    from mrl.reshard.transport_p2p import PointToPointReceiver

    PointToPointReceiver._greet = lambda self, ranks: iter([time.sleep(FOREVER_S)])
    connect_receiver(setup, worker)
    return "connected"
