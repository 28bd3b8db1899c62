"""An epoch's order over several files with weights, as a pure function of (seed, epoch): who comes when, and which prompt of it."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from mrl.data.permutation import permutation


def epoch_counts(total: int, weights: Sequence[float]) -> list[int]:
    """How many of an epoch's `total` prompts each source gives: largest remainders, so that they add up; ties go to the first."""
    shares = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda k: (counts[k] - shares[k], k))
    for k in by_remainder[: total - sum(counts)]:
        counts[k] += 1
    return counts


@lru_cache(maxsize=2)
def mixed_order(seed: int, epoch: int, sizes: tuple[int, ...], weights: tuple[float, ...], shuffle: bool) -> np.ndarray:
    """int64 [sum of sizes], read-only: prompt positions of an epoch, where source k holds `sizes[k]` positions, one source after another.

    Each source is gone through in passes of its own, every prompt of it once before any comes again, also across epochs. Without shuffle a
    pass is in file order and the sources alternate as evenly as their weights allow.
    """
    counts = epoch_counts(sum(sizes), weights)
    starts = np.cumsum([0, *sizes[:-1]])
    label = np.repeat(np.arange(len(sizes)), counts)
    if shuffle:
        label = label[permutation((seed, epoch), len(label))]
    else:
        place = np.concatenate([(np.arange(c) + 0.5) / c for c in counts if c])
        label = label[np.argsort(place, kind="stable")]
    order = np.empty(len(label), np.int64)
    for k, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        order[label == k] = starts[k] + _drawn(seed, k, epoch * count, count, size, shuffle)
    order.flags.writeable = False
    return order


def _drawn(seed: int, source: int, first: int, count: int, size: int, shuffle: bool) -> np.ndarray:
    """The draws `first` to `first + count` of one source's endless stream of passes."""
    if count == 0:
        return np.empty(0, np.int64)
    passes = range(first // size, (first + count - 1) // size + 1)
    whole = np.concatenate([permutation((seed, source, number, 1), size) if shuffle else np.arange(size) for number in passes])
    begin = first - passes[0] * size
    return whole[begin : begin + count]
