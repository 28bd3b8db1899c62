"""Micro-batches of a pass, laid out and brought onto the device as the pass comes to them.

Laid out all at once they would have the routes of a whole step on the device: hundreds of bytes a token. The chunks of
an interleaved pipeline come to the same micro-batch one after the other, `kept` micro-batches apart at most.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

from torch import Tensor

from mrl.megatron.packing import MicroInputs


class MicroBatches:
    """A pass iterates over it, once for each chunk."""

    def __init__(self, count: int, lay_out: Callable[[int], MicroInputs[Tensor]], kept: int = 1):
        """`lay_out` gives a micro-batch by its number; `kept`: of the newest, so many are not laid out again."""
        self._count, self._lay_out, self._limit = count, lay_out, kept
        self._kept: OrderedDict[int, MicroInputs[Tensor]] = OrderedDict()
        self.with_log_probs: dict[
            int, Tensor
        ] = {}  # of those laid out: bool [rows, response_length]; see MicroInputs.has_log_probs

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[MicroInputs[Tensor]]:
        return map(self.__getitem__, range(self._count))

    def __getitem__(self, number: int) -> MicroInputs[Tensor]:
        if number not in self._kept:
            while len(self._kept) >= self._limit:
                self._kept.popitem(last=False)  # first, so that its memory is free
            self._kept[number] = self._lay_out(number)
            self.with_log_probs[number] = self._kept[number].has_log_probs
        return self._kept[number]
