"""Compares a source with its own digests, and a written checkpoint with its source: names, shapes, dtypes, all bytes.

Tasks do the reading. They get readers of the source and of the output. They return damage instead of raising it, which
distinguishes it from a full disk, which is raised.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from mrl.checkpoint.manifest import FileFacts, StoredTensor, check_digest
from mrl.checkpoint.open_checkpoint import Checkpoint, code_of, of_role, whole_tensor
from mrl.checkpoint.planned_file import tensor_blocks
from mrl.checkpoint.stored_boxes import BoxReader
from mrl.errors import EnvironmentFault
from mrl.model import tensor_specs
from mrl.units import MIB

BATCH_BYTES = 256 * MIB
_SHOWN = 5


@dataclass(frozen=True)
class SourceFileCheck:
    """Reads one file of the source and compares it with the checksums of its own format."""

    file: str

    def __call__(self, readers: Sequence[BoxReader]) -> EnvironmentFault | int:
        """Returns how many of its tensors have no checksum, or the fault."""
        try:
            return readers[0].files.check(self.file)
        except EnvironmentFault as error:
            return error


@dataclass(frozen=True)
class WrittenFileCheck:
    """Reads one written file again and compares it with the digest that was computed during writing."""

    folder: Path
    name: str
    facts: FileFacts

    def __call__(self, readers: Sequence[BoxReader]) -> EnvironmentFault | None:
        try:
            check_digest(self.folder, self.name, self.facts)
        except EnvironmentFault as error:
            return error
        return None


def source_checks(source: Checkpoint, roles: Collection[str]) -> list[SourceFileCheck]:
    """Returns the checks of a checkpoint's files, without those that hold tensors of other `roles` alone.

    Hugging Face's carry no digests.
    """
    read = {entry.file for entry in source.entries if entry.role in roles}
    left = {entry.file for entry in source.entries} - read
    return [SourceFileCheck(file) for file in source.files.checkable() if file not in left]


def verification(
    source: Checkpoint, written: Checkpoint, folder: Path, facts: FileFacts
) -> list["WrittenFileCheck | CompareTensors"]:
    """Returns the tasks that compare `source` with `written`, as it is on disk now.

    `facts`: of the files that were written into `folder`. Raises EnvironmentFault if the descriptions already differ.
    """
    roles = written.roles
    _same_descriptions(source, written, roles)
    checks = [
        WrittenFileCheck((path := folder / name).parent, path.name, {path.name: of_file})
        for name, of_file in facts.items()
    ]
    return [*checks, *(CompareTensors(source.dtype, tuple(batch)) for batch in _batches(source, roles))]


def _same_descriptions(source: Checkpoint, written: Checkpoint, roles: tuple[str, ...]) -> None:
    """Checks that neither description has a tensor that the other lacks.

    Opening a checkpoint has compared its description with its headers.
    """
    for role in roles:
        of_source = _described(source, role)
        of_written = _described(written, role)
        if odd := sorted(
            name for name in of_source.keys() | of_written.keys() if of_source.get(name) != of_written.get(name)
        ):
            shown = "; ".join(f"{name}: {of_source.get(name)} became {of_written.get(name)}" for name in odd[:_SHOWN])
            raise EnvironmentFault(
                f"{written.folder}: {len(odd)} {role} tensors are not those of {source.folder}: {shown}"
            )


def _described(checkpoint: Checkpoint, role: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns Hugging Face name -> dtype and shape. The shape is the smallest that contains all stored blocks."""
    corner: dict[str, tuple[int, ...]] = {}
    for piece in (p for entry in checkpoint.entries if entry.role == role for p in entry.pieces):
        stops = tuple(stop for _, stop in piece.hf_box.ranges)
        corner[piece.hf_name] = tuple(map(max, corner.get(piece.hf_name, stops), stops))
    return {name: (code_of(role, checkpoint.dtype), shape) for name, shape in corner.items()}


def _batches(source: Checkpoint, roles: tuple[str, ...]) -> Iterator[list[StoredTensor]]:
    """Yields all tensors in portions of about BATCH_BYTES."""
    batch: list[StoredTensor] = []
    size = 0
    for tensor in (
        whole_tensor(spec.name, spec.shape, role=role)
        for role in roles
        for spec in of_role(tensor_specs(source.model), role)
    ):
        batch.append(tensor)
        size += prod(tensor.shape) * 4
        if size > BATCH_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


@dataclass(frozen=True)
class CompareTensors:
    """Reads some tensors from both sides and compares them in Hugging Face coordinates."""

    dtype: str  # of the weights
    tensors: tuple[StoredTensor, ...]

    def __call__(self, readers: Sequence[BoxReader]) -> EnvironmentFault | None:
        differences = (_difference(*readers, tensor, code_of(tensor.role, self.dtype)) for tensor in self.tensors)
        return next((error for error in differences if error is not None), None)


def _difference(source: BoxReader, written: BoxReader, tensor: StoredTensor, code: str) -> EnvironmentFault | None:
    blocks = zip(tensor_blocks(source, tensor, code), tensor_blocks(written, tensor, code), strict=True)
    for (first, source_rows), (_, written_rows) in blocks:
        if not np.array_equal(source_rows, written_rows):
            row = first + int(np.argmax((source_rows != written_rows).reshape(len(source_rows), -1).any(axis=1)))
            return EnvironmentFault(
                f"{written.folder}: {tensor.key} ({tensor.role}) differs from {source.folder} in row {row}"
            )
    return None
