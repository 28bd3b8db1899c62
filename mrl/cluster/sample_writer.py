"""Files of samples are written by a process of their own, from where the responses are."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mrl.cluster.calls import gather_all
from mrl.cluster.stored_samples import StoredSamples
from mrl.data.samples import Samples
from mrl.record.sample_files import ROWS_AT_ONCE, RewardParts, write_samples


class _Writer:
    """The process. It holds few responses at a time."""

    def write(self, folder: Path, step: int, samples: StoredSamples, rewards: Sequence[RewardParts]) -> None:
        write_samples(folder, step, _pieces(samples), rewards)


def _pieces(samples: StoredSamples) -> Iterator[Samples]:
    for first in range(0, len(samples), ROWS_AT_ONCE):
        yield samples.take(np.arange(first, min(first + ROWS_AT_ONCE, len(samples)))).read()


class SampleWriter:
    """Writes `folder/step-N.parquet` beside training, on the node of this process, one step at a time."""

    def __init__(self, folder: Path, timeout_s: float):
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._folder, self._timeout_s, self._under_way = folder, timeout_s, None
        self._writer = ray.remote(_Writer).options(num_cpus=0, scheduling_strategy=here).remote()

    def write(self, step: int, samples: StoredSamples, rewards: Sequence[RewardParts]) -> None:
        """Begins with the step's file once the one before is written. Raises what `finish` raises."""
        self.finish()
        self._under_way = self._writer.write.remote(self._folder, step, samples, rewards)

    def finish(self) -> None:
        """Waits for the file under way. Raises EnvironmentFault for a full disk, Interrupted when it takes too long."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            gather_all({"the writer of samples": under_way}, self._timeout_s, "writing samples")

    def close(self) -> None:
        """Waits for the file under way and ends the process."""
        try:
            self.finish()
        finally:
            ray.kill(self._writer)
