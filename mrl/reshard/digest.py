"""A digest of a tensor's bits that is additive over any cut: it proves that an engine holds the trainer's weights.

    digest = sum over bytes of  byte[i, b] * row(i) * sum over lanes l of  name_l * column_l(b)      (mod 2^64)

`byte` are the raw bytes (signed) of the tensor in Hugging Face orientation. `i` is the row and `b` the byte's position
in the row, both in the whole Hugging Face tensor. The weights are fixed pseudo-random numbers. Digests of disjoint
blocks therefore add up to the digest of their union, however a tensor is cut.

A change made without knowledge of the weights is missed with a probability of about 2^-56. This is Freivalds' argument:
the difference would have to be orthogonal to random vectors. A change within one byte is always found, because its
weight is odd.

Lanes are small integers, so the sum over a row is one exact int8 matrix product. This sum is nearly all of the work.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
import torch

from mrl.model.adapters import MERGED_BYTES
from mrl.model.boxes import Box
from mrl.model.megatron_shards import Piece, Shard
from mrl.reshard.messages import Copy, Message
from mrl.reshard.sync_report import MODULUS, add

Shards = Callable[[str, int], torch.Tensor]  # (source name, model chunk) -> this rank's parameter


class Merge(Protocol):
    """Changes some weights on their way to the engines: adapters are merged into them, or they become words of FP8."""

    described: Sequence[Shard]  # this rank's adapters, of which other ranks may hold replicas

    def adapts(self, hf_name: str) -> bool:
        """Tells whether this tensor is changed."""

    def merge(self, hf_name: str, box: Box, block: torch.Tensor, out: torch.Tensor) -> None:
        """Writes into `out` what engines of its dtype get for `block`, which is `box` of the tensor. Same bits at every
        call.
        """


def merged(merge: Merge, hf_name: str, box: Box, block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns what `merge` writes."""
    out = torch.empty(block.shape, dtype=dtype, device=block.device)
    merge.merge(hf_name, box, block, out)
    return out


LANES = 8
_CPU_TILE_BYTES = 1 << 21  # fits into the cache, and needs few products
_CPU_ALONE_BYTES = 1 << 18  # on CPU, blocks that are a tile by themselves; smaller ones are copied into one
_LINE = 64  # bytes of a cache line
_DEVICE_TILE_BYTES = 1 << 28  # on devices, for rows that are used in place: few launches
_DEVICE_COPY_BYTES = 1 << 23  # on devices, for rows that must be copied: little memory, and at least 64 rows
# Without an int8 product each byte becomes an int64 for a while, once for each lane: 64 MiB of them.
_EXPANDED_TILE_BYTES = 1 << 23
_MIN_ROWS = 256  # of a tile on CPU, otherwise a product spends its time on the columns
# Bytes of a row. A product reads many rows at once, so short ones must be in the cache before.
_NARROW = 4096
MAX_COLUMNS = 1 << 17  # bytes of a row that are summed together: 128 * 64 * 2^17 < 2^31, so no sum overflows int32
_GOLDEN = 0x9E3779B97F4A7C15


class _Tables(NamedTuple):
    rows: torch.Tensor  # [rows] int64, odd
    columns: torch.Tensor  # [bytes, LANES] int8 in [-64, 63]; a row sums to an odd number
    multiplies_int8: bool  # the device has an int8 matrix product


def partial_digest(block: torch.Tensor, hf_name: str, origin: tuple[int, ...]) -> int:
    """Returns the share of `block` in the digest of tensor `hf_name`, in [0, 2^64).

    `block` has one or two dimensions, or is a convolution that is cut along its first dimension alone, or has single
    positions between its first and last. It is in Hugging Face orientation and in the engine's dtype; strides do not
    matter. Its first element is at `origin` of the whole tensor.
    Raises ValueError for other shapes, or an origin of another length.
    """
    return combine(lane_sums(block, origin).tolist(), hf_name)


def partial_digests(
    blocks: Sequence[torch.Tensor], hf_names: Sequence[str], origin: tuple[int, ...], dtype: torch.dtype
) -> list[int]:
    """Returns `partial_digest` of blocks with one shape and origin, each of another tensor.

    Quicker than single calls.
    """
    return _read(_on_device(blocks, hf_names, origin, dtype))


def _on_device(
    blocks: Sequence[torch.Tensor], hf_names: Sequence[str], origin: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    turned = [_as_matrix(block, origin) for block in blocks]
    sums = lane_sums_of_each([block for block, _ in turned], turned[0][1], dtype)
    return _named(sums, tuple(hf_names))


def _read(digests: torch.Tensor) -> list[int]:
    return [digest % MODULUS for digest in digests.tolist()]


def lane_sums(block: torch.Tensor, origin: tuple[int, ...]) -> torch.Tensor:
    """Returns `partial_digest` before the name is applied: [LANES] int64 on the block's device. Also additive."""
    block, origin = _as_matrix(block, origin)
    return lane_sums_of_each([block], origin)[0]


def _as_matrix(block: torch.Tensor, origin: tuple[int, ...]) -> tuple[torch.Tensor, tuple[int, int]]:
    """Joins all dimensions but the first. A convolution is whole in them, or has a single channel."""
    is_flat = set(block.shape[1:-1]) <= {1} and not any(origin[1:-1])
    if not block.dim() or len(origin) != block.dim() or not (is_flat or not any(origin[1:])):
        raise ValueError(
            f"a block of shape {tuple(block.shape)} at {tuple(origin)}: only vectors, matrices, convolutions of single "
            "channels and whole rows of others have a digest"
        )
    if block.dim() == 1:
        return (block[None], (0, *origin))
    return (block.flatten(1), (origin[0], origin[-1]))


def lane_sums_of_each(
    blocks: torch.Tensor | Sequence[torch.Tensor], origin: tuple[int, int], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns [n, LANES]: `lane_sums` of n blocks at one origin of n tensors, such as the experts of a layer.

    `blocks`: [n, rows, columns], or n of [rows, columns]. `dtype`: the engine's, where the blocks have another.
    """
    return _over_rows(row_sums(blocks, origin[1], dtype), origin[0])


def row_sums(
    blocks: torch.Tensor | Sequence[torch.Tensor], column: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns [n, rows, LANES]: the exact sums over each row, before rows and names have their weights.

    One product serves all tensors that lie among the rows, as gate and up do: `digest_of_rows` takes them apart.
    `blocks` and `dtype` as for `lane_sums_of_each`. `column`: of each first element, in the whole tensor.
    """
    count, (height, width), device = len(blocks), blocks[0].shape, blocks[0].device
    dtype = dtype or blocks[0].dtype
    size = dtype.itemsize
    start = column * size
    tables = _tables(str(device), _table_size(0), _table_size(start + width * size))
    largest = _DEVICE_TILE_BYTES if tables.multiplies_int8 else _EXPANDED_TILE_BYTES
    step = MAX_COLUMNS // size
    total: torch.Tensor | None = None
    for first in range(0, width, step):
        parts = _columns(blocks, first, min(first + step, width))
        columns = tables.columns[start + first * size :][: parts[0].shape[1] * size]
        tiles = _tiles(parts, dtype, device.type, largest)
        found = [_row_sums(tile, columns, tables.multiplies_int8) for tile in tiles]
        sums = torch.cat(found) if len(found) > 1 else found[0]
        total = sums if total is None else total.to(torch.int64) + sums
    return total.view(count, height, LANES)


def digest_of_rows(sums: torch.Tensor, row: int, hf_names: tuple[str, ...]) -> torch.Tensor:
    """Returns the digests of n blocks together, an int64 scalar on their device; modulo 2^64 it is their sum.

    `sums`: their `row_sums`, [n, rows, LANES]. Their first row is `row` of the tensors `hf_names`.
    """
    return _named(_over_rows(sums, row), hf_names).sum()


def _over_rows(sums: torch.Tensor, row: int) -> torch.Tensor:
    """Returns [n, LANES] int64: `sums`, [n, rows, LANES], each row by its weight."""
    rows = _tables(str(sums.device), _table_size(row + sums.shape[1]), _table_size(0)).rows
    return (sums * rows[row : row + sums.shape[1], None]).sum(1)


def _named(sums: torch.Tensor, hf_names: tuple[str, ...]) -> torch.Tensor:
    """Returns [n] int64: the digest of each tensor, modulo 2^64, from its `lane_sums`, [n, LANES].

    Raises ValueError for another number of names.
    """
    if len(sums) != len(hf_names):
        raise ValueError(f"digests of {len(sums)} blocks need as many names, not {len(hf_names)}")
    return (sums * _name_table(hf_names, str(sums.device))).sum(1)


def _columns(blocks: torch.Tensor | Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor | list[torch.Tensor]:
    if isinstance(blocks, torch.Tensor):
        return blocks[..., start:stop]
    return [block[:, start:stop] for block in blocks]


def _tiles(
    blocks: torch.Tensor | Sequence[torch.Tensor], dtype: torch.dtype, kind: str, largest: int
) -> Iterator[torch.Tensor]:
    """Yields [rows, bytes] int8: all rows of all blocks in order, a tile at a time. Each tile is valid until the next.

    `kind` is the device type. `largest` limits the bytes of a tile that is used in place. On CPU a tile fits into the
    cache. Elsewhere rows are copied only where there are gaps.
    """
    size = blocks[0].shape[1] * dtype.itemsize
    is_cpu = kind == "cpu"
    rows = _end_to_end(blocks, dtype)
    if rows is not None and (not is_cpu or rows.is_contiguous() or size > _NARROW):
        for tile in rows.split(_cached_rows(size) if is_cpu else _whole_rows(largest, size)):
            if is_cpu and tile.is_contiguous():
                # reads an element of each cache line in the order of memory, which is quicker than a product's order
                tile.view(-1).view(torch.int8)[::_LINE].any()
            yield tile.view(torch.int8)
    elif is_cpu and rows is None and blocks[0].numel() * dtype.itemsize >= _CPU_ALONE_BYTES and len(blocks) > 1:
        for block in blocks:
            yield from _tiles([block], dtype, kind, largest)
    else:
        yield from _copied_tiles(blocks, dtype, _cached_rows(size) if is_cpu else _whole_rows(_DEVICE_COPY_BYTES, size))


def _copied_tiles(
    blocks: torch.Tensor | Sequence[torch.Tensor], dtype: torch.dtype, step: int
) -> Iterator[torch.Tensor]:
    """Yields tiles of at most `step` rows, or of several whole blocks, each in the memory of the one before."""
    count, (height, width), device = len(blocks), blocks[0].shape, blocks[0].device
    several = max(1, step // height)
    buffer = torch.empty(min(step, count * height) * width, dtype=dtype, device=device)
    for first in range(0, count, several):
        for row in range(0, height, step):
            parts = [block[row : row + step] for block in blocks[first : first + several]]
            tile = buffer[: len(parts) * parts[0].numel()].view(len(parts), *parts[0].shape)
            torch._foreach_copy_(list(tile.unbind()), parts)
            yield tile.view(-1, width).view(torch.int8)


def _cached_rows(size: int) -> int:
    """Returns how many rows of `size` bytes form a tile on CPU."""
    return max(_MIN_ROWS, _CPU_TILE_BYTES // size)


def _whole_rows(nbytes: int, size: int) -> int:
    """Returns how many rows of `size` bytes form a tile: a multiple of 32, so that `_row_sums` need not pad."""
    return max(32, nbytes // size // 32 * 32)


def _end_to_end(blocks: torch.Tensor | Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
    """Returns all rows of all blocks as one view; None where they are not adjacent or have another dtype."""
    if not isinstance(blocks, torch.Tensor):
        if len(blocks) > 1:
            return None
        blocks = blocks[0][None]
    if blocks.dtype != dtype or blocks.stride(2) != 1:
        return None
    try:
        return blocks.view(-1, blocks.shape[2])
    except RuntimeError:  # there are gaps between blocks
        return None


def combine(sums: list[int], hf_name: str) -> int:
    """Returns the digest, from the tensor's name and its `lane_sums`."""
    return sum(weight * lane for weight, lane in zip(_name_weights(hf_name), sums, strict=True)) % MODULUS


def _row_sums(raw: torch.Tensor, columns: torch.Tensor, multiplies_int8: bool) -> torch.Tensor:
    """Returns exact sums, [rows, LANES], of `raw`, [rows, bytes] int8."""
    if not multiplies_int8:
        return torch.stack([(raw * lane.to(torch.int64)).sum(1) for lane in columns.t()], 1)
    count = len(raw)
    # matrix units of accelerators need more than 16 rows and multiples of 8 bytes
    if raw.device.type != "cpu" and (count % 32 or raw.shape[1] % 8):
        raw = torch.nn.functional.pad(raw, (0, -raw.shape[1] % 8, 0, -count % 32))
        columns = torch.nn.functional.pad(columns, (0, 0, 0, raw.shape[1] - len(columns)))
    return torch._int_mm(raw, columns)[:count]


@cache
def _tables(device: str, rows: int, columns: int) -> _Tables:
    """Returns weights of `rows` rows and `columns` bytes.

    They depend on the position alone, so a longer table begins with a shorter one.
    """
    # 7 bits, so that no int8 product saturates
    lanes = (_mixed(columns, 2).view(np.int8).reshape(columns, LANES) >> 1).copy()
    lanes[:, 0] ^= 1 - (lanes.sum(1, dtype=np.int64) & 1).astype(np.int8)
    row_weights = torch.from_numpy((_mixed(rows, 1) | np.uint64(1)).view(np.int64))
    return _Tables(row_weights.to(device), torch.from_numpy(lanes).to(device), _multiplies_int8(device))


def _table_size(size: int) -> int:
    return max(4096, 1 << (size - 1).bit_length())


@cache
def _multiplies_int8(device: str) -> bool:
    """Tells whether this device has an exact int8 matrix product. It is tried once, as no property tells it."""
    left = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).repeat(32).reshape(32, 256)
    right = torch.arange(256 * LANES).remainder(128).sub(64).to(torch.int8).reshape(256, LANES)
    try:
        product = torch._int_mm(left.to(device), right.to(device)).cpu()
    except (RuntimeError, NotImplementedError):
        return False
    return bool(torch.equal(product.to(torch.int64), left.to(torch.int64) @ right.to(torch.int64)))


def _mixed(count: int, stream: int) -> np.ndarray:
    """Returns `count` numbers of SplitMix64 (Steele, Lea and Flood 2014), each independent of the others."""
    z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 40)) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@cache
def _name_weights(hf_name: str) -> tuple[int, ...]:
    """Returns one odd number of 64 bits for each lane."""
    data = hashlib.blake2b(hf_name.encode(), digest_size=8 * LANES).digest()
    return tuple(int.from_bytes(data[8 * lane : 8 * lane + 8], "little") | 1 for lane in range(LANES))


@cache
def _name_table(hf_names: tuple[str, ...], device: str) -> torch.Tensor:
    """Returns `_name_weights` of several tensors, [n, LANES] int64 on the device."""
    weights = np.array([_name_weights(name) for name in hf_names], dtype=np.uint64)
    return torch.from_numpy(weights.view(np.int64)).to(device)


class ShardDigests:
    """Digests of one rank's shards: of the boxes that it sends, and of parameters that other ranks hold too.

    Boxes are located through the description of the shards, not through the plan. So a box that is sent from a wrong
    offset is detected. Locations are looked up once.
    """

    def __init__(self, described: Sequence[Shard], shards: Shards, dtype: torch.dtype, merge: Merge | None = None):
        """`dtype` is the engine's, in which weights travel."""
        self._merge = merge
        self._described = {(shard.megatron_name, shard.vp_chunk): shard for shard in described}
        self._shards = shards
        self._dtype = dtype
        self._boxes: dict[Copy, Box] = {}
        self._packed: dict[tuple[str, Box], torch.Tensor] = {}  # (name, box) -> digest, of what was merged in this sync

    def begin(self) -> None:
        """Begins a sync: forgets what was packed in the one before."""
        self._packed.clear()

    def packed(self, message: Message, blocks: Sequence[torch.Tensor]) -> None:
        """Digests merged blocks where they lie packed, so that `sent` need not merge them again.

        A block that the plan takes from elsewhere than the description says is left to `sent`.
        """
        if self._merge is None:
            return
        groups: dict[tuple[Box, torch.dtype], dict[str, torch.Tensor]] = {}
        for copy, block in zip(message.copies, blocks, strict=True):
            is_known = (copy.hf_name, copy.hf_box) in self._packed
            if self._merge.adapts(copy.hf_name) and not is_known and self._box_of(copy) == copy.source_box:
                groups.setdefault((copy.hf_box, block.dtype), {})[copy.hf_name] = block
        for (box, dtype), of_box in groups.items():
            digests = _on_device(list(of_box.values()), list(of_box), box.origin, dtype)
            self._packed |= {(name, box): digest for name, digest in zip(of_box, digests, strict=True)}

    def sent(self, messages: Iterable[Message]) -> dict[int, dict[str, int]]:
        """Returns worker -> parameter -> digest of what this rank sends of it.

        A box that goes to several workers is read once, or not at all if it was `packed`.
        """
        messages = list(messages)
        known = self._digests(
            copy for message in messages for copy in message.copies if (copy.hf_name, copy.hf_box) not in self._packed
        )
        if self._packed:
            known |= zip(self._packed, _read(torch.stack(list(self._packed.values()))), strict=True)
        sums: dict[int, dict[str, int]] = {}
        for message in messages:
            of_worker = sums.setdefault(message.worker, {})
            for copy in message.copies:
                of_worker[copy.parameter] = add([of_worker.get(copy.parameter, 0), known[copy.hf_name, copy.hf_box]])
        return sums

    def shared(self) -> dict[str, int]:
        """Returns the digest of each replicated parameter, under the name and box of its first piece."""
        return {
            f"{shard.pieces[0].hf_name} {shard.pieces[0].hf_box.ranges}": self._whole(shard)
            for shard in self._described.values()
            if len(shard.replicas) > 1 and shard.pieces
        }

    def _whole(self, shard: Shard) -> int:
        local = self._shards(shard.megatron_name, shard.vp_chunk).detach()
        dtype = local.dtype if shard.is_constant else self._dtype
        # as it lies here: what changes a weight on its way is compared by itself
        digests = [
            partial_digests([local[p.local_box.slices]], [p.hf_name], p.hf_box.origin, dtype) for p in shard.pieces
        ]
        return add(digest for (digest,) in digests)

    def _digests(self, copies: Iterable[Copy]) -> dict[tuple[str, Box], int]:
        """Returns (name, box) -> digest. One box of several tensors, such as a layer's experts, is read together."""
        groups: dict[tuple[Box, str | None], dict[str, Copy]] = {}
        for copy in copies:
            groups.setdefault((copy.hf_box, copy.dtype), {}).setdefault(copy.hf_name, copy)
        digest_of = {}
        for (box, own), by_name in groups.items():
            dtype = getattr(torch, own) if own else self._dtype
            for names in self._at_once(list(by_name), box.volume * dtype.itemsize):
                blocks = [self._block(by_name[name], dtype) for name in names]
                digests = partial_digests(blocks, names, box.origin, dtype)
                digest_of |= {(name, box): digest for name, digest in zip(names, digests, strict=True)}
        return digest_of

    def _at_once(self, names: list[str], nbytes: int) -> Iterator[list[str]]:
        """Yields groups of tensors, of `nbytes` each, whose blocks exist at once. Merged blocks take memory, others do
        not.
        """
        step = len(names)
        if self._merge is not None:
            step = max(1, MERGED_BYTES // nbytes)
        for start in range(0, len(names), step):
            yield names[start : start + step]

    def _block(self, copy: Copy, dtype: torch.dtype) -> torch.Tensor:
        """Returns what engines get of a copy's box."""
        block = self._shards(copy.source_name, copy.vp_chunk).detach()[self._box_of(copy).slices]
        if self._merge is not None and self._merge.adapts(copy.hf_name):
            return merged(self._merge, copy.hf_name, copy.hf_box, block, dtype)
        return block

    def _box_of(self, copy: Copy) -> Box:
        """Returns where a copy's box lies in its parameter, by the parameter's description."""
        if copy not in self._boxes:
            self._boxes[copy] = _local_box(self._described[copy.source_name, copy.vp_chunk].pieces, copy)
        return self._boxes[copy]


def _local_box(pieces: Sequence[Piece], copy: Copy) -> Box:
    for piece in pieces:
        if piece.hf_name == copy.hf_name and piece.hf_box.contains(copy.hf_box):
            return copy.hf_box.shift(
                [local - hf for local, hf in zip(piece.local_box.origin, piece.hf_box.origin, strict=True)]
            )
    raise RuntimeError(
        f"{copy.source_name} does not hold {copy.hf_name} {copy.hf_box.ranges}, which the plan sends from it"
    )
