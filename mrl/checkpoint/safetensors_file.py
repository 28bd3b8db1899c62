"""Writes a safetensors file piece by piece from host memory: durable, its digest on the way, and no second copy of anything."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mrl.checkpoint.safetensors_header import safetensors_header

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_PIECE = 16 * 1024**2  # bytes a write; the interpreter is free for others during each


def file_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Size of the file that `write_tensors` makes of `tensors`."""
    return len(_header(tensors)) + sum(t.nbytes for t in tensors.values())


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Writes contiguous host tensors, fsynced; returns the file's size and SHA-256 as `mrl.checkpoint.manifest.file_facts` has them.

    Raises OSError as the disk does, and KeyError for a dtype that the format does not name here.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for piece in _pieces(tensors):
            view = memoryview(piece)
            digest.update(view)
            while view:  # an unbuffered write may take less than it is given
                view = view[file.write(view) :]
            size += len(piece)
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    yield _header(tensors)
    for name in _order(tensors):
        data = memoryview(tensors[name].reshape(-1).view(torch.uint8).numpy())
        yield from (data[start : start + _PIECE] for start in range(0, len(data), _PIECE))


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    return safetensors_header((n, _NAMES[t.dtype], tuple(t.shape), t.nbytes) for n, t in ((n, tensors[n]) for n in _order(tensors)))


def _order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Wide elements first, so that every tensor is aligned to its own element."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
