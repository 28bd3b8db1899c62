"""Reads the weights that a kernel computes with back into load layout, bit for bit. What a layer is made of is found by its attributes."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

_CHUNK = 512  # columns read at a time, so that the identity matrix stays small


def through_identity(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[out, in] of a linear that CPU packs out of sight: every product of an identity matrix is x*1 or x*0, every sum has one term.

    What it cannot show are -0.0 and, in bf16, subnormals.
    """
    found = torch.empty(shape, dtype=dtype)
    width = shape[1]
    for start in range(0, width, _CHUNK):
        stop = min(start + _CHUNK, width)
        rows = torch.zeros(stop - start, width, dtype=dtype)
        rows[torch.arange(stop - start), torch.arange(start, stop)] = 1
        found[:, start:stop] = layer.cpu_linear(rows, layer.weight, None).t()
    return found


Pack = Callable[[Tensor, str], Tensor]  # (load layout, instruction set) -> packed


def unpacked(packed: Tensor, pack: Pack, isa: str) -> Tensor:
    """[experts, rows, columns] from a kernel's packed form of that shape, by following where `pack` moves each element of one expert.

    Raises RuntimeError when `pack` does more than move elements. It must move them the same way for every expert.
    """
    experts, rows, columns = packed.shape
    order = _order(rows, columns, packed.dtype, pack, isa)
    found = torch.empty_like(packed)
    for expert in range(experts):
        torch.take(packed[expert], order, out=found[expert].view(-1))
    return found


@cache
def _order(rows: int, columns: int, dtype: torch.dtype, pack: Pack, isa: str) -> Tensor:
    """[rows * columns] int64: where packing puts each element, found by packing numbers that are written as bit patterns."""
    numbers = torch.arange(rows * columns, dtype=torch.int32)
    if dtype.itemsize == 4:
        found = _packed_words(numbers, (rows, columns), dtype, pack, isa)
    else:
        low, high = (_packed_words(part.to(torch.int16), (rows, columns), dtype, pack, isa) for part in (numbers & 0x7FFF, numbers >> 15))
        found = high << 15 | low
    places, order = found.sort()
    if not torch.equal(places, numbers.to(torch.int64)):
        raise RuntimeError(f"this kernel does not just move the elements of [{rows}, {columns}] {dtype} when it packs them")
    return order


def _packed_words(words: Tensor, shape: tuple[int, int], dtype: torch.dtype, pack: Pack, isa: str) -> Tensor:
    return pack(words.view(dtype).view(1, *shape), isa).reshape(-1).view(words.dtype).to(torch.int64)
