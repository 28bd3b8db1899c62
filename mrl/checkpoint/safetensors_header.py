"""The beginning of a safetensors file (huggingface.co/docs/safetensors, "Format"): eight bytes with the header's length, then JSON."""

import json
from collections.abc import Iterable, Mapping
from typing import Any


def safetensors_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header of `tensors` (name, dtype as the format names it, shape, bytes), whose data follow in this order without gaps.

    It is padded so that the data begin at a multiple of 8.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        begin, end = end, end + nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
