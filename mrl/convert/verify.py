"""Holds a written checkpoint against its source: names, shapes, dtypes, every byte, and the digest of every file as it is on the disk."""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mrl.convert.plan import PlannedFile
from mrl.convert.processes import in_parallel
from mrl.convert.source import Checkpoint, Reader, code_of, open_checkpoint
from mrl.convert.writer import tensor_blocks
from mrl.errors import EnvironmentFault
from mrl.models import tensor_specs
from mrl.reshard.boxes import Box
from mrl.reshard.manifest import Entry, check_digest
from mrl.reshard.source import Piece

BATCH_BYTES = 256 * 1024**2
_SHOWN = 5


def check_files(folder: Path, facts: dict[str, dict[str, Any]], workers: int) -> None:
    """Reads every file that `facts` names. Raises EnvironmentFault naming one whose size or SHA-256 is another."""
    for _ in in_parallel(_digest_of, (), [(folder, name, {name: facts[name]}) for name in facts], workers):
        pass


def verify_output(source: Checkpoint, folder: Path, files: tuple[PlannedFile, ...], facts: dict[str, dict[str, Any]], workers: int) -> None:
    """Raises EnvironmentFault naming the first difference between `source` and what is in `folder` now."""
    check_files(folder, facts, workers)
    written = open_checkpoint(folder)
    roles = tuple(dict.fromkeys(entry.role for file in files for entry in file.entries))
    _same_descriptions(source, written, roles)
    for _ in in_parallel(_same_bytes, (source.folder, folder), list(_batches(source, roles)), workers):
        pass


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


def _digest_of(_, task: tuple[Path, str, dict[str, Any]]) -> None:
    check_digest(*task)


def _same_bytes(readers: list[Reader], task: list[tuple[str, str, tuple[int, ...]]]) -> None:
    """Both sides of each tensor in turn, put together in Hugging Face coordinates."""
    source, written = readers
    for role, name, shape in task:
        whole = Box.whole(shape)
        entry = Entry("", name, role, shape, None, (Piece(name, whole, whole),))
        code = code_of(role, source.checkpoint.dtype)
        pairs = zip(tensor_blocks(source, entry, code), tensor_blocks(written, entry, code), strict=True)
        for (first, here), (_, there) in pairs:
            if not np.array_equal(here, there):
                row = first + int(np.argmax((here != there).reshape(len(here), -1).any(axis=1)))
                raise EnvironmentFault(f"{written.checkpoint.folder}: {name} ({role}) differs from {source.checkpoint.folder} in row {row}")
