"""Buckets that nobody takes any more end the export, which holds the parameters on the device."""

from types import SimpleNamespace

import pytest
import torch

from mrl.rank.rank_worker import ActorWorker


class Actor:
    """Exports three tensors; the generator is referred to from here too, as a traceback would refer to it."""

    def __init__(self):
        self.in_use, self.exports = False, []

    def export_hf(self):
        self.exports.append(self._export())
        return self.exports[-1]

    def _export(self):
        self.in_use = True
        try:
            yield from ((name, torch.zeros(4)) for name in "abc")
        finally:
            self.in_use = False


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("taken", [1, None])
def test_an_export_that_is_left_or_ends_gives_the_parameters_back(rank, taken):
    worker = ActorWorker.__new__(ActorWorker)
    worker.actor, worker.rank = Actor(), rank
    worker.config = SimpleNamespace(rollout=SimpleNamespace(fp8_block=0))
    stream = worker.export_buckets(16)
    found = [item for item, _ in zip(stream, range(taken or 99), strict=False)]
    assert len(found) == (0 if rank else taken or 6)  # of each bucket a digest and the bytes
    stream.close()
    assert not worker.actor.in_use
