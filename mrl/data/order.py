"""The order of prompts as a pure function of (seed, epoch), and a position in it that is two integers.

Files with weights are mixed. Which file comes when, and which of its prompts, is a function of (seed, epoch) as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mrl.data.batch import Prompt
from mrl.errors import DataError


@dataclass(frozen=True)
class DataCursor:
    """The position of the next batch: `index` prompts of `epoch` have been drawn. `vars()` of it is its JSON."""

    epoch: int = 0
    index: int = 0


@dataclass(frozen=True)
class PromptStream:
    """Batches of prompts without end. The rest of an epoch that does not fill a batch is dropped.

    With `weights` the sources are mixed in these shares. They have `sizes` prompts each and stand one after another in
    `prompts`. An epoch has as many draws as there are prompts, whatever the weights.
    """

    prompts: Sequence[Prompt]
    batch_size: int
    seed: int
    shuffle: bool = True
    sizes: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        size = len(self.prompts)
        empty = [
            number
            for number, (n, weight) in enumerate(zip(self.sizes, self.weights, strict=False))
            if weight > 0 and not n
        ]
        if empty:
            raise DataError(
                f"data.train_weights: the file number {empty[0] + 1} of data.train_files has a weight "
                "and no prompt that is kept"
            )
        if not 1 <= self.batch_size <= size:
            raise DataError(
                f"data.train_batch_size is {self.batch_size} prompts and the data has {size}; allowed: 1 to {size} "
                "(data.gen_batch_size, where it is set)"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in one pass over the prompts."""
        return len(self.prompts) // self.batch_size

    def batch_number(self, cursor: DataCursor) -> int:
        """Returns the number of the batch at `cursor`, counted from the beginning of the run."""
        if cursor.index + self.batch_size > len(self.prompts):
            return (cursor.epoch + 1) * self.steps_per_epoch
        return cursor.epoch * self.steps_per_epoch + cursor.index // self.batch_size

    def next_batch(self, cursor: DataCursor) -> tuple[list[Prompt], DataCursor]:
        """Returns the batch at `cursor` and the cursor after it, which has the epoch of the batch."""
        size = len(self.prompts)
        if cursor.index + self.batch_size > size:
            cursor = DataCursor(cursor.epoch + 1, 0)
        picked = self._order(cursor.epoch)[cursor.index : cursor.index + self.batch_size]
        return [self.prompts[int(i)] for i in picked], DataCursor(cursor.epoch, cursor.index + self.batch_size)

    def _order(self, epoch: int) -> np.ndarray:
        """Returns the order of an epoch, int64 [number of prompts]."""
        if self.weights:
            return mixed_order(self.seed, epoch, self.sizes, self.weights, self.shuffle)
        if self.shuffle:
            return epoch_order(self.seed, epoch, len(self.prompts))
        return np.arange(len(self.prompts))


def permutation(key: Sequence[int], size: int) -> np.ndarray:
    """Returns a permutation that depends on `key` only, int64 [size].

    It sorts raw words of PCG64, a stream that numpy guarantees never to change. `Generator.permutation` may change.
    """
    draws = np.random.PCG64(np.random.SeedSequence(list(key))).random_raw(size)
    return np.argsort(draws, kind="stable")


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """Returns the permutation of an epoch, int64 [size], read-only."""
    order = permutation((seed, epoch), size)
    order.flags.writeable = False
    return order


def epoch_counts(total: int, weights: Sequence[float]) -> list[int]:
    """Returns how many of an epoch's `total` prompts each source gives, in proportion to `weights`.

    Shares are rounded by largest remainders, so that they add up. Ties go to the first source.
    """
    shares = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda k: (counts[k] - shares[k], k))
    for k in by_remainder[: total - sum(counts)]:
        counts[k] += 1
    return counts


@lru_cache(maxsize=2)
def mixed_order(seed: int, epoch: int, sizes: tuple[int, ...], weights: tuple[float, ...], shuffle: bool) -> np.ndarray:
    """Returns the prompt positions of a mixed epoch, int64 [sum of sizes], read-only.

    Source k holds `sizes[k]` positions, one source after another. Each source runs in passes of its own, also across
    epochs: no prompt comes again before all others of its source. Without shuffle a pass is in file order, and the
    sources alternate as evenly as their weights allow.
    """
    counts = epoch_counts(sum(sizes), weights)
    starts = np.cumsum([0, *sizes[:-1]])
    label = np.repeat(np.arange(len(sizes)), counts)
    if shuffle:
        label = label[permutation((seed, epoch), len(label))]
    else:
        fraction = np.concatenate([(np.arange(c) + 0.5) / c for c in counts if c])
        label = label[np.argsort(fraction, kind="stable")]
    order = np.empty(len(label), np.int64)
    for k, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        order[label == k] = starts[k] + _drawn(seed, k, epoch * count, count, size, shuffle)
    order.flags.writeable = False
    return order


def _drawn(seed: int, source: int, first: int, count: int, size: int, shuffle: bool) -> np.ndarray:
    """Returns the draws `first` to `first + count` of one source's endless stream of passes."""
    if count == 0:
        return np.empty(0, np.int64)
    passes = range(first // size, (first + count - 1) // size + 1)
    orders = []
    for number in passes:
        orders.append(permutation((seed, source, number, 1), size) if shuffle else np.arange(size))
    begin = first - passes[0] * size
    return np.concatenate(orders)[begin : begin + count]
