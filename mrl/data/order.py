"""The order of prompts as a pure function of (seed, epoch), and a position in it that is two integers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mrl.data.batch import Prompt
from mrl.data.mixing import mixed_order
from mrl.data.permutation import permutation
from mrl.errors import DataError


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """int64 [size], read-only: the epoch's permutation."""
    order = permutation((seed, epoch), size)
    order.flags.writeable = False
    return order


@dataclass(frozen=True)
class DataCursor:
    """Where the next batch begins: `index` prompts of `epoch` have been drawn. `vars()` of it is its JSON."""

    epoch: int = 0
    index: int = 0


@dataclass(frozen=True)
class PromptStream:
    """Batches of prompts without end; an epoch's rest that does not fill a batch is dropped.

    With `weights`, the sources, `sizes` prompts each and one after another in `prompts`, are mixed in these shares. An epoch is as many
    draws as there are prompts, whatever the weights.
    """

    prompts: Sequence[Prompt]
    batch_size: int
    seed: int
    shuffle: bool = True
    sizes: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        size = len(self.prompts)
        empty = [number for number, (n, weight) in enumerate(zip(self.sizes, self.weights, strict=False)) if weight > 0 and not n]
        if empty:
            raise DataError(
                f"data.train_weights: the file number {empty[0] + 1} of data.train_files has a weight and no prompt that is kept"
            )
        if not 1 <= self.batch_size <= size:
            raise DataError(
                f"data.train_batch_size is {self.batch_size} prompts and the data has {size}; allowed: 1 to {size} (data.gen_batch_size, "
                "where it is set)"
            )

    @property
    def steps_per_epoch(self) -> int:
        return len(self.prompts) // self.batch_size

    def next_batch(self, cursor: DataCursor) -> tuple[list[Prompt], DataCursor]:
        """The batch at `cursor` and the cursor after it, whose epoch is the batch's."""
        size = len(self.prompts)
        if cursor.index + self.batch_size > size:
            cursor = DataCursor(cursor.epoch + 1, 0)
        picked = self._order(cursor.epoch)[cursor.index : cursor.index + self.batch_size]
        return [self.prompts[int(i)] for i in picked], DataCursor(cursor.epoch, cursor.index + self.batch_size)

    def _order(self, epoch: int) -> np.ndarray:
        """int64 [number of prompts]: the epoch's."""
        if self.weights:
            return mixed_order(self.seed, epoch, self.sizes, self.weights, self.shuffle)
        return epoch_order(self.seed, epoch, len(self.prompts)) if self.shuffle else np.arange(len(self.prompts))
