"""Shared memory of one host or of one device: ranks pack straight into the arena of a worker.

An arena has two halves, each for one round. The worker grants each rank its slot, and the rank writes its message there
and marks it ready. The worker unpacks it and grants the half for the round after the next.

Control words have 64 bits, with a memory fence before each write and after each read. So data is complete before the
word that announces it is seen, also on processors that reorder. The worker touches the arena when it makes it. The name
of its file is removed as soon as all have opened it.

Each side holds a lock on a byte of the file. The kernel releases it when the process ends, so a waiting peer notices.

An arena in device memory that others open (`DeviceReceiver`, `DeviceSender`) has only the data on the device. The
control words stay in a file of the host.
"""

import fcntl
import json
import mmap
import os
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mrl.errors import EnvironmentFault
from mrl.platforms.hosting import get_hosting
from mrl.platforms.memory_fence import memory_fence
from mrl.platforms.transfer import Transfer
from mrl.reshard.messages import Message
from mrl.reshard.setup import SyncSetup, route
from mrl.reshard.sync_report import GAVE_UP
from mrl.reshard.transport import (
    TransferError,
    aligned,
    largest_round,
    plan_tag,
    received_rounds,
    sequence_number,
    wait_until,
)

PREFIX = "mrl-reshard-"
ON_DEVICE = "-device"  # a worker may have a second arena, on its device
_GRANTED, _OFFSET, _NBYTES, _READY, _PLAN = range(5)  # words of one (half, rank)
_WORDS = 8  # a cache line
_PAGE = 4096
_NOTE = 2048  # bytes at the start, for what others need to open an arena on a device
_THERE = -1  # a rank that is connected and has not given up an update yet
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, process


def arena_path(setup: SyncSetup, worker: int) -> Path:
    """Returns the file of a worker's arena. Its name belongs to this run alone."""
    name = setup.transport["name"]
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"transport name {name!r} is not a valid file name")
    return Path(setup.transport.get("folder", "/dev/shm")) / f"{PREFIX}{name}-{worker}"


def arena_files(setup: SyncSetup, worker: int) -> list[Path]:
    """Returns every name that a worker's arenas may have.

    The names can be removed once all have opened them. Then no memory outlives the processes.
    """
    path = arena_path(setup, worker)
    return [path.with_name(f"{path.name}{where}{state}") for where in ("", ON_DEVICE) for state in ("", ".part")]


class Arena:
    """A mapped file: the control words of every (half, rank), who gave up, and the data.

    `side` says whose object this is: 0 for the worker, which makes the file, and 1 + i for the i-th rank.
    """

    def __init__(self, path: Path, ranks: int, half_bytes: int, side: int):
        create = side == 0
        self.path = path
        self.half_bytes = half_bytes
        self._pinned: Callable[[], None] | None = None
        control = _NOTE + 8 * (1 + ranks + 2 * ranks * _WORDS)
        start = -(-control // _PAGE) * _PAGE
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        part = path.with_name(path.name + ".part")
        file = os.open(part if create else path, flags, 0o600)
        try:
            if create:
                _allocate(file, start + 2 * half_bytes, part)
            elif os.fstat(file).st_size != start + 2 * half_bytes:
                raise TransferError(
                    f"{path} does not have the size that the plan gives; do both sides use the same configuration?"
                )
            # the worker touches all of it once, here; a rank only touches its own slots
            populate = 0
            if create:
                populate = getattr(mmap, "MAP_POPULATE", 0)
            self._map = mmap.mmap(file, start + 2 * half_bytes, flags=mmap.MAP_SHARED | populate)
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock_of(side))
        except BaseException:
            os.close(file)
            raise
        self._file = os.fdopen(file, "rb", buffering=0)
        words = np.frombuffer(self._map, np.int64, (control - _NOTE) // 8, _NOTE)
        self.stops = words[: 1 + ranks]  # the update that the worker (first) and each rank gave up
        self.words = words[1 + ranks :].reshape(2, ranks, _WORDS)
        if not create:
            self.stops[side] = _THERE
        self.note = np.frombuffer(self._map, np.uint8, _NOTE)
        self.data = (
            torch.frombuffer(self._map, dtype=torch.uint8, offset=start)
            if half_bytes
            else torch.empty(0, dtype=torch.uint8)
        )

    def pin(self, transfer: Transfer) -> None:
        """Pins the data, where it is in host memory, so that the device reaches it quickly."""
        if self.data.numel():
            self._pinned = transfer.pin(self.data)

    def unpin(self) -> None:
        """Releases the pinned memory before it is unmapped. Safe to call twice."""
        undo = self._pinned
        self._pinned = None
        if undo is not None:
            undo()

    def has_left(self, side: int) -> bool:
        """Tells whether the process of that side was connected and has ended."""
        answer = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _lock_of(side))
        was_there = side == 0 or self.stops[side] != 0
        return was_there and struct.unpack(_FLOCK, answer)[0] == fcntl.F_UNLCK

    def publish(self) -> None:
        """Gives the file the name under which the ranks look for it."""
        self.path.with_name(self.path.name + ".part").rename(self.path)


def _lock_of(side: int) -> bytes:
    """Returns a lock of one byte, which belongs to the opener of the file and to processes forked from it."""
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, side, 1, 0)


def _allocate(file: int, size: int, path: Path) -> None:
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise EnvironmentFault(
            f"{path.parent} has no room for {size} bytes of staging ({error.strerror}); enlarge it "
            "or lower reshard.budget_mb"
        ) from error


class SharedMemoryReceiver:
    """A ReceivingEnd in a worker's arena."""

    def __init__(self, setup: SyncSetup, worker: int, ranks: Sequence[int], transfer: Transfer):
        plan = setup.plan()
        self._worker = worker
        self._ranks = list(ranks)
        self._transfer = transfer
        self._timeout = setup.timeout_s
        self._plan_tag = plan_tag(plan)
        half = largest_round(received_rounds(plan, worker, ranks))
        self.staging_bytes = 2 * half
        self._arena = self._make(arena_path(setup, worker), half)
        self._arena.pin(transfer)
        self._arena.publish()
        self._update = 0

    def _make(self, path: Path, half: int) -> Arena:
        self._device_data = None
        return Arena(path, len(self._ranks), half, side=0)

    @property
    def _data(self) -> Tensor:
        if self._device_data is None:
            return self._arena.data
        return self._device_data

    def begin(self, update: int) -> None:
        self._update = update
        self._half_of: dict[int, int] = {}  # by round
        self._arena.words[:] = 0

    def is_remote(self, message: Message) -> bool:
        return False

    def ask(self, messages: Sequence[Message]) -> None:
        half = len(self._half_of) % 2
        offset = half * self._arena.half_bytes
        for message in messages:
            words = self._words(half, message)
            words[_OFFSET], words[_NBYTES], words[_READY], words[_PLAN] = offset, message.nbytes, 0, self._plan_tag
            memory_fence()
            words[_GRANTED] = sequence_number(self._update, message)
            offset += aligned(message.nbytes)
        self._half_of[messages[0].round] = half

    def _words(self, half: int, message: Message) -> np.ndarray:
        return self._arena.words[half, self._ranks.index(message.source)]

    def take(self, messages: Sequence[Message]) -> list[Tensor]:
        return [self._take(message) for message in messages]

    def _take(self, message: Message) -> Tensor:
        words = self._words(self._half_of[message.round], message)
        who = f"rank {message.source}, round {message.round} of update {self._update} for worker {self._worker}"
        side = 1 + self._ranks.index(message.source)

        def ready() -> bool:
            if self._arena.stops[side] == self._update:
                raise TransferError(f"{who}: the rank {GAVE_UP}")
            return words[_READY] != 0

        def check_rank() -> None:
            if self._arena.has_left(side):
                raise TransferError(f"{who}: the rank {GAVE_UP}, its process has ended")

        wait_until(ready, self._timeout, f"{who}: nothing came", check_rank)
        memory_fence()
        arrived = words[_READY], words[_NBYTES], words[_PLAN]
        if arrived != (sequence_number(self._update, message), message.nbytes, self._plan_tag):
            raise TransferError(
                f"{who}: not the message that the plan expects (number, bytes, plan {arrived}); "
                "does the sender belong to this run?"
            )
        data = self._data[words[_OFFSET] : words[_OFFSET] + message.nbytes]
        if self.lasting(message):
            return data
        return data.to(self._transfer.device)

    def lasting(self, message: Message) -> bool:
        return self._data.device == self._transfer.device

    def release(self, messages: Sequence[Message]) -> None:
        memory_fence()  # they have been read
        for message in messages:
            self._words(self._half_of[message.round], message)[_GRANTED] = 0

    def abandon(self) -> None:
        self._arena.stops[0] = self._update

    def close(self) -> None:
        self._arena.unpin()
        self._arena.path.unlink(missing_ok=True)
        self._arena.path.with_name(self._arena.path.name + ".part").unlink(missing_ok=True)


class SharedMemorySender:
    """A SendingEnd in a rank's slots of its workers' arenas."""

    kind = "shm"
    staging_bytes = 0  # the arenas are the workers'

    def __init__(
        self,
        setup: SyncSetup,
        rank: int,
        workers: Sequence[int],
        transfer: Transfer,
        check_wanted: Callable[[], None] = lambda: None,
    ):
        self._rank = rank
        self._transfer = transfer
        self._timeout = setup.timeout_s
        self._update = 0
        self._plan_tag = plan_tag(setup.plan())
        self._arenas: dict[int, Arena] = {}
        self._data: dict[int, Tensor] = {}
        self._index: dict[int, int] = {}
        self._staged: dict[int, Tensor] = {}
        try:
            for worker in workers:
                self._open(setup, worker, check_wanted)
        except BaseException:  # nobody has this end, so nobody else unpins what is open already
            self.close()
            raise

    def _open(self, setup: SyncSetup, worker: int, check_wanted: Callable[[], None]) -> None:
        world = range(setup.train_layout.world_size)
        ranks = [r for r in world if route(setup, r, worker, get_hosting(setup.dialect).memory_reach) == self.kind]
        half = largest_round(received_rounds(setup.plan(), worker, ranks))
        path = self._path(setup, worker)
        wait_until(path.exists, self._timeout, f"worker {worker} did not make its arena {path.name}", check_wanted)
        self._index[worker] = ranks.index(self._rank)
        self._arenas[worker], self._data[worker] = self._find(path, len(ranks), half, 1 + self._index[worker])
        self._arenas[worker].pin(self._transfer)

    def _path(self, setup: SyncSetup, worker: int) -> Path:
        return arena_path(setup, worker)

    def _find(self, path: Path, ranks: int, half: int, side: int) -> tuple[Arena, Tensor]:
        arena = Arena(path, ranks, half, side)
        return arena, arena.data

    def begin(self, update: int) -> None:
        self._update = update
        self._posted: set[tuple[int, int]] = set()  # round and worker

    def is_remote(self, message: Message) -> bool:
        return False

    def slot(self, message: Message) -> Tensor:
        who = f"worker {message.worker}, round {message.round} of update {self._update}"
        wait_until(
            lambda: self._is_granted(message),
            self._timeout,
            f"{who}: rank {self._rank} got no room for its message",
            lambda: self._check_worker(message),
        )
        memory_fence()
        words = self._granted_words(message)
        if (words[_NBYTES], words[_PLAN]) != (message.nbytes, self._plan_tag):
            raise TransferError(
                f"{who}: the worker expects {words[_NBYTES]} bytes of another plan, rank "
                f"{self._rank} has {message.nbytes}"
            )
        if self.lasting(message):
            return self._data[message.worker][words[_OFFSET] : words[_OFFSET] + message.nbytes]
        self._staged[message.worker] = torch.empty(message.nbytes, dtype=torch.uint8, device=self._transfer.device)
        return self._staged[message.worker]

    def _words(self, message: Message) -> np.ndarray:
        """[half, word]: this rank's control words in the worker's arena."""
        return self._arenas[message.worker].words[:, self._index[message.worker]]

    def _is_granted(self, message: Message) -> bool:
        """Tells whether the message has a slot that the worker has not taken back.

        Raises TransferError when the worker gave up.
        """
        if self._arenas[message.worker].stops[0] == self._update:
            raise TransferError(f"worker {message.worker} {GAVE_UP} update {self._update}")
        return sequence_number(self._update, message) in self._words(message)[:, _GRANTED]

    def _check_worker(self, message: Message) -> None:
        if self._arenas[message.worker].has_left(0):
            raise TransferError(f"worker {message.worker} {GAVE_UP} update {self._update}: its process has ended")

    def _granted_words(self, message: Message) -> np.ndarray:
        words = self._words(message)
        return words[int(np.flatnonzero(words[:, _GRANTED] == sequence_number(self._update, message))[0])]

    def lasting(self, message: Message) -> bool:
        return self._data[message.worker].device == self._transfer.device

    def post(self, message: Message) -> None:
        words = self._granted_words(message)
        if (staged := self._staged.pop(message.worker, None)) is not None:
            self._data[message.worker][words[_OFFSET] : words[_OFFSET] + message.nbytes].copy_(staged)
        what = f"rank {self._rank} did not pack round {message.round} of update {self._update}"
        wait_until(self._transfer.mark(), self._timeout, what, lambda: self._check_worker(message))
        memory_fence()
        words[_READY] = sequence_number(self._update, message)
        self._posted.add((message.round, message.worker))

    def wait(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if (message.round, message.worker) in self._posted:  # else its worker says that nothing came
                self._wait_consumed(message)

    def _wait_consumed(self, message: Message) -> None:
        what = f"worker {message.worker} did not take round {message.round} of update {self._update}"
        wait_until(lambda: not self._is_granted(message), self._timeout, what, lambda: self._check_worker(message))

    def abandon(self) -> None:
        for worker, arena in self._arenas.items():
            arena.stops[1 + self._index[worker]] = self._update

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.unpin()
        self._arenas.clear()
        self._data.clear()


class DeviceReceiver(SharedMemoryReceiver):
    """A worker's arena on its device, shared once and kept between syncs. An engine's sleep does not move it.

    Used only where the platform can share device memory. Ranks close theirs first.
    """

    def _make(self, path: Path, half: int) -> Arena:
        self._device_data = self._transfer.arena(2 * half)
        arena = Arena(_device_path(path), len(self._ranks), 0, side=0)
        arena.half_bytes = half
        note = json.dumps(self._transfer.share_memory(self._device_data)).encode()
        if len(note) >= arena.note.size:
            raise EnvironmentFault(
                f"a device-memory handle of {len(note)} bytes does not fit; set reshard.transport: shm"
            )
        arena.note[: len(note)] = np.frombuffer(note, np.uint8)
        return arena

    def release(self, messages: Sequence[Message]) -> None:
        what = f"worker {self._worker} did not unpack round {messages[0].round} of update {self._update}"
        wait_until(self._transfer.mark(), self._timeout, what)  # read before the half is granted again
        super().release(messages)

    def close(self) -> None:
        super().close()
        if self._device_data is not None:
            self._transfer.keep(self._device_data)
            self._device_data = None


class DeviceSender(SharedMemorySender):
    """A rank's slots in arenas on devices of its node, each opened once and kept until it is closed."""

    kind = "ipc"

    def _find(self, path: Path, ranks: int, half: int, side: int) -> tuple[Arena, Tensor]:
        arena = Arena(path, ranks, 0, side)
        handle = json.loads(arena.note.tobytes().rstrip(b"\0"))
        return arena, self._transfer.open_memory(handle)

    def _path(self, setup: SyncSetup, worker: int) -> Path:
        return _device_path(arena_path(setup, worker))


def _device_path(path: Path) -> Path:
    """Returns the file of the arena on the device. A worker may also have one in host memory, for ranks of other
    devices.
    """
    return path.with_name(path.name + ON_DEVICE)
