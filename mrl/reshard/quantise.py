"""Quantises weights to FP8 where a rank packs them: FP8 values and scales of bfloat16 weights (mrl/model/quantised.py).

A block's scale is its largest magnitude, at least 1e-4, over 448. A word is the element times the inverse of that
scale, rounded to the nearest. The operations and their order are those of vLLM 0.32's `per_block_cast_to_fp8`
(utils/deep_gemm.py), in float32, for the same bits. Scales are computed once a sync. Words are computed from them
wherever a box is packed or digested: element and scale give the same word in every box.

Adapters are merged first and rounded to the trained dtype, as in an export. The result is quantised.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from mrl.model.boxes import Box
from mrl.model.megatron_shards import Shard
from mrl.model.quantised import SCALE, SCALES, WORD, blocks, in_blocks
from mrl.reshard.digest import Merge, Shards, merged
from mrl.units import MIB

_LARGEST = 448.0  # word
_LEAST = 1e-4  # magnitude that a scale is made for, so that none is 0
_AT_ONCE = 64 * MIB  # of merged rows, from which scales are computed
WORDS = getattr(torch, WORD)


def block_scales(values: Tensor, block: int) -> Tensor:
    """The scale of each block of a matrix, float32 [rows / block, columns / block], both rounded up."""
    rows, columns = values.shape
    tall, wide = blocks(values.shape, block)
    if (rows, columns) != (tall * block, wide * block):
        values = torch.nn.functional.pad(values, (0, wide * block - columns, 0, tall * block - rows))
    by_block = values.reshape(tall, block, wide, block)
    largest = torch.maximum(by_block.amax((1, 3)), by_block.amin((1, 3)).neg())
    return largest.float().clamp(_LEAST) / _LARGEST


def as_fp8(values: Tensor, scales: Tensor, block: int, first: tuple[int, int] = (0, 0)) -> Tensor:
    """Returns a box of a matrix in FP8. `scales`: of the matrix; `first`: row and column at which the box begins."""
    inverse = 1.0 / scales
    for axis in (0, 1):
        start = first[axis]
        numbers = torch.arange(start, start + values.shape[axis], device=values.device) // block
        inverse = inverse.index_select(axis, numbers)
    return (values * inverse).to(WORDS)


def quantised(name: str, values: Tensor, quantised_names: Collection[str], block: int) -> Iterator[tuple[str, Tensor]]:
    """A whole tensor of a checkpoint as engines in FP8 get it: FP8 values and scales where it is one of
    `quantised_names`.
    """
    if not block or name not in quantised_names:
        yield name, values
        return
    scales = block_scales(values, block)
    yield name, as_fp8(values, scales, block)
    yield name + SCALES, scales


class Quantiser:
    """The `Merge` of a rank whose engines hold FP8 values: what has some becomes FP8 values, after adapters were
    merged.
    """

    def __init__(self, sent: Sequence[Shard], shards: Shards, block: int, merge: Merge | None = None):
        """`sent`: of mrl.model.quantised_shards; `shards`: this rank's parameters; `merge`: of its adapters."""
        self._shards = shards
        self._block = block
        self._merge = merge
        self.described = () if merge is None else merge.described
        described = {(shard.megatron_name, shard.vp_chunk): shard for shard in sent}
        self._made: list[tuple[Shard, Shard]] = []  # parameter, and its scales
        self._scales: dict[tuple[str, int], Tensor] = {}  # by name and chunk
        # tensor of the checkpoint -> boxes of blocks of it that are here, where their scales lie, and in which of
        # `_scales`
        self._located: dict[str, list[tuple[Box, Box, tuple[str, int]]]] = {}
        for key, scales in described.items():
            if not scales.megatron_name.endswith(SCALES):
                continue
            parameter = described[scales.megatron_name.removesuffix(SCALES), scales.vp_chunk]
            self._made.append((parameter, scales))
            for piece, of_blocks in zip(parameter.pieces, scales.pieces, strict=True):
                located = (of_blocks.hf_box, of_blocks.local_box, key)
                self._located.setdefault(piece.hf_name, []).append(located)

    @torch.no_grad()
    def begin(self) -> None:
        """Computes the scales of the weights as they are now, into the same memory each time."""
        for parameter, scales in self._made:
            into = self.shard(scales.megatron_name, scales.vp_chunk)
            local = self._shards(parameter.megatron_name, parameter.vp_chunk)
            for piece, of_blocks in zip(parameter.pieces, scales.pieces, strict=True):
                target = into[of_blocks.local_box.slices]
                block = local[piece.local_box.slices]
                for first, rows in self._merged_rows(piece.hf_name, piece.hf_box, block):
                    of_rows = block_scales(rows, self._block)
                    target[first // self._block :][: len(of_rows)] = of_rows

    def _merged_rows(self, hf_name: str, box: Box, block: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of `block` with adapters merged, some whole blocks at a time; at once where it has none."""
        if self._merge is None or not self._merge.adapts(hf_name):
            yield 0, block
            return
        height, width = block.shape
        step = max(1, _AT_ONCE // (width * block.element_size() * self._block)) * self._block
        (first_row, _), columns = box.ranges
        for start in range(0, height, step):
            stop = min(start + step, height)
            rows = Box(((first_row + start, first_row + stop), columns))
            yield start, merged(self._merge, hf_name, rows, block[start:stop], block.dtype)

    def shard(self, name: str, chunk: int) -> Tensor:
        """This rank's parameter of a name, or scales of one. Raises what looking a parameter up does."""
        if not name.endswith(SCALES):
            return self._shards(name, chunk)
        key = (name, chunk)
        if key not in self._scales:
            values = self._shards(name.removesuffix(SCALES), chunk)
            shape = blocks(values.shape, self._block)
            self._scales[key] = torch.zeros(shape, dtype=getattr(torch, SCALE), device=values.device)
        return self._scales[key]

    def adapts(self, hf_name: str) -> bool:
        """Whether engines get a tensor otherwise than it lies here."""
        return hf_name in self._located or self._is_merged(hf_name)

    def _is_merged(self, hf_name: str) -> bool:
        return self._merge is not None and self._merge.adapts(hf_name)

    @torch.no_grad()
    def merge(self, hf_name: str, box: Box, block: Tensor, out: Tensor) -> None:
        """Writes what engines get for `block`, which is `box` of the tensor: FP8 values where `out` has their dtype,
        else as it is trained, with adapters.
        """
        if self._is_merged(hf_name) and out.dtype is not WORDS:
            self._merge.merge(hf_name, box, block, out)
            return
        if self._is_merged(hf_name):
            block = merged(self._merge, hf_name, box, block, block.dtype)
        if out.dtype is WORDS:
            block = as_fp8(block, *self._scales_of(hf_name, box))
        out.copy_(block)

    def _scales_of(self, hf_name: str, box: Box) -> tuple[Tensor, int, tuple[int, int]]:
        """The scales of a piece that has `box`, the size of a block, and where in the piece it begins."""
        wanted = in_blocks(box, self._block)
        for held, local, key in self._located[hf_name]:
            if held.contains(wanted):
                row, column = (at - origin * self._block for at, origin in zip(box.origin, held.origin, strict=True))
                return self._scales[key][local.slices], self._block, (row, column)
        raise RuntimeError(f"{hf_name} {box.ranges} is not of this rank, which has no scales for it")
