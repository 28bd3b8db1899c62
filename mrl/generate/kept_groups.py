"""Live groups of generation in a checkpoint: the state of each, its tokens so far, and its rewards.

    checkpoints/step-N/manifest.json     trainer.ahead: ledger, place in the data, size and digest of each file
    checkpoints/step-N/group-N.A.npz     one record a group: attempt, responses that have tokens, rewards that are there

A resumed run continues with them, so nothing is generated twice or lost. Only the process that writes tokens handles
them, one group at a time. Finished groups are on the disk before a save (spool.py).

The manifest also says what made them (sampled_by.py). A start with other inputs mixes nothing:

    other rewards              rewards are asked for again, filtered groups are generated again; tokens are kept
    anything else, or unknown  all groups are generated again, by the present weights
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from mrl.checkpoint.group_files import GroupRecord, group_file, read_group
from mrl.checkpoint.manifest import check_digest, file_facts
from mrl.data.order import DataCursor
from mrl.data.samples import LEFT_OUT, STOP_REASONS, Samples
from mrl.errors import DamagedCheckpoint, DataError
from mrl.generate.group_writer import GroupParts
from mrl.generate.numbered_prompts import PromptCursor
from mrl.generate.sampled_by import SampledBy
from mrl.generate.spool import Spool, SpoolFile
from mrl.reward.items import UNJUDGED, RewardResult, is_failure
from mrl.schedule.groups import Group, State
from mrl.schedule.ledger import Ledger, begun_anew, reissued
from mrl.store.response_store import ResponseStore
from mrl.store.reward_texts import with_texts

REWARDS = "rewards"

Filtered = tuple[int, list[RewardResult]]  # number of a group whose responses do not differ, and its rewards


@dataclass(frozen=True)
class KeptGroups:
    """A snapshot between two steps.

    It keeps its groups and files until `release`, whatever happens to the live groups.
    """

    ledger: Ledger
    position: PromptCursor
    groups: Mapping[int, GroupParts]  # by number: those that have a response
    filtered: Sequence[Filtered]  # dropped groups that no step has reported yet
    files: Mapping[int, SpoolFile]  # by number: those of finished groups in the spool
    spool: Spool
    origin: SampledBy  # of the groups' tokens, apart from their versions, and of all rewards

    @classmethod
    def of(
        cls,
        ledger: Ledger,
        position: PromptCursor,
        groups: Mapping[int, GroupParts],
        filtered: Sequence[Filtered],
        spool: Spool,
        origin: SampledBy,
    ) -> "KeptGroups":
        """Makes a snapshot, and pins the files of groups that the ledger has as finished."""
        finished = [group.number for group in ledger.groups if group.state is State.FINISHED]
        return cls(ledger, position, groups, filtered, spool.pinned(finished), spool, origin)

    def hold(self) -> None:
        """Adds a user, until `release`."""
        self.spool.hold(self.files.values())

    def release(self) -> None:
        """Releases the spool's files, once they are written or dropped."""
        self.spool.release(self.files.values())

    def bytes(self, route_bytes: int) -> int:
        """Returns an upper bound of the bytes of all its responses in object stores.

        `route_bytes`: bytes of one token's routes in samples.
        """
        return sum(parts.bytes(route_bytes) for parts in self.groups.values())

    def bytes_to_write(self, route_bytes: int) -> int:
        """Returns an upper bound of the bytes to write in addition to the spool's.

        `route_bytes`: bytes of one token's routes in samples.
        """
        return sum(parts.bytes(route_bytes) for number, parts in self.groups.items() if number not in self.files)

    def write(self, folder: Path) -> dict[str, Any]:
        """Writes the tokens into `folder`. Returns the manifest's entries for them.

        Raises EnvironmentFault for a full disk.
        """
        files = self.spool.write(folder, self.files, self.groups)
        return {
            "ledger": self.ledger.to_json(),
            "draw": self.position.draw,
            "cursor": vars(self.position.cursor),
            "filtered": [[number, _said(results)] for number, results in self.filtered],
            "files": files,
            "sampled_by": asdict(self.origin),
        }


def _said(results: Sequence[RewardResult]) -> list[dict[str, Any]]:
    """Returns results with all their texts, because a checkpoint outlives the processes that hold them."""
    return [asdict(result) for result in with_texts(results)]


# has the images with these names in the run directory, and returns False where one cannot be had
HasImages = Callable[[Collection[str]], bool]


def read_kept(
    folder: Path, said: Mapping[str, Any], spool: Spool, origin: SampledBy, has_images: HasImages | None = None
) -> KeptGroups:
    """Reads the files of `write`, group by group. Tokens go into the object store of this node.

    `origin`: what makes responses and rewards from now on. What was made otherwise is left out, with a message.
    `has_images`: asked for each group that has images; None where no group has some. A group whose images are lost
    begins again, with a message.

    Failed rewards are left out and requested again. Groups with log-probs that are not finite begin again, and so do
    those whose environment failed. Otherwise they would end the resumed run as they ended this one. Groups that were
    filtered because of such rewards are left out too.

    Raises DamagedCheckpoint for a file that differs from what was written, or from the ledger's counts.
    """
    ledger = Ledger.from_json(said["ledger"])
    recorded = [(number, [RewardResult(**result) for result in each]) for number, each in said["filtered"]]
    filtered = [(number, results) for number, results in recorded if not any(map(_misleads, results))]
    why = _differences(said, origin)
    is_judged = not why
    if why:
        if why != [REWARDS]:
            ledger = begun_anew(ledger)
        _log_differences(folder, why, ledger, len(recorded))
        ledger = reissued(ledger, [number for number, _ in recorded])
        filtered = []
    there = [group for group in ledger.groups if group_file(group.number, group.attempts) in said["files"]]
    reader = _GroupReader(folder, said["files"], spool, is_judged, has_images)
    read = {group.number: reader.parts(group) for group in there}
    if reader.without_images:
        print(
            f"{folder.name}: {reader.without_images} groups on their way are generated again: images that they show "
            f"are not, or no longer, in {folder.parents[1]}",
            flush=True,
        )
    groups = {number: parts for number, parts in read.items() if parts is not None}
    # without tokens, for the step that each was issued for
    ledger = begun_anew(ledger, read.keys() - groups.keys())
    _check_tokens(folder, ledger, groups)
    position = PromptCursor(said["draw"], DataCursor(**said["cursor"]))
    return KeptGroups.of(ledger, position, groups, filtered, spool, origin)


def _differences(said: Mapping[str, Any], origin: SampledBy) -> list[str]:
    """Returns names of what made the groups and differs from `origin`."""
    made_by = SampledBy(**said["sampled_by"])
    differing = made_by.differing(origin)
    if made_by.rewards != origin.rewards:
        differing.append(REWARDS)
    return differing


def _log_differences(folder: Path, why: Sequence[str], ledger: Ledger, filtered: int) -> None:
    judged = sum(group.tokens > 0 for group in ledger.groups)
    if why == [REWARDS]:
        what = f"of {judged} groups on their way rewards are asked for again, and {filtered} filtered groups are "
    else:
        what = f"{len(ledger.groups)} groups on their way and {filtered} filtered ones are "
    print(f"{folder.name}: {what}generated again: they were made by other {' and '.join(why)}", flush=True)


def read_left(spool: Spool, most: int, route_bytes: int) -> dict[int, GroupParts]:
    """Reads the groups in `spool.left` by number, and puts their tokens into the object store of this node.

    Together they have at most `most` bytes. `route_bytes`: bytes of one token's routes. Groups are left out, with a
    message, that are damaged, are files of another version, or do not fit. So are those with log-probs that are not
    finite or an environment that failed. Failed rewards are left out and requested again. If code, settings or rows of
    the reward have changed, all rewards are.
    """
    groups: dict[int, GroupParts] = {}
    left_out: Counter[str] = Counter()
    unjudged = sum(not file.is_judged for file in spool.left.values())
    if unjudged:
        print(
            f"rewards of {unjudged} groups in {spool.folder.parent} are asked for again: the reward is another",
            flush=True,
        )
    for number in sorted(spool.left):
        try:
            record = _whole_record(number, spool.left[number])
            parts = _parts(_judged(record, spool.left[number].is_judged))
            most -= parts.bytes(route_bytes)
            if most < 0:
                raise DataError("the object store has no room for them")
        except DataError as why:
            left_out[str(why)] += 1
            spool.give_up([number])
            continue
        groups[number] = parts
        if len(parts.results) < len(record.results):  # the group will differ from its file
            spool.give_up([number])
    for why, count in left_out.items():
        print(f"{count} groups in {spool.folder.parent} are generated again: {why}", flush=True)
    return groups


def _whole_record(number: int, file: SpoolFile) -> GroupRecord:
    """Returns the record of a group. Raises DataError if it is unusable."""
    try:
        facts = file_facts(file.path)
    except OSError as error:
        raise DataError(f"their files cannot be read ({error.strerror})") from error
    if facts != file.facts:
        raise DataError("their files are not what was written")
    try:
        record = read_group(file.path)
    except (TypeError, KeyError, ValueError, BadZipFile) as error:
        raise DataError("their files are of another version") from error
    if (record.number, file.path.name) != (number, group_file(number, record.attempt)) or record.samples is None:
        raise DataError("their files belong to other groups")
    if not record.samples.finite.all():
        raise DataError("they have log-probs that are not finite")
    if _is_unjudged(record.samples).any():
        raise DataError("their environment failed")
    return record


def _judged(record: GroupRecord, keeps: bool) -> GroupRecord:
    """Returns the record with its valid rewards."""
    results = {index: result for index, result in record.results.items() if keeps and not is_failure(result)}
    return replace(record, results=results)


def _misleads(result: RewardResult) -> bool:
    return is_failure(result) or result.reason in UNJUDGED


@dataclass
class _GroupReader:
    """Reads groups of a checkpoint. `is_judged`: whether their rewards hold."""

    folder: Path
    files: Mapping[str, Any]  # as in a manifest
    spool: Spool
    is_judged: bool
    has_images: HasImages | None
    without_images: int = 0  # groups that begin again since images of theirs are lost

    def parts(self, group: Group) -> GroupParts | None:
        """Returns the stored parts of the group; None if it must begin again."""
        name = group_file(group.number, group.attempts)
        check_digest(self.folder, name, self.files)
        record = read_group(self.folder / name)
        if record.samples is not None and _is_unjudged(record.samples).any():
            return None
        if record.samples is not None and not self._has_images_of(record.samples):
            self.without_images += 1
            return None
        judged = _judged(record, self.is_judged)
        if len(judged.results) < len(record.results):  # the reason for failed rewards may be gone
            group.state = State.RUNNING
        elif group.state is State.FINISHED:
            self.spool.take_over(group.number, self.folder / name, self.files[name])
        return _parts(judged)

    def _has_images_of(self, samples: Samples) -> bool:
        if self.has_images is None or samples.image_names is None:
            return True
        return self.has_images(sorted({name.decode() for name in samples.image_names.tolist()}))


def _is_unjudged(samples: Samples) -> np.ndarray:
    """Returns which responses are never judged, whatever happens later, bool [rows]."""
    return ~samples.finite | (samples.stop_reason == STOP_REASONS.index(LEFT_OUT))


def _parts(record: GroupRecord) -> GroupParts:
    """Puts the group's responses one by one into the object store of this node."""
    responses = {}
    if record.samples is not None:
        for row in range(len(record.samples)):
            one = record.samples.rows(np.array([row]))  # a copy
            responses[int(one.sample_id[0])] = ResponseStore.put_here(one)
    return GroupParts(record.number, record.attempt, responses, record.results)


def _check_tokens(folder: Path, ledger: Ledger, groups: Mapping[int, GroupParts]) -> None:
    """Raises DamagedCheckpoint if records have other attempts or tokens than the ledger counts."""
    wrong = [group.number for group in ledger.groups if not _is_counted(group, groups.get(group.number))]
    if wrong:
        raise DamagedCheckpoint(
            f"{folder}: what is kept of groups {wrong[:10]} is not what its ledger counts; the checkpoint is damaged, "
            "resume from an older one",
            folder,
        )


def _is_counted(group: Group, parts: GroupParts | None) -> bool:
    if parts is None:
        return group.tokens == 0 and not any(group.ended)
    lengths = [0] * len(group.lengths)
    for index, response in parts.responses.items():
        lengths[index] = int(response.rows.response_lengths[0])
    judged = group.state is not State.FINISHED or len(parts.results) == len(group.lengths)
    return (parts.number, parts.attempt, lengths) == (group.number, group.attempts, group.lengths) and judged
