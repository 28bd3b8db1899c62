"""Boxes: axis-aligned blocks of a tensor's index space, and checks of cover. Integers only."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod


@dataclass(frozen=True, order=True)
class Box:
    """Half-open ranges, one (start, stop) for each dimension; never empty.

    Many copies share a box, so often used properties are kept.
    """

    ranges: tuple[tuple[int, int], ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.ranges)

    def __post_init__(self) -> None:
        for start, stop in self.ranges:  # a loop, as a plan makes hundreds of thousands of boxes
            if not 0 <= start < stop:
                raise ValueError(f"{self.ranges}: every range must satisfy 0 <= start < stop")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """Returns the box of a complete tensor."""
        return cls(tuple((0, size) for size in shape))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Number of elements along each dimension."""
        return tuple(stop - start for start, stop in self.ranges)

    @cached_property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def turned(self) -> "Box":
        """The same box of the transposed tensor."""
        return Box(self.ranges[::-1])

    @cached_property
    def origin(self) -> tuple[int, ...]:
        """Index of the first element."""
        return tuple(start for start, _ in self.ranges)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """The box as an array index."""
        return tuple(slice(start, stop) for start, stop in self.ranges)

    def intersect(self, other: "Box") -> "Box | None":
        """Returns the common part; None if they are disjoint."""
        ranges = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(self.ranges, other.ranges, strict=True))
        if all(start < stop for start, stop in ranges):
            return Box(ranges)
        return None

    def contains(self, other: "Box") -> bool:
        """Tells whether `other`, with the same number of dimensions, is inside."""
        return all(a <= c and d <= b for (a, b), (c, d) in zip(self.ranges, other.ranges, strict=True))

    def shift(self, offsets: Sequence[int]) -> "Box":
        """Moves the box by an offset for each dimension. Raises ValueError for a negative start."""
        return Box(tuple([(start + by, stop + by) for (start, stop), by in zip(self.ranges, offsets, strict=True)]))

    def rebase(self, old: "Box", new: "Box") -> "Box":
        """Moves the box from a frame where a block is `old` to a frame where the same block is `new`.

        Both must have the same shape.
        """
        if old.shape != new.shape:
            raise ValueError(f"{old.ranges} and {new.ranges} differ in shape")
        return self.shift([n - o for o, n in zip(old.origin, new.origin, strict=True)])

    def subtract(self, other: "Box") -> list["Box"]:
        """Returns what remains without `other`, as disjoint boxes."""
        common = self.intersect(other)
        if common is None:
            return [self]
        rest = []
        ranges = list(self.ranges)
        for dim, (start, stop) in enumerate(common.ranges):
            low, high = ranges[dim]
            rest += [
                Box((*ranges[:dim], side, *ranges[dim + 1 :]))
                for side in ((low, start), (stop, high))
                if side[0] < side[1]
            ]
            ranges[dim] = (start, stop)
        return rest


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Returns the elements `start` to `stop` of a tensor in flat order, as disjoint boxes: complete rows, and parts of
    rows before and after them.
    """
    if start >= stop:
        return []
    if len(shape) < 2:
        return [Box(((start, stop),) * len(shape))]
    size = prod(shape[1:])
    # complete rows
    first = -(-start // size)
    last = stop // size
    if first > last:
        return _in_row(shape, last, start, stop)
    rows = []
    if first < last:
        rows = [Box(((first, last), *Box.whole(shape[1:]).ranges))]
    return [*_in_row(shape, first - 1, start, first * size), *rows, *_in_row(shape, last, last * size, stop)]


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    before = row * prod(shape[1:])
    inner = boxes_of_range(shape[1:], start - before, stop - before)
    return [Box(((row, row + 1), *box.ranges)) for box in inner]


def uncovered(whole: Box, boxes: Iterable[Box]) -> list[Box]:
    """Returns the part of `whole` that none of `boxes` covers, as disjoint boxes; empty if they cover it."""
    rest = [whole]
    for box in boxes:
        rest = [piece for part in rest for piece in part.subtract(box)]
    return rest


def first_overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Returns two boxes that share an element, or None if all are disjoint.

    Splitting whole groups along the axes is fast enough for 100,000 boxes of a grid.
    """
    groups = [list(boxes)]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        parts = next((runs for axis in range(len(group[0].ranges)) if len(runs := _runs(group, axis)) > 1), None)
        if parts is not None:
            groups += parts
        elif pair := _first_overlap_of_each(group):
            return pair
    return None


def _runs(boxes: list[Box], axis: int) -> list[list[Box]]:
    """Splits the boxes into groups that do not overlap each other on an axis."""
    runs: list[list[Box]] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box.ranges[axis]):
        start, stop = box.ranges[axis]
        if not runs or start >= end:
            runs.append([])
        runs[-1].append(box)
        end = max(end, stop)
    return runs


def _first_overlap_of_each(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Compares each box with each that overlaps it on the first axis."""
    active: list[Box] = []
    for box in sorted(boxes):
        active = [other for other in active if other.ranges[0][1] > box.ranges[0][0]]
        for other in active:
            if other.intersect(box):
                return other, box
        active.append(box)
    return None


def cover_fault(whole: Box, boxes: Sequence[Box]) -> str | None:
    """Describes why `boxes` do not cover `whole` exactly once; None if they do."""
    if outside := next((box for box in boxes if not whole.contains(box)), None):
        return f"{outside.ranges} lies outside {whole.ranges}"
    if pair := first_overlap(boxes):
        return f"{pair[0].ranges} and {pair[1].ranges} overlap"
    if missing := whole.volume - sum(box.volume for box in boxes):
        return f"{missing} of {whole.volume} elements are not covered, the first at {uncovered(whole, boxes)[0].origin}"
    return None
