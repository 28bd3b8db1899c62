"""Writes one planned safetensors file block by block, durably, and takes its digest on the way."""

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mrl.convert.plan import PlannedFile, entry_bytes
from mrl.convert.source import Reader, code_of, word_type
from mrl.errors import EnvironmentFault
from mrl.reshard.boxes import Box
from mrl.reshard.manifest import Entry

BLOCK_BYTES = 4 * 1024**2  # stays in the processor's cache between reading, hashing and writing


def header_of(file: PlannedFile, dtype: str) -> bytes:
    """The first bytes of the file: length and JSON, padded so that the data begin at a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in file.entries:
        end = at + entry_bytes(entry, dtype)
        header[entry.key] = {"dtype": code_of(entry.role, dtype), "shape": entry.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_bytes(file: PlannedFile, dtype: str) -> int:
    """Bytes of the finished file."""
    return len(header_of(file, dtype)) + sum(entry_bytes(entry, dtype) for entry in file.entries)


def write_file(reader: Reader, folder: Path, file: PlannedFile, digests: bool) -> dict[str, Any]:
    """Writes `folder/NAME.part`, renames it when it is on the disk, and returns its size and, with `digests`, its SHA-256.

    Raises EnvironmentFault when the disk is full or fails.
    """
    part, digest, size = folder / f"{file.name}.part", hashlib.sha256(), 0
    try:
        with part.open("wb", buffering=0) as out:
            for block in _blocks(reader, file):
                if digests:
                    digest.update(block)
                size += len(block)
                _write_all(out, block)
            os.fsync(out.fileno())
    except OSError as error:
        part.unlink(missing_ok=True)
        cure = "free some and run the same command again: finished files are kept" if error.errno == errno.ENOSPC else "check the disk"
        raise EnvironmentFault(f"{part} cannot be written ({error.strerror}); {cure}") from error
    part.rename(folder / file.name)
    return {"bytes": size} | ({"sha256": digest.hexdigest()} if digests else {})


def _write_all(out, block: memoryview) -> None:
    while block:
        block = block[out.write(block) :]


def _blocks(reader: Reader, file: PlannedFile) -> Iterator[memoryview]:
    dtype = reader.checkpoint.dtype
    yield memoryview(header_of(file, dtype))
    for entry in file.entries:
        for _, block in tensor_blocks(reader, entry, code_of(entry.role, dtype)):
            yield memoryview(block.reshape(-1)).cast("B")


def tensor_blocks(reader: Reader, entry: Entry, code: str) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of a local tensor, some megabytes at a time; a block is valid until the next is asked for.

    Elements under no piece are vocabulary padding and are zero.
    """
    words, (rows, *tail) = word_type(code), entry.shape
    step = max(1, BLOCK_BYTES // (prod(tail) * words.itemsize))
    padded = sum(piece.local_box.volume for piece in entry.pieces) != prod(entry.shape)
    buffer = np.empty((min(step, rows), *tail), words)
    for first in range(0, rows, step):
        block = buffer[: min(step, rows - first)]
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
