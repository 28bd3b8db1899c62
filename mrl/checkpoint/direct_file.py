"""Writes a file past the operating system's cache.

Weights are written once and not read again soon. Through the cache, each megabyte costs a second copy and the
allocation of its pages, and evicts what others need. For a conversion this takes as much processor time as its digests.
If a file system lacks direct writes (O_DIRECT), the same code uses the cache.
"""

import errno
import fcntl
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mrl.units import MIB

BUFFER_BYTES = 4 * MIB  # of one write; a multiple of any disk's alignment for direct writes
_IN_WORK = 2  # buffers that are being written while the next is filled
# errors of file systems without direct writes: disks, FUSE and 9p, virtiofs; others are real errors
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none


class DirectFile:
    """A new file, written from beginning to end. As a context manager it is closed without `finish` if the block fails.

    `write` and `finish` raise OSError of the disk, possibly from an earlier `write`.
    """

    def __init__(self, path: Path):
        # bytes passed to `write`
        self.path = path
        self.size = 0
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o666)
        _try_direct(self._handle)
        self._buffers = deque(mmap.mmap(-1, BUFFER_BYTES) for _ in range(_IN_WORK + 1))  # a mapping begins on a page
        self._filled = 0  # bytes in the first buffer, which is not being written
        self._writing: deque[Future] = deque()
        self._threads = ThreadPoolExecutor(_IN_WORK)

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(self, *failure) -> None:
        self._threads.shutdown(cancel_futures=True)
        os.close(self._handle)

    def write(self, data: bytes | memoryview) -> None:
        """Appends `data`, which may be overwritten afterwards."""
        view = memoryview(data)
        while view:
            taken = min(len(view), BUFFER_BYTES - self._filled)
            self._buffers[0][self._filled : self._filled + taken] = view[:taken]
            self._filled += taken
            self.size += taken
            view = view[taken:]
            if self._filled == BUFFER_BYTES:
                self._send_buffer()

    def finish(self, durable: bool) -> None:
        """Waits until everything is written; with `durable` until it is on the disk."""
        while self._writing:
            self._writing.popleft().result()
        _give_up_direct(self._handle)  # the rest has any length
        write_at(self._handle, memoryview(self._buffers[0])[: self._filled], self.size - self._filled)
        if durable:
            os.fsync(self._handle)

    def _send_buffer(self) -> None:
        view = memoryview(self._buffers[0])
        self._writing.append(self._threads.submit(write_at, self._handle, view, self.size - BUFFER_BYTES))
        self._buffers.rotate(-1)  # the next buffer is the one that was sent longest ago
        self._filled = 0
        if len(self._writing) > _IN_WORK:
            self._writing.popleft().result()


def write_at(handle: int, view: memoryview, at: int) -> None:
    """Writes all of `view` at an offset. Raises OSError."""
    while view:
        try:
            count = os.pwrite(handle, view, at)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            _give_up_direct(handle)  # the file system accepts the flag but not the writes, or no longer
            count = os.pwrite(handle, view, at)
        if count == 0:
            raise OSError(errno.EIO, f"the file system takes none of {len(view)} bytes and names no reason")
        view = view[count:]
        at = at + count


def _try_direct(handle: int) -> None:
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | _DIRECT)
    except OSError as error:
        if error.errno not in _NOT_DIRECT:
            raise


def _give_up_direct(handle: int) -> None:
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~_DIRECT)
