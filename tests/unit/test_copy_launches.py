"""Copies of a weight sync are grouped: the same bytes in few launches, counted as a device would launch them."""

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mrl.reshard.copies import copy_all

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("copy_launches", ROOT / "scripts" / "bench" / "copy_launches.py")
bench = sys.modules["copy_launches"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench)
Launches = bench.Launches


def blocks(memory: Tensor, pieces: Iterable[tuple[int, tuple[int, ...]]]) -> list[Tensor]:
    """Contiguous ones in `memory`, by first element and shape."""
    found = []
    for first, shape in pieces:
        number = torch.Size(shape).numel()
        found.append(memory[first : first + number].view(shape))
    return found


CASES = {
    "adjacent on both sides": ([(0, (2, 3)), (6, (4,)), (10, (2,))], [(3, (2, 3)), (9, (4,)), (13, (2,))], 1),
    "adjacent on one side": ([(0, (2,)), (2, (2,))], [(0, (2,)), (4, (2,))], 1),
    "backwards": ([(4, (2,)), (2, (2,))], [(4, (2,)), (2, (2,))], 1),
    "two runs": ([(0, (2,)), (2, (2,)), (8, (1,)), (9, (1,))], [(4, (2,)), (6, (2,)), (1, (1,)), (2, (1,))], 1),
}


@pytest.mark.parametrize(("there", "here", "launches"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_is_copied_once_and_nothing_beside_them(there, here, launches, dtype):
    target, source = torch.full((20,), -1.0, dtype=dtype), torch.arange(20, dtype=dtype)
    expected = target.clone()
    for into, out in zip(blocks(expected, there), blocks(source, here), strict=True):
        into.copy_(out)
    with Launches() as seen:
        copy_all(blocks(target, there), blocks(source, here))
    assert torch.equal(target, expected) and seen.number == launches


@pytest.mark.parametrize("converted", [False, True])
def test_what_is_strided_or_converted_arrives_beside_what_is_not(converted):
    kind = torch.bfloat16 if converted else torch.float32
    target, expected = torch.zeros(8, 6, dtype=kind), torch.zeros(8, 6, dtype=kind)
    source = torch.arange(48.0).view(8, 6)
    rows = [(slice(0, 2), slice(None)), (slice(2, 4), slice(None))]
    cuts = [*rows, (slice(4, 8), slice(0, 3)), (slice(4, 8), slice(3, 6))]
    for cut in cuts:
        expected[cut] = source[cut].to(kind)
    copy_all([target[cut] for cut in cuts], [source[cut] for cut in cuts])
    assert torch.equal(target, expected)
    turned = torch.zeros(6, 8)
    copy_all([turned.t()[cut] for cut in cuts], [source[cut] for cut in cuts])
    assert torch.equal(turned, source.t())


def test_formats_and_memories_are_not_joined():
    """Neighbours by number alone: in other memory, or with elements of another size."""
    one, two = torch.zeros(4), torch.zeros(4)
    wide = torch.arange(8.0)
    copy_all([one[:4], two[:4]], [wide[:4], wide[4:]])
    assert one.tolist() == [0, 1, 2, 3] and two.tolist() == [4, 5, 6, 7]
    memory = torch.zeros(16, dtype=torch.uint8)
    halves, singles = memory[:4].view(torch.bfloat16), memory[8:16].view(torch.float32)
    copy_all([halves, singles], [torch.ones(2, dtype=torch.bfloat16), torch.full((2,), 2.0)])
    assert halves.tolist() == [1, 1] and singles.tolist() == [2, 2]


LIMITS = {
    "cut": 2000,
    "spread": 720,
}  # of the second 500 is wanted, a goal that docs/source/claims.yaml lists as missed


@pytest.mark.parametrize(("experts", "limit"), LIMITS.items())
def test_a_worker_of_235b_launches_few_copies_in_a_sync(experts, limit):
    """Experts are cut for every worker, or spread over the workers."""
    copies, launches = bench.of_model(bench.ENGINES[experts])
    assert launches <= limit and copies > 9000, (copies, launches)
