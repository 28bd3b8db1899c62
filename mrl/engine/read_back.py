"""Reads what an engine's kernels hold back into load layout, bit for bit, and digests it parameter by parameter.

The attributes of a layer show which kernel it has. Reading costs memory most of all. So large parameters come in parts
along their first dimension, each part in the memory of the one before. Digests are taken part by part.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from mrl.model.vllm_parameters import TargetParameter, TargetPiece
from mrl.reshard.copies import hf_view
from mrl.reshard.digest import MODULUS, add, combine, digest_of_rows, lane_sums, lane_sums_of_each, row_sums

_IDENTITY_ROWS = 512  # rows of the identity matrix at a time, so that it stays small
PART_BYTES = 1 << 21  # experts packed or unpacked at a time: few calls, and they stay in the cache
_IN_CACHE = 1 << 16  # elements
_EXPERT_DIMS = 3  # of a parameter: experts, rows, columns
_INTEGERS = {2: torch.int16, 4: torch.int32}  # integers by bytes of an element

Pack = Callable[[Tensor, str], Tensor]  # (load layout, instruction set) -> packed


def through_identity(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns the weight [out, in] of a linear that the CPU keeps packed, by multiplying an identity matrix with it.

    Every product is x*1 or x*0, and every sum has one term. So only -0.0 and, in bf16, subnormals are lost. The memory
    of the result is [in, out].
    """
    height, width = shape
    transposed = torch.empty(width, height, dtype=dtype)
    for start in range(0, width, _IDENTITY_ROWS):
        stop = min(start + _IDENTITY_ROWS, width)
        rows = torch.zeros(stop - start, width, dtype=dtype)
        rows[:, start:stop].fill_diagonal_(1)
        transposed[start:stop] = layer.cpu_linear(rows, layer.weight, None)
    return transposed.t()


def what_reading_shows(tensor: Tensor) -> Tensor:
    """Returns the tensor as `through_identity` shows it: 0.0 for -0.0 and, in bf16, for subnormals.

    Returns `tensor` itself where it has no such values.
    """
    tiny = torch.finfo(tensor.dtype).tiny
    integers = tensor.view(_INTEGERS[tensor.element_size()])
    for part, bits in zip(tensor.view(-1).split(_IN_CACHE), integers.view(-1).split(_IN_CACHE), strict=True):
        small = part.abs() < tiny
        if bool(small.any()) and bool((small & (bits != 0)).any()):
            return tensor.masked_fill((tensor.abs() < tiny) & (integers != 0), 0.0)
    return tensor


def unpacked(packed: Tensor, pack: Pack, isa: str) -> Iterator[Tensor]:
    """Yields experts from a kernel's packed form, in order, [some experts, rows, columns]. A part is valid until the
    next.

    Follows where `pack` moves each element of one expert; it has to move them the same way for every expert. Raises
    RuntimeError when it does more than move elements.
    """
    experts, rows, columns = packed.shape
    order = _order(rows, columns, packed.dtype, pack, isa)
    at_once = min(experts, max(1, PART_BYTES // (rows * columns * packed.dtype.itemsize)))
    memory = torch.empty(at_once, rows, columns, dtype=packed.dtype)
    for start in range(0, experts, at_once):
        part = packed[start : start + at_once]
        loaded = memory[: len(part)]
        if isinstance(order, int):
            blocks = part.view(len(part), rows // order, columns, order)
            loaded.view(len(part), rows // order, order, columns).copy_(blocks.transpose(2, 3))
        else:
            for expert, target in zip(part, loaded, strict=True):
                torch.index_select(expert.view(-1), 0, order, out=target.view(-1))
        yield loaded


@cache
def _order(rows: int, columns: int, dtype: torch.dtype, pack: Pack, isa: str) -> Tensor | int:
    """Returns where packing puts each element, int32 [rows * columns], found by packing numbers as bit patterns.

    Some packings store blocks of rows as columns, block by block. For these it returns only the rows of a block:
    elements are then copied without a look-up for each.
    """
    numbers = torch.arange(rows * columns, dtype=torch.int32)
    if dtype.itemsize == 4:
        packed = _packed_bits(numbers, (rows, columns), dtype, pack, isa)
    else:
        low, high = (
            _packed_bits(part.to(torch.int16), (rows, columns), dtype, pack, isa)
            for part in (numbers & 0x7FFF, numbers >> 15)
        )
        packed = high << 15 | low
    in_order, order = packed.sort()
    if not torch.equal(in_order, numbers):
        raise RuntimeError(
            f"this kernel does not just move the elements of [{rows}, {columns}] {dtype} when it packs them"
        )
    block = 0
    if columns > 1:
        block = int(order[1])
    if (
        block
        and rows % block == 0
        and torch.equal(packed, numbers.view(rows // block, block, columns).transpose(1, 2).reshape(-1))
    ):
        return block
    return order.to(torch.int32)


def _packed_bits(bits: Tensor, shape: tuple[int, int], dtype: torch.dtype, pack: Pack, isa: str) -> Tensor:
    return pack(bits.view(dtype).view(1, *shape), isa).reshape(-1).view(bits.dtype).to(torch.int32)


def hf_block(tensor: Tensor, piece: TargetPiece) -> Tensor:
    """Returns the piece as a view of a parameter in load layout, turned to Hugging Face orientation."""
    return hf_view(tensor, piece.local_box, piece.axes)


def has_padding(target: TargetParameter) -> bool:
    """Returns whether some elements belong to no piece."""
    return sum(piece.local_box.volume for piece in target.pieces) < torch.Size(target.local_shape).numel()


def held_digests(
    targets: Sequence[TargetParameter], final: Callable[[TargetParameter], Iterable[Tensor]]
) -> dict[str, int]:
    """Returns the digest of what the engine finally holds, by parameter.

    `final` reads one parameter back into load layout, in parts along its first dimension. Raises RuntimeError naming a
    parameter whose padding is not zero, or whose padding comes in several parts.
    """
    digests = {
        target.name: parameter_digest(_with_checked_padding(final(target), target), target) for target in targets
    }
    return {target.name: digests[target.name] for target in targets if target.pieces}


def _with_checked_padding(parts: Iterable[Tensor], target: TargetParameter) -> Iterator[Tensor]:
    if not has_padding(target):
        yield from parts
        return
    for number, part in enumerate(parts):
        if number:
            raise RuntimeError(
                f"{target.name}: padded, yet read back in several parts, in which its padding cannot be found"
            )
        if int(part.count_nonzero()) != sum(int(hf_block(part, piece).count_nonzero()) for piece in target.pieces):
            raise RuntimeError(f"{target.name}: the padding is not zero")
        yield part


def parameter_digest(parts: Iterable[Tensor], target: TargetParameter) -> int:
    """Returns the digest of a parameter in load layout: the sum over its pieces, in the engine's dtype.

    `parts` are its parts along the first dimension, in order. Only experts come in several. The dtype of the kernel
    does not matter.
    """
    column = _common_column(target)
    if column is not None:
        return _digest_by_rows(parts, column, target)
    digests: list[int] = []
    first = 0
    groups = _groups(target)
    for part in parts:
        digests += _part_digests(part, first, groups, getattr(torch, target.dtype))
        first += len(part)
    return add(digests)


@cache
def _common_column(target: TargetParameter) -> int | None:
    """Returns the column with which all rows begin in their Hugging Face tensors; None where rows are not alike.

    Rows are alike where each is a whole row of one piece, or padding. Fused projections and experts that are not
    transposed are so.
    """
    columns = set()
    for piece in target.pieces:
        dims = len(piece.local_box.shape)
        is_upright = len(piece.axes) == 2 and piece.axes == (dims - 2, dims - 1) and dims <= _EXPERT_DIMS
        if not is_upright or piece.local_box.shape[-1] != target.local_shape[-1]:
            return None
        columns.add(piece.hf_box.origin[-1])
    if len(columns) == 1:
        return columns.pop()
    return None


def _digest_by_rows(parts: Iterable[Tensor], column: int, target: TargetParameter) -> int:
    """Returns `parameter_digest` where all rows begin with `column`: one product a part, then little work at once."""
    dtype = getattr(torch, target.dtype)
    found = [row_sums(part if part.dim() == _EXPERT_DIMS else part[None], column, dtype) for part in parts]
    sums = torch.cat(found)  # [experts, rows, LANES]; a matrix counts as one expert
    total = torch.zeros((), dtype=torch.int64, device=sums.device)
    for pieces in _groups(target):
        box = pieces[0].local_box
        own = sums[: len(pieces)]
        if len(pieces) == 1 and _is_expert(pieces[0]):
            own = sums[box.slices[0]]
        names = tuple(piece.hf_name for piece in pieces)
        total += digest_of_rows(own[:, box.slices[-2]], pieces[0].hf_box.origin[0], names)
    return int(total) % MODULUS


def _part_digests(
    part: Tensor, first: int, groups: Sequence[Sequence[TargetPiece]], dtype: torch.dtype
) -> Iterator[int]:
    """Yields the digests of the pieces in `part`, whose first row is `first` of the parameter."""
    for pieces in groups:
        sample = pieces[0]
        if len(pieces) > 1:
            pieces = pieces[first : first + len(part)]
            experts = part[(slice(None), *sample.local_box.slices[1:])].permute(0, *sample.axes)
            origin = sample.hf_box.origin
            if len(origin) == 1:  # a bias is one row, as in partial_digest
                experts = experts[:, None]
                origin = (0, *origin)
            sums = lane_sums_of_each(experts, origin, dtype)
        elif _is_expert(sample) and not first <= sample.local_box.origin[0] < first + len(part):
            continue
        else:
            shift = [-first if _is_expert(sample) else 0] + [0] * (part.dim() - 1)
            block = hf_block(part, replace(sample, local_box=sample.local_box.shift(shift)))
            sums = lane_sums(block.to(dtype), sample.hf_box.origin)[None]
        yield from (combine(lanes, piece.hf_name) for lanes, piece in zip(sums.tolist(), pieces, strict=True))


def _is_expert(piece: TargetPiece) -> bool:
    return len(piece.axes) < len(piece.local_box.shape)


@cache
def _groups(target: TargetParameter) -> tuple[tuple[TargetPiece, ...], ...]:
    """Groups pieces that are digested together: the same box of all experts, in order of their slots. Others are
    alone.
    """
    by_box: dict[tuple, list[TargetPiece]] = {}
    for piece in target.pieces:
        key = (piece.hf_box, piece.axes, piece.local_box.ranges[1:]) if _is_expert(piece) else (piece,)
        by_box.setdefault(key, []).append(piece)
    groups: list[tuple[TargetPiece, ...]] = []
    slots = max((group[-1].local_box.ranges[0][1] for group in by_box.values()), default=0)
    for group in by_box.values():
        in_order = [piece.local_box.ranges[0] for piece in group] == [(slot, slot + 1) for slot in range(slots)]
        groups += [tuple(group)] if in_order else [(piece,) for piece in group]
    return tuple(groups)
