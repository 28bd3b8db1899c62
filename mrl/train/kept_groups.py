"""Groups that generation was ahead with, in a checkpoint: what is known of each, its tokens so far, its rewards.

    checkpoints/step-N/manifest.json   trainer.ahead: ledger, place in the data, rewards, size and digest of each file
    checkpoints/step-N/group-N.npz     columns of a group's responses that have tokens, by their index in it

A resumed run goes on with them: nothing is generated twice, nothing is lost. Tokens pass through no process but the one
that writes them, one group at a time; those of finished groups are on the disk before anybody saves (spool.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mrl.checkpoint.group_files import group_file, read_group
from mrl.checkpoint.manifest import check_digest
from mrl.cluster.reward_texts import with_texts
from mrl.cluster.stored_samples import StoredSamples
from mrl.data.order import DataCursor
from mrl.data.samples import column_bytes
from mrl.reward.items import RewardResult
from mrl.schedule.groups import State
from mrl.schedule.ledger import Ledger
from mrl.train.numbered_prompts import DrawPlace
from mrl.train.spool import Spool

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
    spool: Spool

    def bytes_to_write(self, route_bytes: int) -> int:
        """At most, beside what the spool has. `route_bytes`: of a token's routes, as they come with samples."""
        rows = [part.rows for (number, _), part in self.responses.items() if not self.spool.holds(number)]
        return sum(
            column_bytes(int(response.prompt_lengths[0]), int(response.response_lengths[0]), route_bytes)
            for response in rows
        )

    def write(self, folder: Path) -> dict[str, Any]:
        """Writes the tokens into `folder`; what the manifest has to say of them.

        Raises EnvironmentFault for a full disk.
        """
        groups = by_group(self.responses)
        files = self.spool.write(folder, {number: of_group(number, parts) for number, parts in groups.items()})
        keys = sorted(self.results)
        said = {
            "ledger": self.ledger.to_json(),
            "draw": self.place.draw,
            "cursor": vars(self.place.cursor),
            "responses": [list(key) for key in sorted(self.responses)],
            "results": [
                [*key, said] for key, said in zip(keys, _said([self.results[key] for key in keys]), strict=True)
            ],
            "filtered": [[number, _said(results)] for number, results in self.filtered],
        }
        return said | {"files": files}


def _said(results: Sequence[RewardResult]) -> list[dict[str, Any]]:
    """With all texts: a checkpoint outlives whoever has them."""
    return [asdict(result) for result in with_texts(results)]


def by_group(responses: Mapping[Key, StoredSamples]) -> dict[int, dict[int, StoredSamples]]:
    """Responses of each group by their index in it, groups and indices in order."""
    groups: dict[int, dict[int, StoredSamples]] = {}
    for number, index in sorted(responses):
        groups.setdefault(number, {})[index] = responses[number, index]
    return groups


def of_group(number: int, parts: Mapping[int, StoredSamples]) -> StoredSamples:
    """The responses of one group, under its number and their index in it:
    ids of requests are an accident of their order.
    """
    return StoredSamples.joined(list(parts.values())).renumbered(np.full(len(parts), number), np.array(list(parts)))


def read_kept(folder: Path, said: Mapping[str, Any], spool: Spool) -> KeptGroups:
    """What `write` wrote, tokens in the object store of this node, read group by group.

    Raises DamagedCheckpoint for a file that is not what was written.
    """
    responses: dict[Key, StoredSamples] = {}
    ledger = Ledger.from_json(said["ledger"])
    finished = {group.number for group in ledger.groups if group.state is State.FINISHED}
    for number in sorted({number for number, _ in said["responses"]}):
        check_digest(folder, name := group_file(number), said["files"])
        samples = read_group(folder / name)
        if number in finished:
            spool.take_over(number, folder / name, said["files"][name])
        rows = (samples.rows(np.array([i])) for i in range(len(samples)))  # copies, so that each is put alone
        responses |= {(number, int(row.sample_id[0])): StoredSamples.put_here(row) for row in rows}
    results = {(number, index): RewardResult(**result) for number, index, result in said["results"]}
    place = DrawPlace(said["draw"], DataCursor(**said["cursor"]))
    filtered = [(number, [RewardResult(**result) for result in each]) for number, each in said["filtered"]]
    return KeptGroups(ledger, place, responses, results, filtered, spool)
