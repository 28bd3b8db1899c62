"""Which boxes of a checkpoint's tensors are stored where, and the one reader of them: any box of any tensor.

A wanted box is cut with every stored box in Hugging Face coordinates. Here two tensor-parallel ranks stored a [2, 6]
tensor by columns, and the second of three ranks wants its own. The left box is stored in two flat parts, A and a, as
the distributed optimizer cuts a rank's tensor over data parallelism; the wanted elements are in both, and in b.

    stored          wanted
    A A A b b b     . . A b . .
    A a a b b b     . . a b . .

Bits are moved and never interpreted, so integers of an element's width stand for every dtype. Files are read with
`pread` into small buffers: mapped pages would count as this process's memory.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np

from mrl.checkpoint.manifest import StoredTensor
from mrl.errors import EnvironmentFault
from mrl.model.boxes import Box, first_overlap
from mrl.model.hf_files import TensorBytes
from mrl.model.megatron_shards import Piece
from mrl.units import MIB

SCRATCH_BYTES = MIB


@dataclass(frozen=True)
class StoredBox:
    """A box of a Hugging Face tensor within a stored local tensor."""

    # that make up the local tensor, in flat order; the tuple is shared by all its boxes
    parts: tuple[StoredTensor, ...]
    piece: Piece


Boxes = Mapping[tuple[str, str], list[StoredBox]]  # by role and Hugging Face name


class TensorFiles(Protocol):
    """The files of a checkpoint: where a stored tensor's bytes are, and whether they are those that were written."""

    def find(self, file: str, key: str) -> TensorBytes | None:
        """Where a tensor is; None where the file does not have it. Raises EnvironmentFault for a damaged file."""

    def checkable(self) -> tuple[str, ...]:
        """The files with a digest, or with checksums."""

    def check(self, file: str) -> int:
        """Reads all of one; returns how many of its tensors have no checksum. EnvironmentFault for changed bytes."""


def stored_boxes(entries: Iterable[StoredTensor]) -> Boxes:
    """What a checkpoint holds of each tensor."""
    parts: dict[tuple, list[StoredTensor]] = defaultdict(list)
    for entry in entries:
        parts[entry.role, entry.pieces].append(entry)  # flat parts of one local tensor describe the same pieces
    boxes: dict[tuple[str, str], list[StoredBox]] = defaultdict(list)
    for (role, pieces), unordered in parts.items():
        ordered = tuple(sorted(unordered, key=lambda entry: entry.flat or (0, 0)))
        for piece in pieces:
            boxes[role, piece.hf_name].append(StoredBox(ordered, piece))
    return dict(boxes)


def check_disjoint(folder: Path, boxes: Boxes) -> None:
    """No element is stored twice, of a tensor or of flat parts: then counting elements tells what is missing.

    Raises EnvironmentFault naming the tensor.
    """
    for (role, name), of_tensor in boxes.items():
        if len(of_tensor) > 1:
            _check_apart(folder, f"{name} ({role})", [box.piece.hf_box for box in of_tensor])
    for parts in {id(box.parts): box.parts for of_tensor in boxes.values() for box in of_tensor}.values():
        _check_add_up(folder, parts)


_DAMAGED = "the checkpoint is damaged, choose another one"


def _check_apart(folder: Path, tensor: str, boxes: list[Box]) -> None:
    ranks = {len(box.ranges) for box in boxes}
    if 0 in ranks or len(ranks) > 1:
        raise EnvironmentFault(f"{folder}: the stored blocks of {tensor} are of ranks {sorted(ranks)}; {_DAMAGED}")
    if pair := first_overlap(boxes):
        raise EnvironmentFault(
            f"{folder}: {tensor} is stored twice, in {pair[0].ranges} and {pair[1].ranges}; {_DAMAGED}"
        )


def _check_add_up(folder: Path, parts: tuple[StoredTensor, ...]) -> None:
    ranges = [_flat_range(part) for part in parts]
    ends = [0, *(stop for _, stop in ranges)]
    if [start for start, _ in ranges] != ends[:-1] or ends[-1] != prod(parts[0].shape):
        raise EnvironmentFault(
            f"{folder}: {parts[0].key} is stored in parts that do not add up, {ranges}; a rank's file "
            f"is missing or {_DAMAGED}"
        )


def _flat_range(part: StoredTensor) -> tuple[int, int]:
    return part.flat or (0, prod(part.shape))


class BoxReader:
    """Reads boxes out of a checkpoint's files, which stay open until `close`."""

    def __init__(self, folder: Path, entries: Iterable[StoredTensor], files: TensorFiles):
        self.folder, self.files = folder, files
        self.boxes = stored_boxes(entries)
        self._handles: dict[str, int] = {}
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8)
        self.bytes_read = 0

    def close(self) -> None:
        """Closes the files."""
        while self._handles:
            os.close(self._handles.popitem()[1])

    def fill(self, role: str, name: str, box: Box, out: np.ndarray) -> None:
        """Writes `box` of a tensor into `out`, integers of the stored width in the box's shape.

        Raises as `overlaps`.
        """
        for stored, common in self.overlaps(role, name, box):
            self.read(stored, common, out[common.rebase(box, Box.whole(box.shape)).slices])

    def overlaps(self, role: str, name: str, box: Box) -> Iterator[tuple[StoredBox, Box]]:
        """The stored boxes of a tensor that meet `box`, each with what both have.

        Raises EnvironmentFault when the checkpoint does not hold all of it.
        """
        met = [(stored, stored.piece.hf_box.intersect(box)) for stored in self.boxes.get((role, name), ())]
        overlaps = [(stored, common) for stored, common in met if common is not None]
        volume = sum(common.volume for _, common in overlaps)
        if volume != box.volume:
            raise EnvironmentFault(
                f"{self.folder}: holds {volume} of {box.volume} elements of {name} ({role}) at {box.origin}; "
                "it is damaged or of another model"
            )
        yield from overlaps

    def dtype(self, stored: StoredBox) -> str:
        """As safetensors names it."""
        part = stored.parts[0]
        return self._location(part.file, part.key).dtype

    def read(self, stored: StoredBox, box: Box, out: np.ndarray) -> None:
        """Writes `box`, which lies in `stored`, into `out`. Whole rows, and a part of one, are read at once; of several
        rows all is read and cut.
        """
        (first, last), *tail = box.rebase(stored.piece.hf_box, stored.piece.local_box).ranges
        columns, shape = Box(tuple(tail)), stored.parts[0].shape
        row = prod(shape[1:])
        if out.flags.c_contiguous:
            if columns == Box.whole(shape[1:]):
                return self._read_run(stored.parts, first * row, out.reshape(-1))
            if len(tail) == 1 and last - first == 1:
                return self._read_run(stored.parts, first * row + columns.origin[0], out.reshape(-1))
        row_bytes = row * out.itemsize
        step = max(1, len(self._scratch) // row_bytes)
        scratch = self._scratch if row_bytes <= len(self._scratch) else np.empty(row_bytes, np.uint8)
        for start in range(first, last, step):
            count = min(step, last - start)
            rows = scratch[: count * row_bytes].view(out.dtype).reshape(count, *shape[1:])
            self._read_run(stored.parts, start * row, rows.reshape(-1))
            out[start - first : start - first + count] = rows[(slice(None), *columns.slices)]
        return None

    def tensor_bytes(self, file: str, key: str) -> np.ndarray:
        """The bytes of one tensor of a file that is no part of the model, such as the state of a random generator."""
        location = self._location(file, key)
        out = np.empty(location.stop - location.start, np.uint8)
        self._read_bytes(file, location.start, memoryview(out))
        return out

    def _location(self, file: str, key: str) -> TensorBytes:
        location = self.files.find(file, key)
        if location is None:
            raise EnvironmentFault(f"{self.folder / file}: it has no {key}; {_DAMAGED}")
        return location

    def _part_location(self, parts: tuple[StoredTensor, ...], part: StoredTensor, item_bytes: int) -> TensorBytes:
        """Raises EnvironmentFault where the file has another size or dtype than described:
        the bytes behind it are a neighbour's.
        """
        location, (low, high) = self._location(part.file, part.key), _flat_range(part)
        described = (self._location(parts[0].file, parts[0].key).dtype, (high - low) * item_bytes)
        if (location.dtype, location.stop - location.start) != described:
            raise EnvironmentFault(
                f"{self.folder / part.file}: {part.key} is described as {described[0]} of {described[1]} bytes and the "
                f"file has {location.dtype} of {location.stop - location.start}; manifest and file do not belong "
                "together, choose another checkpoint"
            )
        return location

    def _read_run(self, parts: tuple[StoredTensor, ...], begin: int, out: np.ndarray) -> None:
        """Fills the flat `out` from element `begin` of a local tensor on."""
        end, read = begin + out.size, 0
        for part in parts:
            low, high = _flat_range(part)
            start, stop = max(begin, low), min(end, high)
            if start < stop:
                at = self._part_location(parts, part, out.itemsize).start + (start - low) * out.itemsize
                self._read_bytes(part.file, at, memoryview(out[start - begin : stop - begin]).cast("B"))
                read += stop - start
        if read != out.size:
            raise EnvironmentFault(
                f"{self.folder}: {parts[0].key} is stored in parts that do not add up; a rank's file is missing"
            )

    def _read_bytes(self, file: str, at: int, view: memoryview) -> None:
        if file not in self._handles:
            self._handles[file] = os.open(self.folder / file, os.O_RDONLY)
        try:
            while view:
                count = os.preadv(self._handles[file], [view], at)
                if count == 0:
                    raise EnvironmentFault(f"{self.folder / file} ended early: it is being changed, or was cut short")
                view, at = view[count:], at + count
                self.bytes_read += count
        except OSError as error:
            raise EnvironmentFault(
                f"{self.folder / file} cannot be read ({error.strerror}); the disk may be damaged"
            ) from error
