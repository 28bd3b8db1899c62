"""Reports of both sides of a sync, and the verdict: tensors of engines that differ from the trainer's."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.reshard.setup import SyncSetup

MODULUS = 1 << 64  # digests are numbers modulo this; defined here because mrl.reshard.digest needs torch
GAVE_UP = "gave up"  # in the error of a process whose peer failed first
_NAMED = 4  # disagreements that a message names

Report = Mapping[str, Any]


@dataclass(frozen=True)
class SendReport:
    """What one rank sent."""

    rank: int
    digests: dict[int, dict[str, int]]  # worker -> parameter -> digest of this rank's share
    # parameter -> digest, for replicated parameters; empty when not requested
    shared: dict[str, int]
    moved: dict[int, int]  # worker on another device -> bytes
    local: dict[int, int]  # worker on the rank's own device -> bytes
    staging_bytes: int
    seconds: dict[str, float]  # "wait", "pack" and "digest"
    free_bytes: int | None = None  # of the rank's device, after the sync's communicators were made

    @property
    def bytes_moved(self) -> int:
        """Bytes sent to other devices, to all workers together."""
        return sum(self.moved.values())

    @property
    def bytes_local(self) -> int:
        """Bytes copied within the own device, to all workers together."""
        return sum(self.local.values())

    def to_json(self) -> dict[str, Any]:
        return vars(self)


@dataclass(frozen=True)
class ReceiveReport:
    """What one worker received."""

    worker: int
    bytes_moved: int  # from other devices
    bytes_local: int  # from a rank on the worker's own device
    bytes_remote: int  # from other nodes; part of bytes_moved
    staging_bytes: int
    seconds: dict[str, float]  # "wait", "unpack" and "complete": the engine's processing and the digests
    free_bytes: int | None = None  # of the worker's device, after the sync's communicators were made


@dataclass(frozen=True)
class Disagreement:
    """A parameter of one worker whose digests differ."""

    engine: int
    worker: int
    parameter: str
    # "on the way": arrived and sent differ; "in the engine": held and arrived differ
    where: str
    ranks: tuple[int, ...]  # which sent parts of it

    def __str__(self) -> str:
        by = ""
        if self.ranks:
            by = f", sent by rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        return f"engine {self.engine} worker {self.worker}: {self.parameter} differs {self.where}{by}"


def add(digests: Iterable[int]) -> int:
    """Returns the digest of a union of disjoint blocks from their digests."""
    return sum(digests) % MODULUS


def disagreements(setup: SyncSetup, sends: Iterable[Report], receives: Iterable[Report]) -> list[Disagreement]:
    """Returns every parameter whose digests differ: the sum that ranks sent, what arrived, and what is held.

    What is held is compared where it was read back. `sends` are the SendReport fields of every rank. `receives` are the
    weight_update_report of every synced worker.
    """
    sent: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    senders: dict[tuple[int, str], list[int]] = defaultdict(list)
    for report in sends:
        for worker, digests in report["digests"].items():
            for parameter, digest in digests.items():
                sent[worker][parameter] = add([sent[worker][parameter], digest])
                senders[worker, parameter].append(report["rank"])
    differing = []
    for report in receives:
        worker = report["worker"]
        received = report["received"]
        for parameter in {**sent[worker], **received}:
            if where := _where(parameter, sent[worker], report):
                ranks = tuple(senders[worker, parameter])
                differing.append(Disagreement(setup.engine_of(worker), worker, parameter, where, ranks))
    return differing


def _where(parameter: str, sent: Mapping[str, int], report: Report) -> str | None:
    received = report["received"]
    held = report["held"]
    if sent.get(parameter) != received.get(parameter):
        return "on the way"
    if held is not None and held.get(parameter) != report.get("shown", received).get(parameter):
        return "in the engine"
    return None


def replica_faults(sends: Iterable[Report]) -> list[str]:
    """Returns replicated parameters that differ between ranks, for example if one has the step before's weights."""
    ranks_by_digest: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for report in sends:
        for name, digest in report["shared"].items():
            ranks_by_digest[name][digest].append(report["rank"])
    faults = []
    for name, by_digest in ranks_by_digest.items():
        if len(by_digest) > 1:
            alike = [str(ranks).strip("[]") for ranks in sorted(by_digest.values())]
            faults.append(f"{name} differs between ranks {' and '.join(alike)}")
    return faults


def describe(faults: Sequence[Disagreement | str]) -> str:
    """Describes the first few faults, and says how many more there are."""
    more = ""
    if len(faults) > _NAMED:
        more = f" and {len(faults) - _NAMED} more"
    return "; ".join(map(str, faults[:_NAMED])) + more


@dataclass(frozen=True)
class SyncTotals:
    """Counts over all engines of one verified sync."""

    bytes_required: int  # what live engines need, as they say and not as the plan says
    bytes_moved: int  # between devices, counted by the transport
    bytes_local: int  # inside a device
    bytes_remote: int  # between nodes, part of bytes_moved; counted by the workers
    staging_bytes: int  # of the process that held most

    @classmethod
    def of(cls, bytes_sent: int, receives: list[Report], weight_bytes: int, staging_bytes: int) -> "SyncTotals":
        """Adds up the reports. `bytes_sent` went to other devices, as the ranks counted.

        `staging_bytes` is the largest staging of a rank. `weight_bytes` counts all weights in all engines. Raises
        RuntimeError when the two sides counted different bytes.
        """
        received = sum(report["bytes_moved"] for report in receives)
        local = sum(report["bytes_local"] for report in receives)
        remote = sum(report["bytes_remote"] for report in receives)
        if bytes_sent != received:
            raise RuntimeError(f"ranks sent {bytes_sent} bytes, engines received {received}")
        staging = max([staging_bytes, *(report["staging_bytes"] for report in receives)])
        return cls(weight_bytes - local, received, local, remote, staging)
