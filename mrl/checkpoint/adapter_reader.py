"""Reads a Hugging Face checkpoint with adapters merged into its weights, bit for bit as ranks send them to engines."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mrl.checkpoint.manifest import WEIGHT, FileFacts, Manifest, StoredTensor, check_files
from mrl.checkpoint.safetensors_file import ITEM_BYTES
from mrl.checkpoint.stored_boxes import BoxReader, StoredBox, TensorFiles
from mrl.errors import EnvironmentFault
from mrl.model import ModelSpec
from mrl.model.adapters import FIRST, SECOND, Lora, adapter_shapes, add_factors, factor_name, target_of, tiles
from mrl.model.boxes import Box
from mrl.model.fp8 import nearest_bfloat16

_TILE = 1 << 16  # elements that are merged together
_THREADS = 4


@dataclass(frozen=True)
class StoredAdapters:
    """The adapters in an mrl checkpoint."""

    folder: Path
    entries: tuple[StoredTensor, ...]
    files: TensorFiles
    model: ModelSpec
    lora: Lora
    dtype: str
    facts: FileFacts  # of all files that hold and describe them

    def reader(self) -> BoxReader:
        """Opens a reader of the factors. The caller closes it."""
        return BoxReader(self.folder, self.entries, self.files)

    def factor(self, reader: BoxReader, name: str) -> np.ndarray:
        """Returns a factor's words, as integers of its dtype's width."""
        shape = adapter_shapes(self.model, self.lora)[name]
        bits = np.empty(shape, np.uint32 if self.dtype == "float32" else np.uint16)
        reader.fill(WEIGHT, name, Box.whole(shape), bits)
        return bits


def stored_adapters(folder: Path, manifest: Manifest, files: TensorFiles, model: ModelSpec) -> StoredAdapters:
    """Opens the adapters that a manifest describes, after comparing every byte of their files with its digest.

    Raises DamagedCheckpoint for changed bytes, EnvironmentFault for factors that differ from the manifest's adapters.
    """
    facts = manifest.of_actor.files_of_ranks()
    check_files(folder, facts, _THREADS)
    lora = lora_of(manifest, folder)
    entries = tuple(manifest.read_entries(folder))
    described: dict[str, tuple[int, ...]] = {}
    for piece in (piece for entry in entries if entry.role == WEIGHT for piece in entry.pieces):
        stops = tuple(stop for _, stop in piece.hf_box.ranges)
        described[piece.hf_name] = tuple(map(max, described.get(piece.hf_name, stops), stops))
    wanted = adapter_shapes(model, lora)
    if odd := sorted(name for name in described.keys() | wanted.keys() if described.get(name) != wanted.get(name)):
        raise EnvironmentFault(
            f"{folder}: its tensors are not those of its adapters ({len(odd)} differ): {', '.join(odd[:3])}; the "
            "checkpoint is damaged, choose another one"
        )
    return StoredAdapters(folder, entries, files, model, lora, manifest.dtype, facts)


def lora_of(manifest: Manifest, folder: Path) -> Lora:
    """Returns the adapters of a checkpoint that has no other tensors. Raises EnvironmentFault."""
    settings: dict[str, Any] = manifest.adapters
    try:
        return Lora.of(int(settings["rank"]), float(settings["alpha"]), map(str, settings["target_modules"]))
    except (KeyError, TypeError, ValueError) as error:
        raise EnvironmentFault(f"{folder}: not a complete manifest of adapters ({error!r})") from None


class MergedReader(BoxReader):
    """Reads the weights of a model in the adapters' dtype and merges adapters into those that have some.

    Like ranks, it first casts a weight to that dtype and then merges. Constants are read unchanged.
    """

    def __init__(self, folder: Path, entries: Iterable[StoredTensor], files: TensorFiles, adapters: StoredAdapters):
        super().__init__(folder, entries, files)
        self._adapters = adapters
        self._factors = adapters.reader()
        self._last: tuple[str, list[np.ndarray]] = ("", [])  # the weight that was read last, and its factors

    def close(self) -> None:
        self._factors.close()
        super().close()

    def read(self, stored: StoredBox, box: Box, out: np.ndarray) -> None:
        """Writes `box` into `out`, integers of the adapters' width, of a constant of its own."""
        if stored.parts[0].role != WEIGHT:
            super().read(stored, box, out)
            return
        self._read_cast(stored, box, out)
        name = stored.piece.hf_name
        if target_of(name) not in self._adapters.lora.targets:
            return
        (row, last_row), (column, last_column) = box.ranges
        first, second = self._of(name)
        first = first[:, column:last_column]
        second = second[row:last_row] * np.float32(self._adapters.lora.scale)
        spans = list(tiles(*out.shape, _TILE))
        totals, products = np.empty((2, spans[0][1], out.shape[1]), np.float32)
        for start, stop in spans:
            total, product = totals[: stop - start], products[: stop - start]
            add_factors(as_float32(out[start:stop]), first, second[start:stop], np.multiply, total, product)
            out[start:stop] = _as_bits(total, out.itemsize)

    def _read_cast(self, stored: StoredBox, box: Box, out: np.ndarray) -> None:
        """Writes words of the adapters' dtype, whichever of both the model is stored in."""
        width = ITEM_BYTES[self.dtype(stored)]
        if width == out.itemsize:
            super().read(stored, box, out)
            return
        as_stored = np.empty(box.shape, f"u{width}")
        super().read(stored, box, as_stored)
        out[...] = _as_bits(as_float32(as_stored), out.itemsize)

    def _of(self, name: str) -> list[np.ndarray]:
        if self._last[0] != name:
            names = [factor_name(name, factor) for factor in (FIRST, SECOND)]
            bits = (self._adapters.factor(self._factors, each) for each in names)
            self._last = (name, [as_float32(each) for each in bits])
        return self._last[1]


def as_float32(bits: np.ndarray) -> np.ndarray:
    """Returns the numbers of float32's or bfloat16's words."""
    if bits.itemsize == 4:
        return bits.view(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _as_bits(numbers: np.ndarray, width: int) -> np.ndarray:
    """Words of float32 (`width` 4 bytes) or bfloat16 (2) for float32 numbers."""
    if width == 4:
        return numbers.view(np.uint32)
    return nearest_bfloat16(numbers)
