"""The digest adds up over every cut, and shows every change: swaps, shifts, repeated and lost boxes,
one flipped bit anywhere.
"""

import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.reshard import digest
from mrl.reshard.digest import MODULUS, add, partial_digest

DTYPES = [torch.float32, torch.bfloat16]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(tensor: torch.Tensor, name: str = "a.weight") -> int:
    return partial_digest(tensor, name, (0,) * tensor.dim())


def cut(shape: tuple[int, ...], rng: random.Random) -> list[tuple[slice, ...]]:
    """A random cut into disjoint boxes: rows first, each strip by columns of its own."""
    if len(shape) == 1:
        ends = sorted({0, shape[0], *(rng.randrange(shape[0]) for _ in range(3))})
        return [(slice(a, b),) for a, b in pairwise(ends)]
    return [(rows, columns) for (rows,) in cut(shape[:1], rng) for (columns,) in cut(shape[1:], rng)]


def by_hand(tensor: torch.Tensor, name: str, origin: tuple[int, int]) -> int:
    """The definition at the head of the module, byte by byte in Python integers."""
    tables = digest._tables("cpu", 4096, 4096)
    size, names, total = tensor.element_size(), digest._name_weights(name), 0
    for i, row in enumerate(tensor.contiguous().view(torch.int8).tolist()):
        for b, byte in enumerate(row):
            lanes = tables.columns[origin[1] * size + b].tolist()
            total += byte * int(tables.rows[origin[0] + i]) * sum(n * c for n, c in zip(names, lanes, strict=True))
    return total % MODULUS


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_sum_that_its_definition_says(dtype):
    block = noise(5, 7, dtype=dtype)
    assert partial_digest(block, "a.weight", (3, 11)) == by_hand(block, "a.weight", (3, 11))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (257,), (37, 53), (300, 128), (3, 70_000), (100_000, 2)])
def test_parts_add_up_to_the_whole_whatever_the_cut(dtype, shape):
    tensor, rng = noise(*shape, dtype=dtype), random.Random(0)
    for _ in range(8):
        parts = [partial_digest(tensor[box], "a.weight", tuple(s.start for s in box)) for box in cut(shape, rng)]
        assert add(parts) == whole(tensor)


def test_storage_does_not_matter_only_orientation():
    tensor = noise(48, 80)
    transposed = tensor.t().contiguous().t()
    padded = torch.zeros(64, 96)
    padded[:48, :80] = tensor
    assert whole(transposed) == whole(tensor) == whole(padded[:48, :80])
    assert whole(tensor.t().contiguous()) != whole(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_counts(dtype):
    tensor = noise(17, 33, dtype=dtype)
    right = whole(tensor)
    for flat in range(0, tensor.numel(), 7):
        for bit in range(8 * tensor.element_size()):
            changed = tensor.clone()
            changed.view(torch.uint8).view(-1)[flat * tensor.element_size() + bit // 8] ^= 1 << (bit % 8)
            assert whole(changed) != right, f"element {flat}, bit {bit}"


def test_the_weight_of_every_byte_is_odd_so_that_no_change_within_a_byte_can_hide():
    tables = digest._tables("cpu", 4096, 1 << 17)
    assert bool((tables.rows & 1).all())
    assert bool((tables.columns.sum(1, dtype=torch.int64) & 1).all())
    assert all(weight & 1 for weight in digest._name_weights("a.weight"))


def test_weights_of_two_positions_are_never_the_same():
    tables = digest._tables("cpu", 1 << 18, 1 << 17)
    assert len(tables.rows.unique()) == 1 << 18
    assert len(tables.columns.unique(dim=0)) == 1 << 17
    assert tables.columns.min() >= -64, "eight bits would saturate in int8 products of older processors"


@pytest.mark.parametrize("dtype", DTYPES)
def test_swapped_tensors_show(dtype):
    """gate with up, q with k, one expert with another: each block is sound, only its name is wrong."""
    a, b = noise(16, 32, dtype=dtype, seed=1), noise(16, 32, dtype=dtype, seed=2)
    pairs = [("gate_proj", "up_proj"), ("q_proj", "k_proj"), ("experts.3.gate_proj", "experts.4.gate_proj")]
    for one, other in pairs:
        assert add([whole(a, one), whole(b, other)]) != add([whole(b, one), whole(a, other)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_that_moved_show(dtype):
    tensor = noise(64, 48, dtype=dtype)
    right = whole(tensor)
    moved = {
        "rows": tensor.roll(1, 0),
        "columns": tensor.roll(1, 1),
        "two rows": tensor[[1, 0, *range(2, 64)]],
        "two columns": tensor[:, [1, 0, *range(2, 48)]],
        "halves": torch.cat([tensor[32:], tensor[:32]]),
        "heads": tensor.view(4, 16, 48)[[0, 2, 1, 3]].reshape(64, 48),
        "transposed block": torch.cat([tensor[:48].t(), tensor[48:]]),
    }
    assert [name for name, other in moved.items() if whole(other) == right] == []
    assert partial_digest(tensor, "a.weight", (1, 0)) != right != partial_digest(tensor, "a.weight", (0, 1))


def test_lost_and_repeated_boxes_show():
    tensor = noise(64, 48)
    boxes = [partial_digest(tensor[r : r + 16], "a.weight", (r, 0)) for r in range(0, 64, 16)]
    assert add(boxes) == whole(tensor)
    assert add(boxes[:-1]) != whole(tensor) != add([*boxes, boxes[0]])
    overwritten = torch.cat([tensor[:16], tensor[:16], tensor[32:]])
    assert whole(overwritten) != whole(tensor)


def test_a_stale_block_shows():
    old, new = noise(64, 48, seed=1), noise(64, 48, seed=2)
    assert whole(torch.cat([new[:63], old[63:]])) != whole(new)


def test_random_small_damage_always_shows_even_in_rounded_values():
    """fp32 values that came from bf16 have 16 zero bits each: damage then lives in few bits,
    the hardest case for a sum.
    """
    tensor, rng = noise(64, 48).bfloat16().float(), random.Random(0)
    right = whole(tensor)
    for _ in range(2000):
        changed = tensor.clone()
        i, j, k, m = (rng.randrange(n) for n in (64, 48, 64, 48))
        changed[i, j], changed[k, m] = tensor[k, m], tensor[i, j]
        assert (whole(changed) == right) == bool(torch.equal(changed, tensor))


def test_digests_spread_over_all_bits():
    seen = [whole(noise(4, 4, seed=s)) for s in range(400)]
    for bit in range(64):
        ones = sum(value >> bit & 1 for value in seen)
        assert 120 < ones < 280, f"bit {bit} is set in {ones} of 400"  # 8 standard deviations


def test_a_device_without_an_int8_product_gives_the_same_number(monkeypatch):
    tensor = noise(70, 50, dtype=torch.bfloat16)
    right = partial_digest(tensor, "a.weight", (9, 5))
    monkeypatch.setattr(digest, "_tables", lambda *of: digest._Tables(*_original(*of)[:2], False))
    assert partial_digest(tensor, "a.weight", (9, 5)) == right


_original = digest._tables


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(5, 8, 6), (3, 900, 700), (2, 3, 70_000)], ids=["several at once", "larger than a tile", "wide"]
)
def test_blocks_of_many_tensors_taken_together_are_those_taken_alone(dtype, shape):
    blocks = noise(shape[0], 2 * shape[1], shape[2], dtype=dtype)[:, shape[1] :]  # with gaps, as the second half of w13
    together = digest.lane_sums_of_each(blocks, (4, 2)).tolist()
    assert [digest.combine(sums, f"e{i}") for i, sums in enumerate(together)] == [
        partial_digest(block, f"e{i}", (4, 2)) for i, block in enumerate(blocks)
    ]


def tiles(blocks: torch.Tensor, kind: str) -> list[tuple[torch.Tensor, bool]]:
    """Every tile's bytes, and whether it is a view of the blocks."""
    # its start, not the blocks': memory after its end belongs to others, such as the copies
    storage = blocks.untyped_storage()
    memory = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    return [
        (tile.clone(), tile.data_ptr() in memory)
        for tile in digest._tiles(blocks, blocks.dtype, kind, digest._DEVICE_TILE_BYTES)
    ]


def test_off_cpu_blocks_that_lie_end_to_end_are_not_copied(monkeypatch):
    blocks = noise(6, 40, 30, dtype=torch.bfloat16)
    assert [(len(tile), is_view) for tile, is_view in tiles(blocks, "npu")] == [(240, True)]
    assert [is_view for _, is_view in tiles(blocks[:, :, 5:20], "npu")] == [True], "columns alone"
    monkeypatch.setattr(digest, "_DEVICE_TILE_BYTES", 100 * 60)
    found = tiles(blocks, "npu")
    assert [(len(tile), is_view) for tile, is_view in found] == [(96, True), (96, True), (48, True)], "across blocks"
    assert torch.equal(torch.cat([tile for tile, _ in found]), blocks.view(240, 30).view(torch.int8))


def test_off_cpu_blocks_with_gaps_are_copied_through_little_memory(monkeypatch):
    half = noise(6, 80, 30, dtype=torch.bfloat16)[:, 40:]  # as the second half of w13
    monkeypatch.setattr(digest, "_DEVICE_COPY_BYTES", 100 * 60)
    found = tiles(half, "npu")
    assert [(len(tile), is_view) for tile, is_view in found] == [(80, False)] * 3
    assert torch.equal(torch.cat([tile for tile, _ in found]), half.reshape(240, 30).view(torch.int8))


def test_on_cpu_only_narrow_rows_with_gaps_and_small_blocks_apart_are_copied():
    blocks = noise(6, 40, 30)
    assert [is_view for _, is_view in tiles(blocks, "cpu")] == [True], "end to end"
    assert [is_view for _, is_view in tiles(noise(2, 400, 1500), "cpu")] == [True] * 3, "end to end, a tile at a time"
    assert [is_view for _, is_view in tiles(noise(6, 80, 30)[:, 40:], "cpu")] == [False], "small, with gaps between"
    assert [is_view for _, is_view in tiles(blocks[:, :, :20], "cpu")] == [False], "narrow, with gaps between rows"
    assert [is_view for _, is_view in tiles(noise(1, 400, 1500)[:, :, 100:], "cpu")] == [True] * 2, "wide"


def test_on_cpu_each_large_block_is_read_where_it_lies():
    halves = noise(3, 800, 200)[:, 400:]  # 320 KB each, as the second half of w13
    found = tiles(halves, "cpu")
    assert [(len(tile), is_view) for tile, is_view in found] == [(400, True)] * 3
    assert torch.equal(torch.cat([tile for tile, _ in found]), halves.reshape(1200, 200).view(torch.int8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 70_000], ids=["narrow", "wider than one sum"])
def test_one_product_over_the_rows_of_several_tensors_gives_the_digest_of_each(dtype, width):
    """Gate and up of three experts lie one above the other."""
    blocks = noise(3, 12, width, dtype=dtype)
    sums = digest.row_sums(blocks, 5)
    for name, rows, first in (("gate", slice(0, 4), 9), ("up", slice(4, 12), 2)):
        names = tuple(f"{e}.{name}" for e in range(3))
        found = int(digest.digest_of_rows(sums[:, rows], first, names)) % MODULUS
        assert found == add(partial_digest(blocks[e, rows], names[e], (first, 5)) for e in range(3))
    with pytest.raises(ValueError, match="3 blocks need as many names, not 1"):
        digest.digest_of_rows(sums, 0, ("one",))


@pytest.mark.parametrize(
    "shape", [(9, 33), (700, 1030), (50,)], ids=["several a tile", "larger than a tile", "vectors"]
)
def test_boxes_of_several_tensors_in_the_engines_dtype_are_those_taken_alone(shape):
    blocks = [noise(*shape, seed=i) for i in range(5)]
    names, origin = [f"e{i}" for i in range(5)], (3, 8)[: len(shape)]
    assert digest.partial_digests(blocks, names, origin, torch.bfloat16) == [
        partial_digest(block.bfloat16(), name, origin) for block, name in zip(blocks, names, strict=True)
    ]


def test_a_convolution_of_single_channels_is_the_matrix_without_the_dimension_between():
    kernel = noise(24, 1, 4)
    assert whole(kernel) == whole(kernel[:, 0])
    parts = [partial_digest(kernel[rows], "a.weight", (rows.start, 0, 0)) for rows in (slice(0, 7), slice(7, 24))]
    columns = [
        partial_digest(kernel[..., :3], "a.weight", (0, 0, 0)),
        partial_digest(kernel[..., 3:], "a.weight", (0, 0, 3)),
    ]
    assert add(parts) == add(columns) == whole(kernel)
    swapped = kernel.clone()
    swapped[[3, 5]] = swapped[[5, 3]]
    assert whole(swapped) != whole(kernel)


def test_rows_of_a_convolution_of_several_channels_add_up_as_those_of_its_matrix():
    kernel = torch.randn(6, 3, 2, 4, 4)
    parts = [partial_digest(kernel[first : first + 2], "a.weight", (first, 0, 0, 0, 0)) for first in (0, 2, 4)]
    assert add(parts) == partial_digest(kernel.flatten(1), "a.weight", (0, 0))


@pytest.mark.parametrize(
    ("shape", "origin"), [((2, 2, 2), (0, 0, 1)), ((2, 1, 2), (0, 1, 0)), ((2, 2), (0,)), ((), ())]
)
def test_other_shapes_are_refused(shape, origin):
    with pytest.raises(ValueError, match="single channels"):
        partial_digest(torch.zeros(shape), "a.weight", origin)


def seconds(work: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    began = time.perf_counter()
    work(tensor)
    return time.perf_counter() - began


def test_it_is_fast_enough_to_run_every_sync():
    """Against a copy of the same bytes, which a busy machine slows down as much: a digest takes 0.4 of it,
    without an int8 product 145. A processor without instructions for that product (AVX2 alone) takes 7.
    """
    flags = Path("/proc/cpuinfo").read_text().split()
    most = 4 if {"avx512_vnni", "avx_vnni"} & set(flags) else 20
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tensor = noise(4096, 4096)
    digests, copies = zip(*[(seconds(whole, tensor), seconds(torch.clone, tensor)) for _ in range(6)], strict=True)
    torch.set_num_threads(threads)
    assert min(digests) < most * min(copies)


class Largest(TorchDispatchMode):
    """Bytes of the largest int64 tensor that was made."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        if isinstance(answer, torch.Tensor) and answer.dtype is torch.int64:
            self.nbytes = max(self.nbytes, answer.numel() * answer.element_size())
        return answer


@pytest.fixture
def without_int8_product(monkeypatch):
    """As torch_npu is: rows are used as they lie, and there is no product of int8 matrices."""
    tiles = digest._tiles
    monkeypatch.setattr(digest, "_tiles", lambda blocks, dtype, kind, largest: tiles(blocks, dtype, "npu", largest))
    monkeypatch.setattr(digest, "_multiplies_int8", lambda device: False)
    digest._tables.cache_clear()
    yield
    digest._tables.cache_clear()


def test_a_device_without_an_int8_product_needs_little_memory_for_the_same_digest(request, monkeypatch):
    assert 8 * digest._EXPANDED_TILE_BYTES == 64 << 20  # bytes that become int64
    monkeypatch.setattr(digest, "_EXPANDED_TILE_BYTES", 1 << 17)
    block = noise(512, 2048, dtype=torch.bfloat16)
    expected = whole(block)
    request.getfixturevalue("without_int8_product")
    with Largest() as largest:
        assert whole(block) == expected
    assert largest.nbytes == 8 << 17
