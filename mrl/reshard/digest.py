"""A number for the bits of a tensor that adds up over any cut: what proves that an engine holds the trainer's weights.

    digest = sum over bytes of  byte[i, b] * row(i) * sum over lanes l of  name_l * column_l(b)      (mod 2^64)

`byte` are the raw bytes (signed) of the tensor in Hugging Face orientation, `i` its row and `b` the byte's place in the row, both counted
in the whole Hugging Face tensor. The weights are fixed pseudo-random numbers, so digests of disjoint blocks add up to that of their
union however a tensor is cut, and any change that is not made knowing the weights shows but for a chance of about 2^-56 (Freivalds'
argument: what changed would have to be orthogonal to random vectors). A change within one byte always shows: its weight is odd.

Lanes are small integers so that the sum over a row, which is nearly all the work, is one exact int8 matrix product.
"""

import hashlib
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

MODULUS = 1 << 64
LANES = 8
TILE_BYTES = 1 << 20  # stays in cache
MAX_COLUMNS = 1 << 17  # bytes of a row at a time: 128 * 64 * 2^17 < 2^31, so that no sum overflows int32
_GOLDEN = 0x9E3779B97F4A7C15


class _Tables(NamedTuple):
    rows: torch.Tensor  # [rows] int64, odd
    columns: torch.Tensor  # [bytes, LANES] int8 in [-64, 63]; a row sums to an odd number
    multiplies_int8: bool  # the device has an int8 matrix product


def partial_digest(block: torch.Tensor, hf_name: str, origin: tuple[int, ...]) -> int:
    """The share of `block` in the digest of tensor `hf_name`, in [0, 2^64).

    `block`: one- or two-dimensional, in Hugging Face orientation (strides do not matter) and in the engine's dtype; its first element
    stands at `origin` of the whole tensor. Raises ValueError for other ranks or an origin of another length.
    """
    return combine(lane_sums(block, origin).tolist(), hf_name)


def add(digests: list[int]) -> int:
    """The digest of a union of disjoint blocks from theirs."""
    return sum(digests) % MODULUS


def lane_sums(block: torch.Tensor, origin: tuple[int, ...]) -> torch.Tensor:
    """[LANES] int64 on the block's device: `partial_digest` before the tensor's name enters. Additive as well."""
    if block.dim() not in (1, 2) or len(origin) != block.dim():
        raise ValueError(f"a block of shape {tuple(block.shape)} at {tuple(origin)}: only one- and two-dimensional tensors have a digest")
    if block.dim() == 1:
        block, origin = block[None], (0, *origin)
    size = block.element_size()
    first, start = origin[0], origin[1] * size
    tables = _tables(str(block.device), _room(first + block.shape[0]), _room(start + block.shape[1] * size))
    rows, columns = tables.rows[first:], tables.columns[start:]
    total = torch.zeros(LANES, dtype=torch.int64, device=block.device)
    step = max(1, TILE_BYTES // (block.shape[1] * size))
    for row in range(0, block.shape[0], step):
        tile = block[row : row + step]
        raw = (tile if tile.stride(1) == 1 else tile.contiguous()).view(torch.int8)
        for column in range(0, raw.shape[1], MAX_COLUMNS):
            part = raw[:, column : column + MAX_COLUMNS]
            total += _weighted(part, rows[row : row + len(part)], columns[column : column + part.shape[1]], tables.multiplies_int8)
    return total


def combine(sums: list[int], hf_name: str) -> int:
    """The digest of the tensor's name with its `lane_sums`."""
    return sum(weight * lane for weight, lane in zip(_name_weights(hf_name), sums, strict=True)) % MODULUS


def _weighted(raw: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, multiplies_int8: bool) -> torch.Tensor:
    """[LANES] int64: rows^T raw columns, mod 2^64. `raw`: [rows, bytes] int8."""
    if not multiplies_int8:
        return ((raw.to(torch.int64) * rows[:, None]).sum(0)[:, None] * columns).sum(0)
    short = -len(raw) % 32 if raw.device.type != "cpu" else 0  # accelerators want more than 16 rows and multiples of 8 bytes
    if short or (raw.shape[1] % 8 and raw.device.type != "cpu"):
        raw = torch.nn.functional.pad(raw, (0, -raw.shape[1] % 8, 0, short))
        columns = torch.nn.functional.pad(columns, (0, 0, 0, raw.shape[1] - len(columns)))
        rows = torch.nn.functional.pad(rows, (0, short))
    return (torch._int_mm(raw, columns).to(torch.int64) * rows[:, None]).sum(0)


@cache
def _tables(device: str, rows: int, columns: int) -> _Tables:
    """Weights of `rows` rows and `columns` bytes. They depend on the position alone: a longer table begins with a shorter one."""
    lanes = (_mixed(columns, 2).view(np.int8).reshape(columns, LANES) >> 1).copy()  # of 7 bits: no int8 product saturates
    lanes[:, 0] ^= 1 - (lanes.sum(1, dtype=np.int64) & 1).astype(np.int8)
    row_weights = torch.from_numpy((_mixed(rows, 1) | np.uint64(1)).view(np.int64))
    return _Tables(row_weights.to(device), torch.from_numpy(lanes).to(device), _multiplies_int8(device))


def _room(size: int) -> int:
    return max(4096, 1 << (size - 1).bit_length())


@cache
def _multiplies_int8(device: str) -> bool:
    """Whether this device has an exact int8 matrix product; tried once, because no property says so."""
    left = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).repeat(32).reshape(32, 256)
    right = torch.arange(256 * LANES).remainder(128).sub(64).to(torch.int8).reshape(256, LANES)
    try:
        found = torch._int_mm(left.to(device), right.to(device)).cpu()
    except (RuntimeError, NotImplementedError):
        return False
    return bool(torch.equal(found.to(torch.int64), left.to(torch.int64) @ right.to(torch.int64)))


def _mixed(count: int, stream: int) -> np.ndarray:
    """`count` uint64 of SplitMix64 (Steele, Lea and Flood 2014), a generator whose n-th number needs no other."""
    z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 40)) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@cache
def _name_weights(hf_name: str) -> tuple[int, ...]:
    """One odd number of 64 bits a lane."""
    data = hashlib.blake2b(hf_name.encode(), digest_size=8 * LANES).digest()
    return tuple(int.from_bytes(data[8 * lane : 8 * lane + 8], "little") | 1 for lane in range(LANES))
