"""Readers that give bfloat16 for a checkpoint with FP8 matrices, or with some float32 tensors."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import numpy as np

from mrl.checkpoint import stored_boxes
from mrl.checkpoint.manifest import StoredTensor
from mrl.checkpoint.stored_boxes import BoxReader, StoredBox, TensorFiles
from mrl.model.boxes import Box
from mrl.model.fp8 import bfloat16_words, nearest_bfloat16
from mrl.model.hf_files import scale_of


class Fp8Reader(BoxReader):
    """Reads FP8 matrices as bfloat16, some rows at a time, and other tensors unchanged."""

    def __init__(
        self,
        folder: Path,
        entries: Iterable[StoredTensor],
        files: TensorFiles,
        scales: Mapping[str, str],
        block: tuple[int, int],
    ):
        """`scales`: for each FP8 matrix, the file with its scales. `block`: rows and columns of a scale's block."""
        super().__init__(folder, entries, files)
        self._files_of_scales = scales
        self._block = block
        self._last = ("", np.empty((0, 0), np.float32))  # the matrix that was read last, and its scales

    def read(self, stored: StoredBox, box: Box, out: np.ndarray) -> None:
        """Writes `box` into `out`, whose elements have 16 bits."""
        name = stored.parts[0].key
        if name not in self._files_of_scales:
            return super().read(stored, box, out)
        scales = self._scales(name)
        (first, last), columns = box.ranges
        step = max(1, stored_boxes.SCRATCH_BYTES // (columns[1] - columns[0]))
        for start in range(first, last, step):
            rows = Box(((start, min(start + step, last)), columns))
            codes = np.empty(rows.shape, np.uint8)
            super().read(stored, rows, codes)
            out[start - first :][: len(codes)] = bfloat16_words(codes, scales, self._block, rows.origin)
        return None

    def _scales(self, name: str) -> np.ndarray:
        if self._last[0] != name:
            file = self._files_of_scales[name]
            key = scale_of(name)
            flat = self.tensor_bytes(file, key).view("<f4")
            self._last = (name, flat.reshape(self._location(file, key).shape))
        return self._last[1]


class RoundingReader(BoxReader):
    """Rounds some float32 tensors to the nearest bfloat16. Reads others unchanged."""

    def __init__(self, folder: Path, entries: Iterable[StoredTensor], files: TensorFiles, rounded: Collection[str]):
        """`rounded`: keys of the float32 tensors, which are small."""
        super().__init__(folder, entries, files)
        self._rounded = rounded

    def read(self, stored: StoredBox, box: Box, out: np.ndarray) -> None:
        """Writes `box` into `out`, whose elements have 16 bits."""
        if stored.parts[0].key not in self._rounded:
            return super().read(stored, box, out)
        precise = np.empty(box.shape, np.float32)
        super().read(stored, box, precise)
        out[...] = nearest_bfloat16(precise)
        return None
