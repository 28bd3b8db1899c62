"""Reads checkpoints for mbridge whose text model may be inside a model that also reads images."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from mbridge.core.safetensor_io import SafeTensorIO
from safetensors import safe_open
from torch import Tensor

from mrl.model.hf_files import read_safetensors_header, weight_files
from mrl.model.wrapped import Inner, inner_tensors


class WrappedFiles(SafeTensorIO):
    """Returns the text model's tensors under their own names. `check_checkpoint` has found them all."""

    def __init__(self, folder: str):
        super().__init__(folder)
        self._places: dict[str, tuple[Path, str, Inner]] = {}
        for file in weight_files(Path(folder)):
            for key, stored in read_safetensors_header(file).items():
                self._places |= {inner.name: (file, key, inner) for inner in inner_tensors(key, stored.shape)}

    def load_some_hf_weight(self, hf_weight_names: list[str]) -> dict[str, Tensor]:
        """Loads tensors by name. From a layer's experts it reads only the requested rows."""
        in_file: dict[Path, list[str]] = defaultdict(list)
        for name in hf_weight_names:
            in_file[self._places[name][0]].append(name)
        found = {}
        for file, names in in_file.items():
            with safe_open(file, framework="pt", device="cpu") as tensors:
                found |= {name: _inner(tensors, *self._places[name][1:]) for name in names}
        return found


def _inner(tensors: Any, key: str, inner: Inner) -> Tensor:
    stored = tensors.get_slice(key)
    shape = stored.get_shape()
    if len(shape) == len(inner.shape):
        return tensors.get_tensor(key)
    expert, row = divmod(inner.first, shape[1])
    return stored[expert, row : row + inner.rows]
