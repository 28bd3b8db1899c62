"""One weight sync over all ranks and engines: plan agreed on, weights moved, digests compared, and only then a version that is served.

An engine whose sync failed is fenced: it holds no version and refuses to generate. It is synced once more from the first round, and what it
then holds is read back whatever reshard.verify_every says; when that fails too, the run stops with the reason and can be resumed.
"""

import itertools
import sys
import uuid
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from mrl.cluster.actor_group import ActorGroup
from mrl.cluster.calls import gather, settle
from mrl.cluster.rollout_group import RolloutGroup
from mrl.config.schema import RunConfig
from mrl.errors import EnvironmentFault, Interrupted
from mrl.model import read_hf_config
from mrl.record.metrics import PhaseTimer
from mrl.reshard.setup import SyncSetup
from mrl.reshard.sync_report import GAVE_UP, Report, SyncTotals, disagreements, in_words, replica_faults

BUCKET_BYTES = 512 * 1024**2
MIB = 1024**2
_ATTEMPTS = 2


@dataclass
class Attempt:
    """What has been reached in one sync, over its attempts."""

    bytes_sent: int = 0  # to engines that are verified
    staging_bytes: int = 0  # of the rank that held most
    receives: dict[int, list[Report]] = field(default_factory=dict)  # engine -> its workers, when verified
    reasons: dict[int, str] = field(default_factory=dict)  # engine -> why the last attempt failed
    broken: bool = False  # the last attempt left transports in an unknown state


class WeightSync:
    """Brings all engines to the trainer's weights, by the path that the configuration chooses."""

    def __init__(self, config: RunConfig, actor: ActorGroup, engines: RolloutGroup):
        self.config, self.actor, self.engines = config, actor, engines
        self._updates = itertools.count(1)
        self._syncs = 0
        self.setup: SyncSetup | None = None
        self._weight_bytes = 0

    def bring_to(self, version: int) -> dict[str, float]:
        """Metrics of one sync after which every engine serves `version`.

        Raises Interrupted when one could not be brought there, EnvironmentFault when ranks and engines cannot meet.
        """
        timer = PhaseTimer()
        with timer("sync"):
            found = self._fast(version) if self.config.reshard.path == "fast" else self._slow(version)
        return found | {"reshard/seconds": timer.seconds["sync"], "reshard/weight_version": float(version)}

    def _slow(self, version: int) -> dict[str, float]:
        moved = self.engines.update_weights(self.actor.export_buckets(BUCKET_BYTES), version)
        return {"reshard/bytes_moved": float(moved)}

    def _fast(self, version: int) -> dict[str, float]:
        if self.setup is None:
            self._connect()
        everybody = range(self.config.rollout.num_engines)
        done, pending, why = Attempt(), set(everybody), ""
        for number in range(_ATTEMPTS):
            if number and done.broken:
                self._connect_again(version, why)
            self._attempt(pending, done, read_back=number > 0 or self._syncs % self.config.reshard.verify_every == 0)
            pending -= done.receives.keys()
            if not pending:
                break
            why = "; ".join(dict.fromkeys(done.reasons[engine] for engine in sorted(pending)))
            names = ", ".join(f"engine {engine}" for engine in sorted(pending))
            if number + 1 == _ATTEMPTS:
                raise Interrupted(f"weight sync to version {version}: {names} could not be brought to the trained weights, twice: {why}")
            print(f"weight sync to version {version}: {names} fenced and synced again: {why}", file=sys.stderr)
        receives = [report for reports in done.receives.values() for report in reports]
        totals = SyncTotals.of(done.bytes_sent, receives, self._weight_bytes, done.staging_bytes)
        self.engines.commit(version)
        self._syncs += 1
        return _metrics(totals, len(done.reasons), all(report["held"] is not None for report in receives))

    def _attempt(self, pending: set[int], done: Attempt, read_back: bool) -> None:
        """One try for the `pending` engines; adds to `done` what it reached. `read_back`: digest what engines finally hold."""
        update, limit = next(self._updates), self.config.cluster.step_timeout_s
        workers = [w for w in range(self.setup.rollout_layout.world_size) if self.setup.engine_of(w) in pending]
        sending = self.actor.refs("send_weights", update, workers, read_back)
        receiving = self.engines.refs("receive_weights", update, read_back, engines=sorted(pending))
        answers = settle(sending | receiving, limit, "weight sync")
        sends = [answers[name] for name in sending]
        done.broken = any(isinstance(answer, Exception) for answer in answers.values())
        failed = sorted((str(a) for a in sends if isinstance(a, Exception)), key=lambda text: GAVE_UP in text)  # causes, then effects
        if not failed and (stale := replica_faults(sends)):
            failed = [in_words(stale)]
        found = _by_engine(disagreements(self.setup, [] if failed else sends, _reports(answers, receiving)))
        for engine in sorted(pending):
            answer = answers[f"engine {engine}"]
            if isinstance(answer, Exception):
                done.reasons[engine] = "; ".join([str(answer), *failed[:1]])
            elif failed:
                done.reasons[engine] = failed[0]
            elif engine in found:
                done.reasons[engine] = in_words(found[engine])
            else:
                done.receives[engine] = answer
        for report in () if failed else sends:
            done.bytes_sent += sum(n for worker, n in report["moved"].items() if self.setup.engine_of(worker) in done.receives)
            done.staging_bytes = max(done.staging_bytes, report["staging_bytes"])

    def _connect_again(self, version: int, why: str) -> None:
        """After a transport broke. Raises EnvironmentFault with what broke it, which is more than that peers do not meet any more."""
        try:
            self._connect()
        except EnvironmentFault as error:
            raise EnvironmentFault(f"weight sync to version {version}: {why}; and connecting again failed: {error}") from error

    def _connect(self) -> None:
        """Agrees on the plan and opens the transports; before the first byte, and again after a transport broke."""
        config, limit = self.config, self.config.cluster.start_timeout_s
        if self.setup is None:
            places = gather(self.actor.refs("places") | self.engines.refs("places"), limit, "placing the weight sync")
            self.setup = self._setup(_topology(places, config.actor.layout.world_size))
        plan_hash = self.setup.plan().hash  # first: it refuses layouts that these processes do not have
        meeting = {"kind": config.reshard.transport, "name": uuid.uuid4().hex[:12]}
        address = self.actor.meeting_point(_hosting_rank(replace(self.setup, transport=meeting)))
        self.setup = replace(self.setup, transport=meeting | {"address": address})
        data = self.setup.to_json()
        refs = self.engines.refs("connect_sync", data, plan_hash) | self.actor.refs("connect_sync", data, plan_hash)
        answers = gather(refs, limit, "connecting the weight sync")
        self.engines.call("release_arenas")
        self._weight_bytes = sum(answer for name, answer in answers.items() if name.startswith("engine"))

    def _setup(self, topology: dict[str, list[list[int]]]) -> SyncSetup:
        config, rollout = self.config, self.config.rollout
        return SyncSetup(
            hf_config=read_hf_config(config.model.path),
            train=config.actor.layout.model_dump(),
            rollout={
                "num_engines": rollout.num_engines, "tensor": rollout.tensor_model_parallel_size,
                "data": rollout.data_parallel_size, "expert": rollout.expert_parallel_size,
            },
            dialect=config.cluster.device,
            dtype=rollout.dtype or config.model.dtype,
            topology=topology,
            budget_bytes=config.reshard.budget_mb * MIB,
            timeout_s=config.reshard.timeout_s,
            transport={},
        )  # fmt: skip


def _hosting_rank(setup: SyncSetup) -> int:
    """The rank at whose address the point-to-point group meets: its first member, which holds the store. Rank 0 may not be in the group."""
    from mrl.reshard.transport_p2p import members

    return next((number for side, number in members(setup) if side == "rank"), 0)


def _topology(places: dict[str, Any], ranks: int) -> dict[str, list[list[int]]]:
    """Nodes numbered as they come; a process without an accelerator stands on a device of its own."""
    nodes: dict[str, int] = {}
    found = [(nodes.setdefault(node, len(nodes)), device) for answer in places.values() for node, device in answer]
    own = itertools.count(1 << 16)
    every = [[node, next(own) if device is None else device] for node, device in found]
    return {"ranks": every[:ranks], "workers": every[ranks:]}


def _reports(answers: dict[str, Any], engines: dict[str, Any]) -> list[Report]:
    return [report for name in engines if not isinstance(answers[name], Exception) for report in answers[name]]


def _by_engine(found: list) -> dict[int, list]:
    groups = defaultdict(list)
    for one in found:
        groups[one.engine].append(one)
    return groups


def _metrics(totals: SyncTotals, resynced: int, read_back: bool) -> dict[str, float]:
    """`read_back`: what every engine finally holds was read."""
    return {
        "reshard/bytes_required": float(totals.bytes_required),
        "reshard/bytes_moved": float(totals.bytes_moved),
        "reshard/bytes_local": float(totals.bytes_local),
        "reshard/peak_staging_bytes": float(totals.staging_bytes),
        "reshard/resynced": float(resynced),
        "reshard/verified": float(read_back),
    }
