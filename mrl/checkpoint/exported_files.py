"""Reads the tensors of a Hugging Face folder as float32, whatever trainer wrote them, some rows at a time."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import ModelSpec, load_model_spec
from mrl.model.fp8 import bfloat16_bits
from mrl.model.hf_files import (
    FP8,
    INDEX,
    SINGLE,
    TensorBytes,
    read_index,
    read_safetensors_header,
    scale_of,
    weight_files,
)
from mrl.model.registry import inner_tensors
from mrl.model.weight_map import Inner
from mrl.plain_files import JSON_BYTES, open_regular, read_settings

Floats = NDArray[np.float32]
CHUNK = 1 << 22  # elements that are read at once
_READ = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "F64": np.dtype("<f8"), "BF16": np.dtype("<u2")}
READABLE = (*_READ, FP8)
_DTYPES = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class ExportedTensor:
    """Where a tensor's bytes lie."""

    file: Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    start: int
    # of a matrix that is stored turned: columns of the stored one, and the first of them; `start` is of that one
    turned: tuple[int, int] | None = None

    @property
    def rows(self) -> int:
        """The first axis; a vector is one row."""
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return prod(self.shape) // max(1, self.rows)


class ExportedFiles:
    """A folder's tensors by their names in a text model."""

    def __init__(self, folder: Path):
        """Raises ConfigError for an unsupported model, EnvironmentFault for files that are missing or damaged."""
        self.folder = folder
        self.model = _model(folder)
        if self.model.int4_group or self.model.is_mxfp4:
            kind = "numbers" if self.model.is_mxfp4 else "integers"
            raise ConfigError(
                f"{folder}: a checkpoint of 4-bit {kind}, which is not compared: write it in bfloat16 first (mrl "
                "convert hf-to-megatron, megatron-to-hf)"
            )
        self.tensors: dict[str, ExportedTensor] = {}
        self.faults: list[tuple[str, str]] = []  # tensor, what is wrong with its place
        self._last_turned: tuple[str, Floats] = ("", np.empty((0, 0), np.float32))
        self._files: dict[str, str] = {}  # stored key -> name of its file
        for file in weight_files(folder):
            for key, stored in read_safetensors_header(file).items():
                if key in self._files:
                    self.faults.append((key, f"is stored in {self._files[key]} and in {file.name}"))
                    continue
                self._files[key] = file.name
                item = (stored.stop - stored.start) // max(1, prod(stored.shape))
                for inner in inner_tensors(self.model, key, stored.shape):
                    self.tensors[inner.name] = _located(file, stored, inner, item)
        self._compare_index()

    def _compare_index(self) -> None:
        if not (self.folder / INDEX).exists():
            files = sorted(set(self._files.values()))
            if files and files != [SINGLE]:
                self.faults.append(("", f"{files[0]} without {INDEX}: transformers finds no weights; write the index"))
            return
        listed = read_index(self.folder / INDEX)
        for key, file in listed.items():
            if self._files.get(key) != file:
                self.faults.append((key, f"is not in {file}, where {INDEX} lists it"))
        for key in self._files.keys() - listed.keys():
            self.faults.append((key, f"is in {self._files[key]}, and {INDEX} does not list it"))

    @cached_property
    def says_dtype(self) -> bool:
        """Whether config.json says in which dtype the weights are stored."""
        config = read_settings(self.folder / "config.json", JSON_BYTES)
        inner = config.get("text_config")
        parts = (config, inner) if isinstance(inner, dict) else (config,)
        return self.model.fp8_block is not None or any(part.get(key) for part in parts for key in _DTYPES)

    @cached_property
    def scales(self) -> Mapping[str, ExportedTensor]:
        """The scales of FP8 matrices, by the matrix' name."""
        return {
            name: self.tensors[scale_of(name)]
            for name, tensor in self.tensors.items()
            if tensor.dtype == FP8 and scale_of(name) in self.tensors
        }

    def chunks(self, name: str, rows: int | None = None) -> Iterator[Floats]:
        """Yields a tensor's rows as float32 [rows, columns]. `rows`: of each chunk; None: about CHUNK elements."""
        tensor = self.tensors[name]
        step = rows or max(1, CHUNK // max(1, tensor.columns))
        with os.fdopen(open_regular(tensor.file), "rb", buffering=0) as stream:
            for first in range(0, tensor.rows, step):
                yield self._rows(stream.fileno(), name, first, min(step, tensor.rows - first))

    def some(self, name: str, rows: NDArray[np.int64]) -> Floats:
        """Returns the given rows."""
        with os.fdopen(open_regular(self.tensors[name].file), "rb", buffering=0) as stream:
            return np.concatenate([self._rows(stream.fileno(), name, int(row), 1) for row in rows])

    def _rows(self, file: int, name: str, first: int, count: int) -> Floats:
        tensor = self.tensors[name]
        if tensor.turned is not None:
            return self._turned(file, name)[first : first + count]
        if tensor.dtype == FP8:
            codes = _read(file, tensor, first, count, np.dtype(np.uint8))
            bits = bfloat16_bits(codes, self._scale(name), self.model.fp8_block, (first, 0))
        else:
            bits = _read(file, tensor, first, count, _READ[tensor.dtype])
        return _as_float32(bits)

    def _turned(self, file: int, name: str) -> Floats:
        """Returns a matrix whose rows are columns in the files. It is kept until another one is read."""
        if self._last_turned[0] != name:
            tensor = self.tensors[name]
            columns, column = tensor.turned
            whole = replace(tensor, shape=(tensor.columns, columns))
            bits = _read(file, whole, 0, whole.rows, _READ[tensor.dtype])[:, column : column + tensor.rows]
            self._last_turned = (name, np.ascontiguousarray(_as_float32(bits).T))
        return self._last_turned[1]

    def _scale(self, name: str) -> Floats:
        tensor = self.scales[name]
        with os.fdopen(open_regular(tensor.file), "rb", buffering=0) as stream:
            return _read(stream.fileno(), tensor, 0, tensor.rows, _READ[tensor.dtype]).astype(np.float32)


def _located(file: Path, stored: TensorBytes, inner: Inner, item: int) -> ExportedTensor:
    """Returns where a tensor of the model lies. `item`: bytes of an element."""
    if inner.is_turned:
        expert, column = inner.expert_and_column(stored.shape[-1])
        start = stored.start + expert * prod(stored.shape[1:]) * item
        return ExportedTensor(file, stored.dtype, inner.shape, start, (stored.shape[-1], column))
    start = stored.start + inner.first * prod(stored.shape[-1:]) * item
    return ExportedTensor(file, stored.dtype, inner.shape, start)


def _model(folder: Path) -> ModelSpec:
    try:
        return load_model_spec(folder)
    except (ConfigError, EnvironmentFault) as error:
        raise type(error)(str(error).removeprefix("model.path ")) from None


def _as_float32(bits: np.ndarray) -> Floats:
    if bits.dtype == np.uint16:  # bfloat16
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float32)


def _read(file: int, tensor: ExportedTensor, first: int, count: int, dtype: np.dtype) -> np.ndarray:
    out = np.empty((count, tensor.columns), dtype)
    view = memoryview(out.reshape(-1)).cast("B")
    at = tensor.start + first * tensor.columns * dtype.itemsize
    while view:
        read = os.preadv(file, [view], at)
        if read == 0:
            raise EnvironmentFault(f"{tensor.file} ended early: it is being changed, or was cut short")
        view = view[read:]
        at += read
    return out
