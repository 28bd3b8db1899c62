"""The layers that predict further tokens, where training leaves them as they are: carried from file to file.

Where they are trained along (actor.mtp.train) they are among the model's weights, and only names of copies are here. A
checkpoint of mrl has them in a file beside the model's configuration, with its digest in the manifest. An export has
the same tensors, byte for byte, except copies of the embedding and of the output layer (GLM-4.5, DeepSeek-V3). These
are written from the trained ones. FP8 matrices become bfloat16 when they are first written, as the model's own do.

    model.path                          step-N/hf/model-drafts.safetensors       export
    model.layers.61.eh_proj.weight      the same bytes                           the same bytes
    model.layers.61.embed_tokens.weight its name, in the metadata                model.embed_tokens.weight, trained
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from mrl.checkpoint.manifest import WEIGHT, FileFacts
from mrl.checkpoint.open_checkpoint import Checkpoint, code_of, whole_tensor
from mrl.checkpoint.planned_file import BLOCK_BYTES, entry_bytes, tensor_blocks
from mrl.checkpoint.safetensors_file import safetensors_header, write_blocks
from mrl.errors import EnvironmentFault
from mrl.model import ModelSpec, tensor_specs
from mrl.model.draft_names import copied_tensor, is_drafting
from mrl.model.fp8 import bfloat16_bits
from mrl.model.hf_files import (
    FP8,
    TensorBytes,
    has_weights,
    read_safetensors_header,
    safetensors_metadata,
    same_bytes,
    scale_of,
    weight_files,
)
from mrl.plain_files import open_regular

FILE = "model-drafts.safetensors"
_COPIES = "copies"  # metadata of the file: names of tensors that are copies of the model's, as JSON

FileTensor = tuple[Path, TensorBytes]


@dataclass(frozen=True)
class DraftLayers:
    """The predicting layers in a folder."""

    own: dict[str, FileTensor] = field(default_factory=dict)  # wider elements first, so that each tensor is aligned
    copies: tuple[str, ...] = ()  # names of copies of the model's embedding and output layer
    differing: tuple[str, ...] = ()  # of `own`: named like a copy, with other bytes than the model's tensor
    scales: Mapping[str, FileTensor] = field(default_factory=dict)  # of the FP8 matrices in `own`
    fp8_block: tuple[int, int] | None = None

    def __bool__(self) -> bool:
        return bool(self.own or self.copies)

    @property
    def names(self) -> list[str]:
        """Names of all tensors that an export has."""
        return [*self.own, *self.copies]

    @property
    def own_bytes(self) -> int:
        """Bytes of the tensors without copies, when they are written."""
        return sum(nbytes for *_, nbytes in self._described())

    def _described(self) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        for name, (_, tensor) in self.own.items():
            if name in self.scales:
                yield name, "BF16", tensor.shape, 2 * prod(tensor.shape)
            else:
                yield name, tensor.dtype, tensor.shape, tensor.stop - tensor.start

    def _own_blocks(self) -> Iterator[bytes]:
        for name, (file, tensor) in self.own.items():
            if name in self.scales:
                yield from self._as_bfloat16(name)
            else:
                yield from _bytes_of(file, tensor)

    def _as_bfloat16(self, name: str) -> Iterator[bytes]:
        _, matrix = self.own[name]
        file, scale = self.scales[name]
        scales = np.frombuffer(b"".join(_bytes_of(file, scale)), "<f4").reshape(scale.shape)
        rows, columns = matrix.shape
        step = max(1, BLOCK_BYTES // columns)
        with os.fdopen(open_regular(self.own[name][0]), "rb") as stream:
            stream.seek(matrix.start)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                codes = np.frombuffer(_read(stream, count * columns), np.uint8).reshape(count, columns)
                yield bfloat16_bits(codes, scales, self.fp8_block, (first, 0)).tobytes()


def draft_layers(folder: Path, model: ModelSpec) -> DraftLayers:
    """Returns the predicting layers in a folder of Hugging Face files, or beside the configuration of a checkpoint.

    There are none in 4-bit checkpoints, whose matrices are not written again as they are. Raises EnvironmentFault for
    files that are damaged.
    """
    if model.int4_group or not has_weights(folder):
        return DraftLayers()
    files = weight_files(folder)
    tensors: dict[str, FileTensor] = {}
    originals: dict[str, FileTensor] = {}
    for file in files:
        for name, tensor in read_safetensors_header(file).items():
            if is_drafting(name, model):
                tensors[name] = (file, tensor)
            else:
                originals[name] = (file, tensor)
    named = [name for name in tensors if copied_tensor(name) in originals]
    copies = tuple(sorted(name for name in named if same_bytes(tensors[name], originals[copied_tensor(name)])))
    scales = {
        name: tensors[scale_of(name)]
        for name, (_, t) in tensors.items()
        if t.dtype == FP8 and scale_of(name) in tensors
    }
    left = {*copies, *map(scale_of, scales)}
    own = {name: tensors[name] for name in sorted(tensors.keys() - left, key=lambda n: (-_width(tensors[n][1]), n))}
    differing = tuple(sorted(set(named) - set(copies)))
    recorded = safetensors_metadata(folder / FILE).get(_COPIES) if (folder / FILE).is_file() else None
    if recorded is not None:
        copies = tuple(json.loads(recorded))
    return DraftLayers(own, copies, differing, scales, model.fp8_block)


def keep(layers: DraftLayers, folder: Path) -> FileFacts:
    """Writes the layers beside a checkpoint's configuration, durably. Returns size and digest of the file."""
    metadata = {"format": "pt", _COPIES: json.dumps(layers.copies)}

    def blocks() -> Iterator[bytes]:
        yield safetensors_header(layers._described(), metadata)
        yield from layers._own_blocks()

    return {FILE: write_blocks(folder / FILE, blocks(), digest=True, durable=True)}


def export(layers: DraftLayers, source: Checkpoint, folder: Path) -> FileFacts:
    """Writes the layers into a folder of Hugging Face files, with copies of the trained tensors of `source`.

    Returns size and digest of the file.
    """
    shapes = {spec.name: spec.shape for spec in tensor_specs(source.model)}
    entries = {
        name: whole_tensor(original, shapes[original]) for name in layers.copies if (original := copied_tensor(name))
    }
    code = code_of(WEIGHT, source.dtype)

    def blocks() -> Iterator[bytes | memoryview]:
        described = [(name, code, entry.shape, entry_bytes(entry, source.dtype)) for name, entry in entries.items()]
        yield safetensors_header([*layers._described(), *described], {"format": "pt"})
        yield from layers._own_blocks()
        reader = source.reader()
        try:
            for entry in entries.values():
                for _, block in tensor_blocks(reader, entry, code):
                    yield memoryview(block.reshape(-1)).cast("B")
        finally:
            reader.close()

    return {FILE: write_blocks(folder / FILE, blocks(), digest=True, durable=True)}


def _width(tensor: TensorBytes) -> float:
    """Returns the bytes of an element."""
    return (tensor.stop - tensor.start) / max(1, prod(tensor.shape))


def _bytes_of(file: Path, tensor: TensorBytes) -> Iterator[bytes]:
    with os.fdopen(open_regular(file), "rb") as stream:
        stream.seek(tensor.start)
        left = tensor.stop - tensor.start
        while left:
            yield _read(stream, min(left, BLOCK_BYTES))
            left -= min(left, BLOCK_BYTES)


def _read(stream, count: int) -> bytes:
    block = stream.read(count)
    if len(block) != count:
        raise EnvironmentFault(f"{stream.name} ended early: it is being changed, or was cut short")
    return block
