"""A safetensors file (huggingface.co/docs/safetensors, "Format"): its dtypes, its header, and writing in blocks.

A writer, rank or conversion, passes the header and then the tensors' bytes in blocks. Nothing is copied twice, and the
digest is computed during writing. `mrl.model.hf_files` reads headers.

Files are written past the operating system's cache. Weights are written once and not read again soon. Through the
cache, each megabyte costs a second copy and the allocation of its pages, and evicts what others need. For a conversion
this takes as much processor time as its digests. If a file system lacks direct writes (O_DIRECT), the same code uses
the cache.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mrl.units import MIB

# the format's dtypes
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
BUFFER_BYTES = 4 * MIB  # of one write; a multiple of any disk's alignment for direct writes
_IN_WORK = 2  # buffers that are being written while the next is filled
# errors of file systems without direct writes: disks, FUSE and 9p, virtiofs; others are real errors
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none


def safetensors_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Returns the beginning of a file of `tensors` (name, dtype, shape, bytes), whose data follow in this order without
    gaps.

    Eight bytes with the length of the JSON precede it. Padding makes the data begin at a multiple of 8.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        begin = end
        end = end + nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_blocks(path: Path, blocks: Iterable[bytes | memoryview], digest: bool, durable: bool) -> dict[str, Any]:
    """Writes `blocks` one after another. Returns size and, with `digest`, SHA-256, in a manifest's form.

    `durable` waits until everything is on the disk. Raises OSError, and leaves what is written.
    """
    sha256 = hashlib.sha256()
    with DirectFile(path) as out:
        for block in blocks:
            if digest:
                sha256.update(block)
            out.write(block)
        out.finish(durable)
    return {"bytes": out.size} | ({"sha256": sha256.hexdigest()} if digest else {})


class DirectFile:
    """A new file, written from beginning to end. As a context manager it is closed without `finish` if the block fails.

    `write` and `finish` raise OSError of the disk, possibly from an earlier `write`.
    """

    def __init__(self, path: Path):
        self.path = path
        self.size = 0  # bytes passed to `write`
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
            count = min(len(view), BUFFER_BYTES - self._filled)
            self._buffers[0][self._filled : self._filled + count] = view[:count]
            self._filled += count
            self.size += count
            view = view[count:]
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
            raise OSError(errno.EIO, f"the file system writes none of {len(view)} bytes and gives no reason")
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
