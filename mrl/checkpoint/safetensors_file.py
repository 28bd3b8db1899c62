"""A safetensors file (huggingface.co/docs/safetensors, "Format"): its dtypes, its header, and writing in blocks.

A writer, rank or conversion, passes the header and then the tensors' bytes in blocks. Nothing is copied twice, and the
digest is computed during writing. `mrl.model.hf_files` reads headers.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mrl.checkpoint.direct_file import DirectFile

# the format's dtypes
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}


def safetensors_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Returns the beginning of a file of `tensors` (name, dtype, shape, bytes), whose data follow in this order without
    gaps.

    Eight bytes with the length of the JSON, then the JSON, padded so that the data begin at a multiple of 8.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        begin = end
        end = end + nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_blocks(path: Path, blocks: Iterable[bytes | memoryview], digest: bool, durable: bool) -> dict[str, Any]:
    """Writes `blocks` one after another. Returns size and, with `digest`, SHA-256, in a manifest's form.

    `durable` waits until everything is on the disk. Raises OSError, and leaves what is written.
    """
    sha256 = hashlib.sha256()
    with DirectFile(path) as out:
        for block in blocks:
            if digest:
                sha256.update(block)
            out.write(block)
        out.finish(durable)
    return {"bytes": out.size} | ({"sha256": sha256.hexdigest()} if digest else {})
