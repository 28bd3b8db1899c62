"""Reads the weights that a kernel computes with back into load layout, bit for bit. What a layer is made of is found by its attributes.

Memory is what reading costs most, so large parameters come in parts, each in memory that the next one takes over.
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor, nn

_CHUNK = 512  # columns read at a time, so that the identity matrix stays small
_PART_BYTES = 1 << 21  # of experts unpacked at a time: few calls, and what is unpacked stays in cache


def through_identity(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[out, in] of a linear that CPU packs out of sight: every product of an identity matrix is x*1 or x*0, every sum has one term.

    What it cannot show are -0.0 and, in bf16, subnormals. The tensor's memory is [in, out].
    """
    height, width = shape
    found = torch.empty(width, height, dtype=dtype)
    for start in range(0, width, _CHUNK):
        stop = min(start + _CHUNK, width)
        rows = torch.zeros(stop - start, width, dtype=dtype)
        rows[:, start:stop].fill_diagonal_(1)
        found[start:stop] = layer.cpu_linear(rows, layer.weight, None)
    return found.t()


Pack = Callable[[Tensor, str], Tensor]  # (load layout, instruction set) -> packed


def unpacked(packed: Tensor, pack: Pack, isa: str) -> Iterator[Tensor]:
    """[some experts, rows, columns] each, all in order, from a kernel's packed form of that shape; valid until the next is asked for.

    Follows where `pack` moves each element of one expert. Raises RuntimeError when it does more than move elements. It must move them the
    same way for every expert.
    """
    experts, rows, columns = packed.shape
    order = _order(rows, columns, packed.dtype, pack, isa)
    several = min(experts, max(1, _PART_BYTES // (rows * columns * packed.dtype.itemsize)))
    room = torch.empty(several, rows, columns, dtype=packed.dtype)
    for start in range(0, experts, several):
        part = packed[start : start + several]
        found = room[: len(part)]
        if isinstance(order, int):
            blocks = part.view(len(part), rows // order, columns, order)
            found.view(len(part), rows // order, order, columns).copy_(blocks.transpose(2, 3))
        else:
            for one, into in zip(part, found, strict=True):
                torch.index_select(one.view(-1), 0, order, out=into.view(-1))
        yield found


@cache
def _order(rows: int, columns: int, dtype: torch.dtype, pack: Pack, isa: str) -> Tensor | int:
    """[rows * columns] int32: where packing puts each element, found by packing numbers that are written as bit patterns.

    Where it lays so many rows in columns, block by block, just their number: such elements are copied without being looked up one by one.
    """
    numbers = torch.arange(rows * columns, dtype=torch.int32)
    if dtype.itemsize == 4:
        found = _packed_words(numbers, (rows, columns), dtype, pack, isa)
    else:
        low, high = (_packed_words(part.to(torch.int16), (rows, columns), dtype, pack, isa) for part in (numbers & 0x7FFF, numbers >> 15))
        found = high << 15 | low
    places, order = found.sort()
    if not torch.equal(places, numbers):
        raise RuntimeError(f"this kernel does not just move the elements of [{rows}, {columns}] {dtype} when it packs them")
    block = int(order[1]) if columns > 1 else 0
    if block and rows % block == 0 and torch.equal(found, numbers.view(rows // block, block, columns).transpose(1, 2).reshape(-1)):
        return block
    return order.to(torch.int32)


def _packed_words(words: Tensor, shape: tuple[int, int], dtype: torch.dtype, pack: Pack, isa: str) -> Tensor:
    return pack(words.view(dtype).view(1, *shape), isa).reshape(-1).view(words.dtype).to(torch.int32)
