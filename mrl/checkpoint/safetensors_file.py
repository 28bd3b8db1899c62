"""A safetensors file (huggingface.co/docs/safetensors, "Format"): its dtypes, its header, and writing it block by
block.

Whoever writes, a rank or a conversion, gives the header and then the tensors' bytes in blocks: there is no second copy
of anything, and the digest is taken on the way. `mrl.model.hf_files` reads headers.
"""

import ctypes
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mrl.units import MIB

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}  # the format's dtypes
WRITEBACK_BYTES = 64 * MIB
_SYNC_FILE_RANGE_WRITE = 2


def safetensors_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The beginning of a file of `tensors` (name, dtype, shape, bytes), whose data follow in this order without gaps.

    Eight bytes with the length of the JSON, then the JSON, padded so that the data begin at a multiple of 8.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        begin, end = end, end + nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_blocks(path: Path, blocks: Iterable[bytes | memoryview], digest: bool, durable: bool) -> dict[str, Any]:
    """Writes `blocks` one after another; returns size and, with `digest`, SHA-256, as a manifest has them.

    `durable` waits until the disk has it all. Raises OSError as the disk does, and leaves what is written.
    """
    sha256, size, begun = hashlib.sha256(), 0, 0
    with path.open("wb", buffering=0) as out:
        for block in blocks:
            view = memoryview(block)
            if digest:
                sha256.update(view)
            _write_all(out, view)
            size += len(view)
            if size - begun >= WRITEBACK_BYTES:
                _begin_writeback(out.fileno(), begun, size - begun)
                begun = size
        _begin_writeback(out.fileno(), begun, size - begun)
        if durable:
            os.fsync(out.fileno())
    return {"bytes": size} | ({"sha256": sha256.hexdigest()} if digest else {})


def _write_all(out, block: memoryview) -> None:
    while block:  # an unbuffered write may take less than it is given
        block = block[out.write(block) :]


def _begin_writeback(handle: int, start: int, nbytes: int) -> None:
    """Lets the disk begin, so that a later fsync finds little left to do; Linux only, and no promise at all."""
    if _LIBC is not None and nbytes:
        _LIBC.sync_file_range(handle, ctypes.c_int64(start), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)


def _libc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "sync_file_range") else None


_LIBC = _libc()
