"""Groups that generation was ahead with, in a checkpoint: what is known of each, its tokens so far, its rewards.

    checkpoints/step-N/manifest.json   trainer.ahead: the ledger, the place in the data, rewards, size and digest of the file
    checkpoints/step-N/groups.npz      columns of all responses that have tokens, by group and index in it

A resumed run goes on with them: nothing is generated twice, nothing is lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from mrl.checkpoint.manifest import file_facts, fsync
from mrl.cluster.stored_samples import StoredSamples
from mrl.data.order import DataCursor
from mrl.data.samples import Samples
from mrl.reward.items import RewardResult
from mrl.schedule.ledger import Ledger
from mrl.train.numbered_prompts import DrawPlace

FILE = "groups.npz"

Key = tuple[int, int]  # number of a group, index of a response in it
Filtered = tuple[int, list[RewardResult]]  # number of a group whose responses do not differ, and its rewards


@dataclass(frozen=True)
class KeptGroups:
    """Between two steps."""

    ledger: Ledger
    place: DrawPlace
    responses: Mapping[Key, StoredSamples]  # one row each
    results: Mapping[Key, RewardResult]
    filtered: Sequence[Filtered]  # dropped, and told of by no step yet

    def write(self, folder: Path) -> dict[str, Any]:
        """Writes the tokens into `folder`; what the manifest has to say of them. Raises OSError for a full disk."""
        keys = sorted(self.responses)
        said = {
            "ledger": self.ledger.to_json(),
            "draw": self.place.draw,
            "cursor": vars(self.place.cursor),
            "responses": [list(key) for key in keys],
            "results": [[*key, asdict(result)] for key, result in sorted(self.results.items())],
            "filtered": [[number, [asdict(result) for result in results]] for number, results in self.filtered],
        }
        if not keys:
            return said
        stored = StoredSamples.joined([self.responses[key] for key in keys])
        numbers = np.array([number for number, _ in keys])
        samples = stored.renumbered(numbers, np.arange(len(keys))).read()  # ids of requests are an accident of their order
        np.savez(folder / FILE, **samples.arrays)
        fsync(folder / FILE)
        return said | {"files": {FILE: file_facts(folder / FILE)}}


def read_kept(folder: Path, said: Mapping[str, Any]) -> KeptGroups:
    """What `write` wrote, tokens in the object store of this node. The file has been compared with its digest, as all of a checkpoint."""
    keys = [tuple(key) for key in said["responses"]]
    responses: dict[Key, StoredSamples] = {}
    if keys:
        with np.load(folder / FILE) as columns:
            samples = Samples(**columns)
        rows = (samples.rows(np.array([i])) for i in range(len(samples)))  # copies, so that each is put alone
        responses = {key: StoredSamples.of(row.numbers, ray.put(row)) for key, row in zip(keys, rows, strict=True)}
    results = {(number, index): RewardResult(**result) for number, index, result in said["results"]}
    place = DrawPlace(said["draw"], DataCursor(**said["cursor"]))
    filtered = [(number, [RewardResult(**result) for result in each]) for number, each in said["filtered"]]
    return KeptGroups(Ledger.from_json(said["ledger"]), place, responses, results, filtered)
