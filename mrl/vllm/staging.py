"""Memory for modules in load layout, used again from one module to the next."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

_ALIGN = 64  # bytes, as torch's own memory


def check_same_shapes(loaded: Mapping[str, Tensor], kernels: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError unless `loaded` are all of a layer's `kernels` tensors, in their shapes: only then are they packed one into one.

    The handshake refuses engines whose kernels pad experts or give them a bias, so that no update gets here with one.
    """
    wanted, found = ({name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (loaded, kernels))
    if wanted != found:
        raise RuntimeError(f"experts of shapes {wanted} cannot be packed into the kernel's {found}; reshard.path: slow can load them")


class Staging:
    """Lends memory while an update lasts. Fresh pages of the operating system cost several times what writing into them does."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[nn.Module, Tensor] = {}

    def lend(self, layer: nn.Module, leaves: tuple[str, ...]) -> None:
        """Puts parameters of a layer, whose own memory nobody has touched yet, into memory that an earlier layer gave back."""
        tensors = [getattr(layer, leaf) for leaf in leaves]
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // _ALIGN) * _ALIGN
        block = self._find(size)
        self._lent[layer] = block
        for tensor, start in zip(tensors, starts, strict=True):
            tensor.data = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def take_back(self, layer: nn.Module) -> None:
        """Ends a loan; nothing if there is none. The layer's parameters must not be used any more."""
        if (block := self._lent.pop(layer, None)) is not None:
            self._free.append(block)

    def clear(self) -> None:
        """Gives everything back to the operating system."""
        self._free.clear()
        self._lent.clear()

    def _find(self, size: int) -> Tensor:
        for number, block in enumerate(self._free):
            if block.numel() >= size:
                return self._free.pop(number)
        self._free.clear()  # too small: not kept beside a larger one
        return torch.empty(size, dtype=torch.uint8)
