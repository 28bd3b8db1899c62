"""Holds a source against its own digests, and a written checkpoint against its source: names, shapes, dtypes, every byte."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mrl.checkpoint.file_writer import tensor_blocks
from mrl.checkpoint.manifest import Entry, check_digest
from mrl.checkpoint.open_checkpoint import Checkpoint, Reader, code_of
from mrl.checkpoint.processes import Run
from mrl.errors import EnvironmentFault
from mrl.extras.torch_dist.read import Archives
from mrl.model import tensor_specs
from mrl.model.boxes import Box
from mrl.model.megatron_shards import Piece

BATCH_BYTES = 256 * 1024**2
_SHOWN = 5


@dataclass(frozen=True)
class Check:
    """One file to be read and held against what is known of it: its SHA-256, or the checksums of the archives in it."""

    folder: Path
    name: str
    facts: dict[str, Any] | None  # None: it has archives

    def __call__(self, readers: Sequence[Reader]) -> EnvironmentFault | int:
        """How many of its tensors carry no checksum; or what is wrong, not raised, so that it can be told from a disk that is full."""
        try:
            if self.facts is not None:
                check_digest(self.folder, self.name, {self.name: self.facts})
                return 0
            return readers[0].checkpoint.tensors.check_file(self.name)
        except EnvironmentFault as error:
            return error


def source_checks(source: Checkpoint) -> list[Check]:
    """Every byte of a checkpoint of ours, or of Megatron's, is what was written. Hugging Face checkpoints carry no digests."""
    if source.manifest is not None:
        return [Check(source.folder, name, facts) for name, facts in source.manifest.files().items()]
    if isinstance(source.tensors, Archives):
        return [Check(source.folder, name, None) for name in sorted({file for file, _ in source.tensors})]
    return []


def verify_output(run: Run, source: Checkpoint, written: Checkpoint, folder: Path, facts: dict[str, dict[str, Any]]) -> None:
    """Raises EnvironmentFault naming the first difference between `source` and `written` as it is on the disk now.

    The readers of `run` are of these two; `facts` is of the files that were written into `folder`.
    """
    roles = written.roles
    _same_descriptions(source, written, roles)
    checks = [Check((folder / name).parent, Path(name).name, fact) for name, fact in facts.items()]
    for _, result in run([*checks, *(Compare(tuple(batch)) for batch in _batches(source, roles))]):
        if isinstance(result, EnvironmentFault):
            raise result


def _same_descriptions(source: Checkpoint, written: Checkpoint, roles: tuple[str, ...]) -> None:
    """Both ways: what one has and the other has not. Opening a checkpoint has held its headers against its description."""
    for role in roles:
        here, there = _described(source, role), _described(written, role)
        if odd := sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name)):
            shown = "; ".join(f"{name}: {here.get(name)} became {there.get(name)}" for name in odd[:_SHOWN])
            raise EnvironmentFault(f"{written.folder}: {len(odd)} {role} tensors are not those of {source.folder}: {shown}")


def _described(checkpoint: Checkpoint, role: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Hugging Face name -> dtype and shape, the shape being the least that has room for all stored blocks."""
    corner: dict[str, tuple[int, ...]] = {}
    for piece in (p for entry in checkpoint.entries if entry.role == role for p in entry.pieces):
        stops = tuple(stop for _, stop in piece.hf_box.ranges)
        corner[piece.hf_name] = tuple(map(max, corner.get(piece.hf_name, stops), stops))
    return {name: (code_of(role, checkpoint.dtype), shape) for name, shape in corner.items()}


def _batches(source: Checkpoint, roles: tuple[str, ...]) -> Iterator[list[tuple[str, str, tuple[int, ...]]]]:
    """(role, name, shape) of all tensors, in portions of about BATCH_BYTES."""
    batch: list[tuple[str, str, tuple[int, ...]]] = []
    size = 0
    for role in roles:
        for spec in tensor_specs(source.model):
            batch.append((role, spec.name, spec.shape))
            size += prod(spec.shape) * 4
            if size > BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


@dataclass(frozen=True)
class Compare:
    """Some tensors (role, name, shape) to be read from both sides, put together in Hugging Face coordinates."""

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]

    def __call__(self, readers: Sequence[Reader]) -> EnvironmentFault | None:
        for tensor in self.tensors:
            if (error := _difference(*readers, *tensor)) is not None:
                return error
        return None


def _difference(source: Reader, written: Reader, role: str, name: str, shape: tuple[int, ...]) -> EnvironmentFault | None:
    whole = Box.whole(shape)
    entry = Entry("", name, role, shape, None, (Piece(name, whole, whole),))
    code = code_of(role, source.checkpoint.dtype)
    for (first, here), (_, there) in zip(tensor_blocks(source, entry, code), tensor_blocks(written, entry, code), strict=True):
        if not np.array_equal(here, there):
            row = first + int(np.argmax((here != there).reshape(len(here), -1).any(axis=1)))
            return EnvironmentFault(f"{written.checkpoint.folder}: {name} ({role}) differs from {source.checkpoint.folder} in row {row}")
    return None
