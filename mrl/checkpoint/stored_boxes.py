"""Where the boxes of a checkpoint's tensors are stored, and the one reader of them: any box of any tensor.

A wanted box is intersected with every stored box in Hugging Face coordinates. Example: two tensor-parallel ranks stored
a [2, 6] tensor by columns. The second of three ranks needs its own columns. The left box is stored in two flat parts, A
and a, because the distributed optimizer splits a rank's tensor. The wanted elements are in both, and in b.

    stored          wanted
    A A A b b b     . . A b . .
    A a a b b b     . . a b . .

Bits are moved and never interpreted, so integers of an element's width stand for every dtype. Files are read with
`pread` into small buffers, because mapped pages would count as this process's memory.
"""

import os
from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np

from mrl.checkpoint.manifest import RankFiles, StoredTensor
from mrl.checkpoint.tensor_names import may_hold
from mrl.errors import EnvironmentFault
from mrl.model.boxes import Box, first_overlap
from mrl.model.fp8 import bfloat16_bits, nearest_bfloat16
from mrl.model.hf_files import TensorBytes, int4_scale_of, scale_of
from mrl.model.int4 import PACKED, bfloat16_as_float32, bfloat16_rows
from mrl.model.megatron_shards import Piece
from mrl.model.mxfp4 import BLOCKS, GROUP, mxfp4_rows
from mrl.model.mxfp4 import SCALES as OF_BLOCKS
from mrl.units import MIB

SCRATCH_BYTES = MIB


@dataclass(frozen=True)
class StoredBox:
    """A box of a Hugging Face tensor within a stored local tensor."""

    # the parts of the local tensor in flat order; shared by all its boxes, and extended when more parts are found
    parts: list[StoredTensor]
    piece: Piece


class Boxes:
    """The known boxes of a checkpoint's tensors, by role and Hugging Face name."""

    def __init__(self, entries: Iterable[StoredTensor] = ()):
        self.of_tensor: dict[tuple[str, str], list[StoredBox]] = {}
        # flat parts of one local tensor describe the same pieces
        self._parts: dict[tuple[str, tuple[Piece, ...]], list[StoredTensor]] = {}
        self.add(entries)

    def add(self, entries: Iterable[StoredTensor]) -> None:
        """Adds more stored tensors."""
        for entry in entries:
            parts = self._parts.get((entry.role, entry.pieces))
            if parts is not None:
                insort(parts, entry, key=_flat_range)
            elif entry.pieces:  # all others are padding
                parts = self._parts[entry.role, entry.pieces] = [entry]
                for piece in entry.pieces:
                    self.of_tensor.setdefault((entry.role, piece.hf_name), []).append(StoredBox(parts, piece))

    def met(self, role: str, name: str, box: Box) -> list[tuple[StoredBox, Box]]:
        """Returns the boxes of a tensor that overlap `box`, each with the overlap."""
        met = ((stored, stored.piece.hf_box.intersect(box)) for stored in self.of_tensor.get((role, name), ()))
        return [(stored, common) for stored, common in met if common is not None]

    def check_apart(self, folder: Path, entries: Iterable[StoredTensor]) -> None:
        """Checks that no element of the tensors in `entries` is known twice. Then counting elements tells what is
        missing.

        Raises EnvironmentFault that names the tensor.
        """
        tensors = {(entry.role, piece.hf_name) for entry in entries for piece in entry.pieces}
        for role, name in sorted(tensors):
            of_tensor = self.of_tensor[role, name]
            if len(of_tensor) > 1:
                _check_apart(folder, f"{name} ({role})", [stored.piece.hf_box for stored in of_tensor])
            for stored in of_tensor:
                _check_parts_apart(folder, stored.parts)

    def check_whole(self, folder: Path) -> None:
        """Checks that no element is known twice, and that all flat parts of every local tensor are known.

        Raises EnvironmentFault that names the tensor.
        """
        for (role, name), of_tensor in self.of_tensor.items():
            if len(of_tensor) > 1:
                _check_apart(folder, f"{name} ({role})", [stored.piece.hf_box for stored in of_tensor])
        for parts in self._parts.values():
            _check_parts_apart(folder, parts)
            if not _holds(parts, 0, prod(parts[0].shape)):
                raise _do_not_add_up(folder, parts)


class Descriptions:
    """The descriptions of a checkpoint's ranks. Each is read when one of its tensors is requested."""

    def __init__(self, folder: Path, ranks: Sequence[RankFiles], first: int):
        """`first` is the rank whose description most likely has what is requested."""
        self._folder = folder
        self._unread = [*ranks[first : first + 1], *ranks[:first], *ranks[first + 1 :]]

    @property
    def unread(self) -> int:
        """Number of descriptions that have not been read."""
        return len(self._unread)

    def next_with(self, name: str) -> tuple[StoredTensor, ...] | None:
        """Returns new entries, some of which may belong to a Hugging Face tensor; None if there are no more."""
        part = next((part for part in self._unread if may_hold(part.holds, name)), None)
        if part is None:
            return None
        self._unread.remove(part)
        return part.read_entries(self._folder)


class TensorFiles(Protocol):
    """The files of a checkpoint: where a stored tensor's bytes are, and whether they have changed."""

    def find(self, file: str, key: str) -> TensorBytes | None:
        """Returns a tensor's location; None if the file lacks it. Raises EnvironmentFault for a damaged file."""

    def checkable(self) -> tuple[str, ...]:
        """Returns the files with a digest or checksums."""

    def check(self, file: str) -> int:
        """Reads a whole file. Returns how many tensors have no checksum. Raises EnvironmentFault for changed bytes."""


_DAMAGED = "the checkpoint is damaged, choose another one"


def _check_apart(folder: Path, tensor: str, boxes: list[Box]) -> None:
    ranks = {len(box.ranges) for box in boxes}
    if 0 in ranks or len(ranks) > 1:
        raise EnvironmentFault(f"{folder}: the stored blocks of {tensor} are of ranks {sorted(ranks)}; {_DAMAGED}")
    if pair := first_overlap(boxes):
        raise EnvironmentFault(
            f"{folder}: {tensor} is stored twice, in {pair[0].ranges} and {pair[1].ranges}; {_DAMAGED}"
        )


def _check_parts_apart(folder: Path, parts: list[StoredTensor]) -> None:
    ranges = [_flat_range(part) for part in parts]
    inside = ranges[0][0] >= 0 and ranges[-1][1] <= prod(parts[0].shape)
    if not inside or any(stop > start for (_, stop), (start, _) in pairwise(ranges)):
        raise _do_not_add_up(folder, parts)


def _do_not_add_up(folder: Path, parts: list[StoredTensor]) -> EnvironmentFault:
    return EnvironmentFault(
        f"{folder}: {parts[0].key} is stored in parts that do not add up, {[_flat_range(part) for part in parts]}; a "
        f"rank's file is missing or {_DAMAGED}"
    )


def _holds(parts: Iterable[StoredTensor], begin: int, end: int) -> bool:
    """Tells whether flat parts, in order, contain all elements from `begin` to `end` of a local tensor."""
    for start, stop in map(_flat_range, parts):
        if start <= begin:
            begin = max(begin, stop)
    return begin >= end


def _is_whole(overlaps: list[tuple[StoredBox, Box]], box: Box) -> bool:
    """Tells whether all of `box` is stored, including the rows of every local tensor that contain it."""
    return sum(common.volume for _, common in overlaps) >= box.volume and all(
        _holds(stored.parts, *_run(stored, common)) for stored, common in overlaps
    )


def _run(stored: StoredBox, box: Box) -> tuple[int, int]:
    """Returns the flat range of a local tensor that is read for `box`: complete rows, or a part of one."""
    (first, last), *tail = _in_local(stored, box).ranges
    row = prod(stored.parts[0].shape[1:])
    if last - first == 1 and len(tail) == 1:
        return first * row + tail[0][0], first * row + tail[0][1]
    return first * row, last * row


def _is_run(box: Box, shape: Sequence[int]) -> bool:
    """Tells whether the elements of a box are contiguous in a tensor of that shape."""
    wide = next((dim for dim, size in enumerate(box.shape) if size > 1), len(shape))
    return box.shape[wide + 1 :] == tuple(shape[wide + 1 :])


def _in_local(stored: StoredBox, box: Box) -> Box:
    piece = stored.piece
    if piece.is_turned:
        return box.turned.rebase(piece.hf_box.turned, piece.local_box)
    return box.rebase(piece.hf_box, piece.local_box)


def _flat_range(part: StoredTensor) -> tuple[int, int]:
    return part.flat or (0, prod(part.shape))


class BoxReader:
    """Reads boxes from a checkpoint's files, which stay open until `close`."""

    def __init__(
        self, folder: Path, entries: Iterable[StoredTensor], files: TensorFiles, more: Descriptions | None = None
    ):
        """`more` has what `entries` lacks, and is read when something is missing."""
        self.folder = folder
        self.files = files
        self.boxes = Boxes(entries)
        self._more = more
        self._handles: dict[str, int] = {}
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8)
        self._last_turned: tuple[tuple[str, tuple[int, int]], np.ndarray] = (("", (0, 0)), np.empty(0))
        self.bytes_read = 0

    def close(self) -> None:
        """Closes the files."""
        while self._handles:
            os.close(self._handles.popitem()[1])

    def fill(self, role: str, name: str, box: Box, out: np.ndarray) -> None:
        """Writes `box` of a tensor into `out`, integers of the stored width in the box's shape.

        Raises what `overlaps` raises.
        """
        for stored, common in self.overlaps(role, name, box):
            self.read(stored, common, out[common.rebase(box, Box.whole(box.shape)).slices])

    def overlaps(self, role: str, name: str, box: Box) -> Iterator[tuple[StoredBox, Box]]:
        """Yields the stored boxes of a tensor that overlap `box`, each with the overlap.

        Raises EnvironmentFault if the checkpoint lacks part of it.
        """
        overlaps = self.boxes.met(role, name, box)
        while self._more is not None and not _is_whole(overlaps, box) and self._learn_more(name):
            overlaps = self.boxes.met(role, name, box)
        volume = sum(common.volume for _, common in overlaps)
        if volume != box.volume:
            raise EnvironmentFault(
                f"{self.folder}: holds {volume} of {box.volume} elements of {name} ({role}) at {box.origin}; "
                "it is damaged or of another model"
            )
        yield from overlaps

    def _learn_more(self, name: str) -> bool:
        """Reads another description. Returns False if there was none. Raises EnvironmentFault for an element stored
        twice.
        """
        entries = self._more.next_with(name)
        if entries is None:
            return False
        self.boxes.add(entries)
        self.boxes.check_apart(self.folder, entries)
        return True

    def dtype(self, stored: StoredBox) -> str:
        """Returns safetensors' name of the element type."""
        part = stored.parts[0]
        return self._location(part.file, part.key).dtype

    def read(self, stored: StoredBox, box: Box, out: np.ndarray) -> None:
        """Writes `box`, which is inside `stored`, into `out`.

        Complete rows, or a part of one row, are read directly. For parts of several rows, the rows are read and cut. A
        turned matrix is read whole, and kept until another one is read.
        """
        if stored.piece.is_turned:
            rows, columns = _in_local(stored, box).ranges
            first = stored.piece.local_box.origin[0]
            matrix = self._turned(stored, out.dtype)
            out[...] = matrix[rows[0] - first : rows[1] - first, columns[0] : columns[1]].T
            return None
        local = _in_local(stored, box)
        shape = stored.parts[0].shape
        if out.flags.c_contiguous and _is_run(local, shape):
            begin = int(np.ravel_multi_index(local.origin, shape))
            return self._read_run(stored.parts, begin, out.reshape(-1))
        (first, last), *tail = local.ranges
        columns = Box(tuple(tail))
        row = prod(shape[1:])
        row_bytes = row * out.itemsize
        step = max(1, len(self._scratch) // row_bytes)
        scratch = self._scratch if row_bytes <= len(self._scratch) else np.empty(row_bytes, np.uint8)
        for start in range(first, last, step):
            count = min(step, last - start)
            rows = scratch[: count * row_bytes].view(out.dtype).reshape(count, *shape[1:])
            self._read_run(stored.parts, start * row, rows.reshape(-1))
            out[start - first : start - first + count] = rows[(slice(None), *columns.slices)]
        return None

    def _turned(self, stored: StoredBox, dtype: np.dtype) -> np.ndarray:
        """Returns the complete rows of the stored tensor in which a turned piece lies."""
        part = stored.parts[0]
        rows = stored.piece.local_box.ranges[0]
        if self._last_turned[0] != (part.key, rows):
            found = np.empty((rows[1] - rows[0], *part.shape[1:]), dtype)
            self._read_run(stored.parts, rows[0] * prod(part.shape[1:]), found.reshape(-1))
            self._last_turned = ((part.key, rows), found)
        return self._last_turned[1]

    def tensor_bytes(self, file: str, key: str) -> np.ndarray:
        """Returns the bytes of a tensor outside the model, such as the state of a random generator."""
        location = self._location(file, key)
        out = np.empty(location.stop - location.start, np.uint8)
        self._read_bytes(file, location.start, memoryview(out))
        return out

    def _location(self, file: str, key: str) -> TensorBytes:
        location = self.files.find(file, key)
        if location is None:
            raise EnvironmentFault(f"{self.folder / file}: it has no {key}; {_DAMAGED}")
        return location

    def _part_location(self, parts: list[StoredTensor], part: StoredTensor, item_bytes: int) -> TensorBytes:
        """Raises EnvironmentFault for another size or dtype than described, because the following bytes belong to a
        neighbour.
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

    def _read_run(self, parts: list[StoredTensor], begin: int, out: np.ndarray) -> None:
        """Fills the flat `out` from element `begin` of a local tensor on."""
        end = begin + out.size
        read = 0
        for part in parts:
            low, high = _flat_range(part)
            start = max(begin, low)
            stop = min(end, high)
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
                view = view[count:]
                at = at + count
                self.bytes_read += count
        except OSError as error:
            raise EnvironmentFault(
                f"{self.folder / file} cannot be read ({error.strerror}); the disk may be damaged"
            ) from error


class RoundingReader(BoxReader):
    """Rounds some float32 tensors to the nearest bfloat16. Reads others unchanged."""

    def __init__(self, folder: Path, entries: Iterable[StoredTensor], files: TensorFiles, rounded: Collection[str]):
        """`rounded`: keys of the float32 tensors, which are small."""
        super().__init__(folder, entries, files)
        self._rounded = rounded

    def read(self, stored: StoredBox, box: Box, out: np.ndarray) -> None:
        """Writes `box` into `out`, whose elements have 16 bits."""
        if stored.parts[0].key not in self._rounded:
            return super().read(stored, box, out)
        precise = np.empty(box.shape, np.float32)
        super().read(stored, box, precise)
        out[...] = nearest_bfloat16(precise)
        return None


class Fp8Reader(RoundingReader):
    """Reads FP8 matrices as bfloat16, some rows at a time, and other tensors as its base does."""

    def __init__(
        self,
        folder: Path,
        entries: Iterable[StoredTensor],
        files: TensorFiles,
        scales: Mapping[str, str],
        block: tuple[int, int],
        rounded: Collection[str] = (),
    ):
        """`scales`: for each FP8 matrix, the file with its scales. `block`: rows and columns of a scale's block."""
        super().__init__(folder, entries, files, rounded)
        self._files_of_scales = scales
        self._block = block
        self._last = ("", np.empty((0, 0), np.float32))  # the matrix that was read last, and its scales

    def read(self, stored: StoredBox, box: Box, out: np.ndarray) -> None:
        """Writes `box` into `out`, whose elements have 16 bits."""
        name = stored.parts[0].key
        if name not in self._files_of_scales:
            return super().read(stored, box, out)
        scales = self._scales(name)
        (first, last), columns = box.ranges
        step = max(1, SCRATCH_BYTES // (columns[1] - columns[0]))
        for start in range(first, last, step):
            rows = Box(((start, min(start + step, last)), columns))
            codes = np.empty(rows.shape, np.uint8)
            super().read(stored, rows, codes)
            out[start - first :][: len(codes)] = bfloat16_bits(codes, scales, self._block, rows.origin)
        return None

    def _scales(self, name: str) -> np.ndarray:
        if self._last[0] != name:
            file = self._files_of_scales[name]
            key = scale_of(name)
            flat = self.tensor_bytes(file, key).view("<f4")
            self._last = (name, flat.reshape(self._location(file, key).shape))
        return self._last[1]


class Int4Reader(BoxReader):
    """Reads matrices of 4-bit integers as bfloat16, some rows at a time, and other tensors unchanged."""

    def __init__(self, folder: Path, entries: Iterable[StoredTensor], files: TensorFiles, scales: Mapping[str, str]):
        """`scales`: for the key of each packed matrix, the file with its scales."""
        super().__init__(folder, entries, files)
        self._files_of_scales = scales
        self._last = ("", np.empty((0, 0), np.float32))  # the matrix that was read last, and its scales

    def read(self, stored: StoredBox, box: Box, out: np.ndarray) -> None:
        """Writes `box` into `out`, whose elements have 16 bits."""
        part = stored.parts[0]
        if part.key not in self._files_of_scales:
            return super().read(stored, box, out)
        scales = self._scales(part.key)
        begin = self._location(part.file, part.key).start
        row_bytes = part.shape[1] // 2
        (first, last), columns = box.ranges
        step = max(1, SCRATCH_BYTES // row_bytes)
        for start in range(first, last, step):
            stop = min(start + step, last)
            packed = np.empty((stop - start, row_bytes), np.uint8)
            self._read_bytes(part.file, begin + start * row_bytes, memoryview(packed).cast("B"))
            out[start - first : stop - first] = bfloat16_rows(packed, scales[start:stop])[:, slice(*columns)]
        return None

    def _scales(self, key: str) -> np.ndarray:
        if self._last[0] != key:
            file = self._files_of_scales[key]
            name = int4_scale_of(key.removesuffix(PACKED))
            bits = self.tensor_bytes(file, name).view("<u2")
            self._last = (key, bfloat16_as_float32(bits).reshape(self._location(file, name).shape))
        return self._last[1]


class Mxfp4Reader(BoxReader):
    """Reads matrices of 4-bit floating-point numbers as bfloat16, some rows at a time, and other tensors unchanged."""

    def __init__(self, folder: Path, entries: Iterable[StoredTensor], files: TensorFiles, scales: Mapping[str, str]):
        """`scales`: for the key of the blocks of each matrix, the file with its scales."""
        super().__init__(folder, entries, files)
        self._files_of_scales = scales

    def read(self, stored: StoredBox, box: Box, out: np.ndarray) -> None:
        """Writes `box` into `out`, whose elements have 16 bits."""
        part = stored.parts[0]
        if part.key not in self._files_of_scales:
            return super().read(stored, box, out)
        (first, last), columns = _in_local(stored, box).ranges
        width = part.shape[1]
        step = max(1, SCRATCH_BYTES // width)
        for start in range(first, last, step):
            stop = min(start + step, last)
            blocks = self._bytes(part.file, part.key, start, stop, width // 2)
            scales = part.key.removesuffix(BLOCKS) + OF_BLOCKS
            powers = self._bytes(self._files_of_scales[part.key], scales, start, stop, width // GROUP)
            out[start - first : stop - first] = mxfp4_rows(blocks, powers)[:, slice(*columns)]
        return None

    def _bytes(self, file: str, key: str, start: int, stop: int, row: int) -> np.ndarray:
        """Returns rows of `row` bytes of a tensor."""
        found = np.empty((stop - start, row), np.uint8)
        self._read_bytes(file, self._location(file, key).start + start * row, memoryview(found).cast("B"))
        return found
