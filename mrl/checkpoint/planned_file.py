"""One file that a conversion writes: its tensors and their order, fixed before the first byte, and the writing."""

import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Protocol
from zlib import crc32

import numpy as np

from mrl.checkpoint.manifest import WEIGHT, StoredTensor
from mrl.checkpoint.open_checkpoint import code_of
from mrl.checkpoint.safetensors_file import ITEM_BYTES, safetensors_header, write_blocks
from mrl.checkpoint.stored_boxes import BoxReader
from mrl.errors import EnvironmentFault
from mrl.model.boxes import Box
from mrl.units import MIB

FILE_BYTES = 512 * MIB  # a file is the unit of repetition after a kill, and the unit of work of a process
BLOCK_BYTES = MIB  # stays in a core's own cache between reading, hashing and writing


@dataclass(frozen=True)
class PlannedFile:
    """One file of tensors."""

    name: str
    rank: int  # the owner; 0 in checkpoints without a layout
    entries: tuple[StoredTensor, ...]


def planned_file(name: str, rank: int, entries: list[StoredTensor]) -> PlannedFile:
    """Puts narrower elements last, so that every tensor is aligned to its own width."""
    ordered = sorted(entries, key=lambda entry: entry.role == WEIGHT)
    return PlannedFile(name, rank, tuple(replace(entry, file=name) for entry in ordered))


def file_portions(entries: list[StoredTensor], dtype: str) -> Iterator[list[StoredTensor]]:
    """Yields consecutive entries of about FILE_BYTES. A larger tensor has a file of its own."""
    portion: list[StoredTensor] = []
    size = 0
    for entry in entries:
        nbytes = entry_bytes(entry, dtype)
        if portion and size + nbytes > FILE_BYTES:
            yield portion
            portion = []
            size = 0
        portion.append(entry)
        size += nbytes
    if portion:
        yield portion


def entry_bytes(entry: StoredTensor, dtype: str) -> int:
    """Returns the bytes of a complete local tensor in a checkpoint with weights of `dtype`."""
    return prod(entry.shape) * ITEM_BYTES[code_of(entry.role, dtype)]


class Container(Protocol):
    """A file format: the bytes around the tensors."""

    dtype: str  # of the weights, as the configuration names it
    checksums: ClassVar[bool]  # whether `after` needs the CRC-32 of the tensor's bytes

    def head(self, file: PlannedFile) -> bytes:
        """Returns the first bytes of the file."""

    def before(self, entry: StoredTensor) -> bytes:
        """Returns the bytes before a tensor."""

    def after(self, entry: StoredTensor, crc: int) -> bytes:
        """Returns the bytes after a tensor. Their number does not depend on `crc`."""


@dataclass(frozen=True)
class Safetensors:
    """All descriptions first, then all tensors."""

    dtype: str
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by key, where the file states another shape
    checksums: ClassVar[bool] = False

    def head(self, file: PlannedFile) -> bytes:
        tensors = (
            (e.key, code_of(e.role, self.dtype), self.shapes.get(e.key, e.shape), entry_bytes(e, self.dtype))
            for e in file.entries
        )
        return safetensors_header(tensors, {"format": "pt"})

    def before(self, entry: StoredTensor) -> bytes:
        return b""

    def after(self, entry: StoredTensor, crc: int) -> bytes:
        return b""


def entry_ranges(container: Container, file: PlannedFile) -> list[tuple[int, int]]:
    """Returns (first byte, number of bytes) of every entry with its surrounding bytes."""
    begin = len(container.head(file))
    ranges = []
    for entry in file.entries:
        size = len(container.before(entry)) + entry_bytes(entry, container.dtype) + len(container.after(entry, 0))
        ranges.append((begin, size))
        begin += size
    return ranges


def file_bytes(container: Container, file: PlannedFile) -> int:
    """Returns the size of the whole file."""
    return len(container.head(file)) + sum(size for _, size in entry_ranges(container, file))


def write_planned_file(
    reader: BoxReader, folder: Path, file: PlannedFile, container: Container, digests: bool
) -> dict[str, Any]:
    """Writes `folder/NAME.part`. Returns its size and, with `digests`, its SHA-256. Does not wait for the disk.

    Raises EnvironmentFault when the disk is full or fails.
    """
    part = folder / f"{file.name}.part"
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        return write_blocks(part, _file_blocks(reader, file, container), digests, durable=False)
    except OSError as error:
        raise disk_fault(part, error) from error


def disk_fault(part: Path, error: OSError) -> EnvironmentFault:
    """Removes an unfinished file. Returns the error that says why it could not be finished."""
    part.unlink(missing_ok=True)
    cure = "check the disk"
    if error.errno == errno.ENOSPC:
        cure = "free some and run the same command again: finished files are kept"
    return EnvironmentFault(f"{part} cannot be written ({error.strerror}); {cure}")


def _file_blocks(reader: BoxReader, file: PlannedFile, container: Container) -> Iterator[bytes | memoryview]:
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    yield container.head(file)
    for entry in file.entries:
        crc = 0
        yield container.before(entry)
        for _, block in tensor_blocks(reader, entry, code_of(entry.role, container.dtype), buffer):
            view = memoryview(block.reshape(-1)).cast("B")
            if container.checksums:
                crc = crc32(view, crc)
            yield view
        yield container.after(entry, crc)


def tensor_blocks(
    reader: BoxReader, entry: StoredTensor, code: str, buffer: np.ndarray | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first row, rows) of a local tensor, about a megabyte at a time. A block is valid until the next is
    requested.

    Blocks are in `buffer` (bytes) if they fit. Elements outside all pieces are vocabulary padding and are zero.
    """
    dtype, (rows, *tail) = np.dtype(f"<u{ITEM_BYTES[code]}"), entry.shape
    step = max(1, BLOCK_BYTES // (prod(tail) * dtype.itemsize))
    turned = [piece.local_box.shape[0] for piece in entry.pieces if piece.is_turned]
    step = max([step, *turned[:1]])  # a part of its rows would need all rows of the matrix
    padded = sum(piece.local_box.volume for piece in entry.pieces) != prod(entry.shape)
    shape = (min(step, rows), *tail)
    size = prod(shape) * dtype.itemsize
    fits = buffer is not None and size <= len(buffer)
    whole = buffer[:size].view(dtype).reshape(shape) if fits else np.empty(shape, dtype)
    for first in range(0, rows, step):
        block = whole[: min(step, rows - first)]
        if padded:
            block.fill(0)
        _fill_block(reader, entry, first, block)
        yield first, block


def _fill_block(reader: BoxReader, entry: StoredTensor, first: int, block: np.ndarray) -> None:
    in_local = Box(((first, first + len(block)), *Box.whole(block.shape[1:]).ranges))
    for piece in entry.pieces:
        common = in_local.intersect(piece.local_box)
        if common is not None:
            target = block[common.rebase(in_local, Box.whole(block.shape)).slices]
            if piece.is_turned:
                box = common.turned.rebase(piece.local_box.turned, piece.hf_box)
                reader.fill(entry.role, piece.hf_name, box, target.T)
            else:
                reader.fill(entry.role, piece.hf_name, common.rebase(piece.local_box, piece.hf_box), target)
