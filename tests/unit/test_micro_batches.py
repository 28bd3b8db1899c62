"""Micro-batches come onto the device when a pass comes to them, and leave it when the next one does."""

import weakref
from types import SimpleNamespace

from mrl.rank.packing import MicroBatches


class Laid(SimpleNamespace):
    """A micro-batch that a weak reference can follow."""


def watched(count: int, kept: int = 1) -> tuple[MicroBatches, list[weakref.ref], list[int]]:
    made, numbers = [], []

    def lay_out(number):
        numbers.append(number)
        one = Laid(number=number)
        made.append(weakref.ref(one))
        return one

    return MicroBatches(count, lay_out, kept), made, numbers


def alive(made) -> int:
    """Those that still stand, without a garbage collection: memory of a device is free at once."""
    return sum(ref() is not None for ref in made)


def test_one_at_a_time_is_there_and_each_is_laid_out_once():
    batches, made, numbers = watched(5)
    assert batches[0].number == 0  # a pass looks at the first before it begins
    most = 0
    for inputs in batches:
        most = max(most, alive(made))
        del inputs
    assert (len(batches), numbers, most) == (5, [0, 1, 2, 3, 4], 1)


def test_chunks_that_come_to_the_same_ones_in_turn_share_them():
    """Two chunks in an interleaved pipeline of two stages: micro-batches 0 1, 0 1, then 2 3, 2 3."""
    batches, made, numbers = watched(4, kept=2)
    first, second = iter(batches), iter(batches)
    for chunk in (first, second, first, second):
        next(chunk), next(chunk)
        assert alive(made) <= 2
    assert numbers == [0, 1, 2, 3]
