"""Boxes against counting elements one by one."""

import math
import random

import numpy as np
import pytest

from mrl.model.boxes import Box, boxes_of_range, cover_fault, first_overlap, uncovered


def random_box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    return Box(tuple(tuple(sorted(rng.sample(range(size + 1), 2))) for size in shape))


def counts(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """How many boxes cover each element."""
    grid = np.zeros(shape, int)
    for box in boxes:
        grid[box.slices] += 1
    return grid


@pytest.mark.parametrize("shape", [(9,), (5, 7), (4, 3, 5)])
def test_algebra_equals_counting_elements(shape):
    rng = random.Random(len(shape))
    whole = Box.whole(shape)
    for _ in range(200):
        a, b = random_box(rng, shape), random_box(rng, shape)
        both = counts(shape, [a, b])
        common = a.intersect(b)
        assert (both == 2).sum() == (common.volume if common else 0)
        assert a.volume == counts(shape, [a]).sum()
        assert (counts(shape, a.subtract(b)) == np.where(counts(shape, [b]), 0, counts(shape, [a]))).all()
        assert (counts(shape, uncovered(whole, [a, b])) == (both == 0)).all()
        assert a.contains(b) == (common == b)
        assert (first_overlap([a, b]) is not None) == (common is not None)


def test_shift_and_rebase_move_between_frames():
    box = Box(((2, 4), (1, 3)))
    assert box.shift((3, -1)) == Box(((5, 7), (0, 2)))
    # a block called rows 0:4 here is rows 10:14 there
    assert Box(((1, 3), (0, 2))).rebase(Box(((0, 4), (0, 2))), Box(((10, 14), (5, 7)))) == Box(((11, 13), (5, 7)))
    with pytest.raises(ValueError, match="differ in shape"):
        box.rebase(Box(((0, 4), (0, 4))), Box(((0, 4), (0, 5))))


def test_empty_and_negative_boxes_do_not_exist():
    for ranges in (((2, 2),), ((3, 1),), ((-1, 2),)):
        with pytest.raises(ValueError, match="start < stop"):
            Box(ranges)


def test_random_partitions_are_covers_and_every_damage_is_named():
    rng = random.Random(0)
    for _ in range(50):
        whole = Box.whole((12, 10))
        parts = [whole]
        for _ in range(6):
            parts = [piece for part in parts for piece in split(rng, part)]
        rng.shuffle(parts)
        assert cover_fault(whole, parts) is None
        assert "not covered" in cover_fault(whole, parts[1:])
        assert "overlap" in cover_fault(whole, [*parts, parts[0]])
        assert "outside" in cover_fault(whole, [*parts, Box(((11, 13), (0, 1)))])


def test_in_a_grid_of_many_boxes_no_pair_is_compared_and_one_moved_box_is_found(monkeypatch):
    grid = [Box(((8 * row, 8 * row + 8), (column, column + 1))) for row in range(20) for column in range(2000)]
    with monkeypatch.context() as patch:
        patch.setattr(Box, "intersect", lambda *_: pytest.fail("compared"))
        assert first_overlap(grid) is None
    grid[7] = grid[7].shift((4, 0))  # a hole, and as many elements twice
    assert grid[7] in first_overlap(grid)
    assert cover_fault(Box.whole((160, 2000)), grid).endswith("overlap")


def split(rng: random.Random, box: Box) -> list[Box]:
    """Two halves of a box along a random dimension, or the box itself where it is thin."""
    dim = rng.randrange(len(box.ranges))
    low, high = box.ranges[dim]
    if high - low < 2:
        return [box]
    cut = rng.randrange(low + 1, high)
    return [Box((*box.ranges[:dim], side, *box.ranges[dim + 1 :])) for side in ((low, cut), (cut, high))]


@pytest.mark.parametrize("shape", [(7,), (1, 5), (4, 3), (3, 1), (2, 3, 4), (3, 1, 2)])
def test_boxes_of_a_range_are_its_elements_each_once(shape):
    """And few: whole rows are one."""
    size = math.prod(shape)
    for start in range(size + 1):
        for stop in range(start, size + 1):
            found, boxes = np.zeros(shape, int), boxes_of_range(shape, start, stop)
            for box in boxes:
                found[box.slices] += 1
            expected = np.zeros(size, int)
            expected[start:stop] = 1
            assert np.array_equal(found.reshape(-1), expected) and len(boxes) <= 2 * len(shape) - 1
