"""Writes one planned file block by block, and takes its digest on the way."""

import ctypes
import errno
import hashlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from mrl.checkpoint.containers import Container
from mrl.checkpoint.manifest import Entry
from mrl.checkpoint.open_checkpoint import Reader, code_of, word_type
from mrl.checkpoint.planned_file import PlannedFile
from mrl.errors import EnvironmentFault
from mrl.model.boxes import Box

BLOCK_BYTES = 1024**2  # stays in a core's own cache between reading, hashing and writing
WRITEBACK_BYTES = 64 * 1024**2
_SYNC_FILE_RANGE_WRITE = 2


def write_file(reader: Reader, folder: Path, file: PlannedFile, container: Container, digests: bool) -> dict[str, Any]:
    """Writes `folder/NAME.part` and returns its size and, with `digests`, its SHA-256. It is not waited for the disk.

    Raises EnvironmentFault when the disk is full or fails.
    """
    part, digest, size, begun = folder / f"{file.name}.part", hashlib.sha256(), 0, 0
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("wb", buffering=0) as out:
            for block in _blocks(reader, file, container):
                if digests:
                    digest.update(block)
                _write_all(out, block)
                size += len(block)
                if size - begun >= WRITEBACK_BYTES:
                    _begin_writeback(out.fileno(), begun, size - begun)
                    begun = size
            _begin_writeback(out.fileno(), begun, size - begun)
    except OSError as error:
        raise disk_fault(part, error) from error
    return {"bytes": size} | ({"sha256": digest.hexdigest()} if digests else {})


def disk_fault(part: Path, error: OSError) -> EnvironmentFault:
    """Takes an unfinished file away and says why it could not be finished."""
    part.unlink(missing_ok=True)
    cure = "free some and run the same command again: finished files are kept" if error.errno == errno.ENOSPC else "check the disk"
    return EnvironmentFault(f"{part} cannot be written ({error.strerror}); {cure}")


def _write_all(out, block: memoryview) -> None:
    while block:
        block = block[out.write(block) :]


def _begin_writeback(handle: int, start: int, nbytes: int) -> None:
    """Lets the disk begin with what is written, so that the final fsync finds little left; Linux only, and no promise at all."""
    if _LIBC is not None and nbytes:
        _LIBC.sync_file_range(handle, ctypes.c_int64(start), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)


def _libc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "sync_file_range") else None


_LIBC = _libc()


def _blocks(reader: Reader, file: PlannedFile, container: Container) -> Iterator[memoryview]:
    dtype, buffer = reader.checkpoint.dtype, np.empty(BLOCK_BYTES, np.uint8)
    if head := container.head(file):
        yield memoryview(head)
    for entry in file.entries:
        crc = 0
        if before := container.before(entry):
            yield memoryview(before)
        for _, block in tensor_blocks(reader, entry, code_of(entry.role, dtype), buffer):
            view = memoryview(block.reshape(-1)).cast("B")
            if container.checksums:
                crc = crc32(view, crc)
            yield view
        if after := container.after(entry, crc):
            yield memoryview(after)


def tensor_blocks(reader: Reader, entry: Entry, code: str, buffer: np.ndarray | None = None) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of a local tensor, about a megabyte at a time; a block is valid until the next is asked for.

    Blocks lie in `buffer` (bytes) where they fit. Elements under no piece are vocabulary padding and are zero.
    """
    words, (rows, *tail) = word_type(code), entry.shape
    step = max(1, BLOCK_BYTES // (prod(tail) * words.itemsize))
    padded = sum(piece.local_box.volume for piece in entry.pieces) != prod(entry.shape)
    shape = (min(step, rows), *tail)
    size = prod(shape) * words.itemsize
    fits = buffer is not None and size <= len(buffer)
    whole = buffer[:size].view(words).reshape(shape) if fits else np.empty(shape, words)
    for first in range(0, rows, step):
        block = whole[: min(step, rows - first)]
        if padded:
            block.fill(0)
        _fill(reader, entry, first, block)
        yield first, block


def _fill(reader: Reader, entry: Entry, first: int, block: np.ndarray) -> None:
    here = Box(((first, first + len(block)), *Box.whole(block.shape[1:]).ranges))
    for piece in entry.pieces:
        common = here.intersect(piece.local_box)
        if common is not None:
            target = block[common.rebase(here, Box.whole(block.shape)).slices]
            reader.fill(entry.role, piece.hf_name, common.rebase(piece.local_box, piece.hf_box), target)
