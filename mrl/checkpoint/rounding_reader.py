"""Reads a bfloat16 checkpoint that has some float32 tensors as bfloat16 throughout."""

from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np

from mrl.checkpoint.manifest import StoredTensor
from mrl.checkpoint.stored_boxes import BoxReader, StoredBox, TensorFiles
from mrl.model.boxes import Box
from mrl.model.fp8 import nearest_bfloat16


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
