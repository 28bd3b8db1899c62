"""Reads FP8 checkpoints for mbridge."""

import numpy as np
import torch
from mbridge.core.safetensor_io import SafeTensorIO
from torch import Tensor

from mrl.model.fp8 import bfloat16_words
from mrl.model.hf_files import scale_of


class Bfloat16Files(SafeTensorIO):
    """Returns FP8 matrices as bfloat16, and other tensors unchanged. `check_checkpoint` has found their scales."""

    def __init__(self, folder: str, block: tuple[int, int]):
        """`block`: rows and columns of one scale's block."""
        super().__init__(folder)
        self._block = block

    def load_some_hf_weight(self, hf_weight_names: list[str]) -> dict[str, Tensor]:
        """Loads tensors by name, FP8 matrices as bfloat16."""
        stored = super().load_some_hf_weight(hf_weight_names)
        matrices = [name for name, tensor in stored.items() if tensor.dtype is torch.float8_e4m3fn]
        scales = super().load_some_hf_weight([scale_of(name) for name in matrices])
        return stored | {name: self._as_bfloat16(stored[name], scales[scale_of(name)]) for name in matrices}

    def _as_bfloat16(self, matrix: Tensor, scales: Tensor) -> Tensor:
        words = bfloat16_words(matrix.view(torch.uint8).numpy(), scales.numpy(), self._block)
        return torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
