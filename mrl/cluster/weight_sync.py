"""One weight sync over all ranks and engines: agree on a plan, move the weights, compare digests, commit a version.

Fencing: an engine that receives weights has no version from the first byte on, and refuses to generate (FENCED of
mrl.engine.engine_state). Only the commit gives it a version again, after all engines are verified. An engine whose sync
failed stays fenced and is synced once more from the first round. Then its weights are always read back, whatever
reshard.verify_every says. If that fails too, the run stops with the reason and can be resumed.
"""

import itertools
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from ray.exceptions import RayTaskError

from mrl.cluster.actor_group import ActorGroup
from mrl.cluster.calls import Late, LostPeer, answered, gather, in_short, settle
from mrl.cluster.deadlines import LEAST_S, Deadlines
from mrl.cluster.late_ranks import with_cause
from mrl.cluster.process_logs import concerning, processes_of
from mrl.cluster.rollout_group import RolloutGroup, listed_reasons
from mrl.config.deployment import Deployment
from mrl.config.schema import ModelConfig, ReshardConfig
from mrl.engine.requests import rank_name
from mrl.errors import EnvironmentFault, Interrupted, LostProcess, MrlError
from mrl.model import read_hf_config, with_predicting
from mrl.reshard.setup import BUCKET_BYTES, SyncSetup, describe_routes, p2p_members
from mrl.reshard.sync_report import GAVE_UP, Disagreement, Report, SyncTotals, describe, disagreements, replica_faults
from mrl.units import GIB, MIB

PHASE = "weight sync"
CONNECTING = "connecting the weight sync"
_ATTEMPTS = 2
_KERNELS = {"attention": "attention", "moe": "MoE kernels"}  # part of an engine's report -> its printed name


@dataclass(frozen=True)
class AttemptAnswers:
    """What ranks and engines answered to one attempt: a report, or the error."""

    sends: list[Report | Exception]  # of each rank
    receives: dict[int, list[Report] | Exception]  # engine -> report of each worker

    def is_whole(self, engine: int) -> bool:
        """False if the transports to this engine may be in an unknown state."""
        return not any(isinstance(answer, Exception) for answer in (*self.sends, self.receives[engine]))


@dataclass
class SyncProgress:
    """The progress of one sync over its attempts."""

    fenced: set[int]  # engines that are not verified yet
    verified: dict[int, list[Report]] = field(default_factory=dict)  # engine -> reports of its workers
    reasons: dict[int, str] = field(default_factory=dict)  # engine -> why the last attempt failed
    bytes_sent: Counter[int] = field(default_factory=Counter)  # to each verified engine
    staging_bytes: int = 0  # largest of any rank
    free_bytes: list[int | None] = field(default_factory=list)  # of each rank's device, after the last attempt

    def keep(self, engines: set[int]) -> None:
        """Keeps only these engines. The others were lost."""
        self.fenced &= engines
        self.verified = {engine: reports for engine, reports in self.verified.items() if engine in engines}

    @property
    def why(self) -> str:
        """The reasons why engines are still fenced, after an attempt."""
        return "; ".join(dict.fromkeys(self.reasons[e] for e in sorted(self.fenced) if e in self.reasons))


class WeightSync:
    """Syncs all engines to the trainer's weights, by the configured path."""

    def __init__(
        self,
        model: ModelConfig,
        deployment: Deployment,
        reshard: ReshardConfig,
        actor: ActorGroup,
        engines: RolloutGroup,
    ):
        self._model = model
        self._deployment = deployment
        self._reshard = reshard
        self.actor = actor
        self.engines = engines
        # ranks wait for a lost peer and report it, so whoever is late after that is lost itself
        self._deadlines = Deadlines.of_steps(deployment.cluster, LEAST_S + reshard.timeout_s)
        self._updates = itertools.count(1)
        self._syncs = 0
        self._preempted = 0  # requests, since the engines were started
        self.setup: SyncSetup | None = None
        self._met: dict[int, int] = {}  # engines with open transports, with the epoch of each
        self._connecting_s = 0.0  # of this sync
        self._held: set[int] = set()  # engines that hold what is to be committed
        self._weight_bytes: dict[int, int] = {}  # of each engine

    def bring_to(self, version: int) -> dict[str, float]:
        """Syncs every engine, including restarted ones, so that all serve `version`. Returns metrics.

        Raises what `transfer` raises.
        """
        self.engines.fleet.collect()
        metrics = self.transfer(version)
        began = time.perf_counter()
        served = self.commit(version)
        metrics["reshard/seconds"] += time.perf_counter() - began
        return metrics | served

    def transfer(self, version: int) -> dict[str, float]:
        """Moves the weights of `version` to every engine and verifies them. Nothing is served until `commit`. Returns
        metrics.

        Raises Interrupted when an engine could not be synced, EnvironmentFault when ranks and engines cannot connect.
        """
        began = time.perf_counter()
        self._connecting_s = 0.0
        # the version says when, so that a run that goes back verifies the same steps; a restarted engine began with
        # random weights
        is_due = self._syncs == 0 or version % self._reshard.verify_every == 0
        read_back = is_due or bool(self.engines.fleet.stale())
        metrics = self._transfer_to(version, self.engines.fleet.reached(), read_back)
        return metrics | {
            "reshard/seconds": time.perf_counter() - began - self._connecting_s,
            "reshard/seconds_connecting": self._connecting_s,
            "reshard/weight_version": float(version),
        }

    def _transfer_to(self, version: int, engines: set[int], read_back: bool) -> dict[str, float]:
        """Moves weights to these engines, which hold them afterwards if they survive. Returns metrics."""
        metrics = self._fast(version, engines, read_back) if self._reshard.path == "fast" else self._slow(engines)
        self._held = engines & self.engines.fleet.reached()
        self.engines.fleet.proven(self._held, version)
        return metrics

    def mend(self) -> None:
        """Syncs restarted engines to the weights that the others serve. Ranks are idle and hold these weights.

        Raises what `transfer` raises.
        """
        self.engines.fleet.collect()
        if self.engines.fleet.stale():
            self.transfer_again()
            self.commit_again()

    def transfer_again(self) -> None:
        """Moves the current weights to restarted engines, which serve nothing until `commit_again`.

        Raises what `transfer` raises.
        """
        fleet = self.engines.fleet
        self._transfer_to(fleet.version, fleet.stale(), read_back=True)

    def commit_again(self) -> None:
        """Lets restarted engines serve the current version."""
        self.engines.commit(self.engines.fleet.version, self._held)

    def commit(self, version: int) -> dict[str, float]:
        """Lets every engine serve `version`, which `transfer` has moved. Returns metrics of the version before."""
        served = self.engines.commit(version, self._held)
        self._syncs += 1
        preempted = max(0, served.preemptions - self._preempted)  # restarted engines have counted fewer
        self._preempted = served.preemptions
        return {
            "rollout/stale_prefix_tokens": float(served.stale_tokens),
            "perf/kv_cache_peak": served.cache_peak,
            "perf/preemptions": float(preempted),
            **served.drafts.metrics(),
        }

    def _slow(self, engines: set[int]) -> dict[str, float]:
        moved = self.engines.load_weights(self.actor.export_buckets(BUCKET_BYTES), engines)
        return {"reshard/bytes_moved": float(moved)}

    def _fast(self, version: int, engines: set[int], read_back: bool) -> dict[str, float]:
        progress = SyncProgress(fenced=set(engines))
        failed = 0
        while progress.fenced:
            asked = self.engines.fleet.epochs()
            try:
                self._attempt(version, engines, progress, read_back or failed > 0)
            except LostProcess as error:
                if not self.engines.fleet.loses(error, asked):
                    raise
            left = engines & self.engines.fleet.reached()
            if left != engines:
                engines = left
                progress.keep(engines)
            elif progress.fenced:
                failed += 1
                self._keep_fenced(version, progress, is_last=failed == _ATTEMPTS)
        return self._transferred(progress)

    def _attempt(self, version: int, engines: set[int], progress: SyncProgress, read_back: bool) -> None:
        present = self.engines.fleet.starts(engines | self.engines.fleet.reached())
        lost = [engine for engine, start in self._met.items() if present.get(engine) != start]
        for engine in lost:
            del self._met[engine]
        if lost or not engines <= self._met.keys():
            began = time.perf_counter()
            self._agree(version, engines, progress.why)
            self._connecting_s += time.perf_counter() - began
        self._compare(self._move(progress.fenced, read_back), progress)

    def _move(self, engines: set[int], read_back: bool) -> AttemptAnswers:
        """Sends all weights to these engines. With `read_back`, digests of what they finally hold are computed too."""
        update = next(self._updates)
        ranks = self.setup.rollout_layout.data
        self.engines.check_there(PHASE, sorted(engines))
        engines = engines & self.engines.fleet.reached()
        # what an error leaves of a connection is unknown
        met = {engine: self._met.pop(engine) for engine in engines}
        sending = self.actor.refs("send_weights", update, self._workers(engines), read_back)
        receiving = self.engines.refs("receive_weights", update, read_back, engines=sorted(engines))
        began = time.perf_counter()
        try:
            answers = settle(sending | receiving, self._deadlines.of(PHASE), PHASE)
        except Late as error:
            self._raise_with_cause(error, sending)
        if not any(isinstance(answer, Exception) for answer in answers.values()):
            self._deadlines.ended(PHASE, time.perf_counter() - began)
        received = {}
        for engine in sorted(engines):
            of_ranks = [answers[rank_name(engine, rank, ranks)] for rank in range(ranks)]
            received[engine] = _of_engine(of_ranks)
        found = AttemptAnswers([answers[name] for name in sending], received)
        self._met |= {engine: start for engine, start in met.items() if found.is_whole(engine)}
        return found

    def _raise_with_cause(self, error: Late, ranks: Collection[str]) -> NoReturn:
        told = self._with_cause(error, ranks)
        if told is error:
            raise error
        raise told from error

    def _with_cause(self, error: Late, ranks: Collection[str]) -> Late:
        """Adds the cause to an error: an engine that does not run, for which `ranks` wait too, or one of these."""
        late = processes_of(error)
        silent = self.engines.not_running(late)
        if silent:
            return concerning(Late(f"{error}{listed_reasons(silent)}"), *silent)
        if not set(ranks) & set(late):  # ranks would be named in place of late engines
            return error
        return with_cause(error, self.actor.refs)

    def _compare(self, answers: AttemptAnswers, progress: SyncProgress) -> None:
        """Removes verified engines from `progress.fenced`, and records why the others are not verified."""
        faults = _sending_faults(answers.sends)
        sends = []
        if not faults:
            sends = answers.sends
        receives = [
            report for reports in answers.receives.values() if not isinstance(reports, Exception) for report in reports
        ]
        differing = _by_engine(disagreements(self.setup, sends, receives))
        for engine, answer in answers.receives.items():
            if isinstance(answer, Exception):
                progress.reasons[engine] = "; ".join([str(answer), *faults[:1]])
            elif faults:
                progress.reasons[engine] = faults[0]
            elif engine in differing:
                progress.reasons[engine] = describe(differing[engine])
            else:
                progress.verified[engine] = answer
        progress.fenced -= progress.verified.keys()
        for report in sends:
            for worker, count in report["moved"].items():
                engine = self.setup.engine_of(worker)
                if engine in progress.verified:
                    progress.bytes_sent[engine] += count
            progress.staging_bytes = max(progress.staging_bytes, report["staging_bytes"])
        progress.free_bytes = [report.get("free_bytes") for report in sends]

    def _keep_fenced(self, version: int, progress: SyncProgress, is_last: bool) -> None:
        """Reports which engines are synced again.

        After the last attempt they stay fenced, and it raises Interrupted.
        """
        names = ", ".join(f"engine {engine}" for engine in sorted(progress.fenced))
        if is_last:
            failed = Interrupted(
                f"weight sync to version {version}: {names} could not be brought to the trained "
                f"weights, twice: {progress.why}"
            )
            raise concerning(failed, *self.engines.names_of(progress.fenced))
        print(f"weight sync to version {version}: {names} fenced and synced again: {progress.why}", file=sys.stderr)

    def _transferred(self, progress: SyncProgress) -> dict[str, float]:
        """Returns the metrics of a sync that succeeded for every engine.

        Raises RuntimeError when the two sides counted different bytes.
        """
        receives = [report for reports in progress.verified.values() for report in reports]
        if self._syncs == 0 and receives:
            self._print_kernels_and_memory(progress.free_bytes, receives)
        sent = sum(progress.bytes_sent[engine] for engine in progress.verified)
        weights = sum(self._weight_bytes[engine] for engine in progress.verified)
        totals = SyncTotals.of(sent, receives, weights, progress.staging_bytes)
        metrics = _metrics(totals, len(progress.reasons), all(report["held"] is not None for report in receives))
        return metrics | {"reshard/engines": float(len(progress.verified)), "reshard/workers": float(len(receives))}

    def _print_kernels_and_memory(self, free: list[int | None], receives: list[Report]) -> None:
        """Prints the engines' kernels, and the free memory of the fullest device.

        Communicators and staging memory are only made in the first sync.
        """
        if kernels := _describe_kernels([report.get("kernels", {}) for report in receives]):
            print(f"engines: {kernels}")
        free_of_engines = [report.get("free_bytes") for report in receives]
        if known := [nbytes for nbytes in (*free, *free_of_engines) if nbytes is not None]:
            print(f"after the first weight sync the fullest device has {min(known) / GIB:.1f} GiB free")

    def _agree(self, version: int, engines: set[int], why: str) -> None:
        """Opens the transports to those of these engines that have none, and closes those to lost engines.

        After a failed attempt (`why`) it raises EnvironmentFault with the original cause, which says more than the
        failed connection.
        """
        try:
            self._open(engines)
        except EnvironmentFault as error:
            if not why:
                raise
            raise EnvironmentFault(
                f"weight sync to version {version}: {why}; and connecting again failed: {error}"
            ) from error

    def _open(self, engines: set[int]) -> None:
        """Agrees on the plan with engines that have no open transports, and connects them with all ranks.

        Called before the first byte, after a transport broke, and when engines were lost or have started again. Ranks
        are idle, and the other engines have no part in it.
        """
        limit = self._deployment.cluster.start_timeout_s
        devices = (
            gather(self.actor.refs("devices"), limit, "asking for the devices of ranks") | self.engines.process_devices
        )
        topology = _topology(devices, self._deployment.layout.world_size)
        if self.setup is None or self.setup.topology != topology:
            self.setup = self._setup(topology)
            self._met = {}
        plan_hash = self.setup.plan().hash  # first, because it refuses layouts that these processes do not have
        is_first = not self._met
        new = sorted(engines - self._met.keys())
        met = self.engines.fleet.starts(new)
        setups = self._connections(new)
        # between hosts nobody is told that a peer has left
        self.engines.peers_wait_s = self._reshard.timeout_s if p2p_members(self.setup) else 0.0
        # before any peer waits for it, because an engine may read back all of its weights for this
        refs = {}
        for engine, setup in setups.items():
            refs |= self.engines.refs("agree_on_sync", setup.to_json(), plan_hash, engines=[engine])
        told = [setup.to_json() for setup in setups.values()]
        ranks = self.actor.refs("agree_on_sync", told, plan_hash, self._workers(self._met))
        self._count_weights(gather(refs | ranks, limit, "agreeing on the weight sync"))
        if new:
            self._connect(setups, limit)
            self.engines.call("release_arenas", engines=new)
            self._met |= met
            self._print_routes(setups, is_first)

    def _connections(self, engines: Sequence[int]) -> dict[int, SyncSetup]:
        """Returns the setup of a new connection to each engine."""
        name = uuid.uuid4().hex[:12]
        setups = {}
        for engine in engines:
            meeting = {"name": f"{name}-{engine}", "workers": self._workers([engine])}
            setup = replace(self.setup, transport=self.setup.transport | meeting)
            if p2p_members(setup):
                taken = {known.transport.get("address") for known in setups.values()}  # though nobody listens there yet
                meeting["address"] = self._address(_hosting_rank(setup), taken)
            setups[engine] = replace(setup, transport=setup.transport | meeting)
        return setups

    def _address(self, rank: int, taken: Collection[str | None]) -> str:
        while (address := self.actor.meeting_point(rank)) in taken:
            pass
        return address

    def _print_routes(self, setups: Mapping[int, SyncSetup], is_first: bool) -> None:
        if is_first:
            print(f"weight sync: {describe_routes(self.setup)}")
        else:
            names = ", ".join(f"engine {engine}" for engine in setups)
            print(f"weight sync: connected to {names}, while the other connections stayed open")

    def _connect(self, setups: Mapping[int, SyncSetup], limit_s: float) -> None:
        """Opens the transports to these engines, for which ranks and engines wait for each other.

        Where that fails, nobody waits on. Raises Late that names engines, or else ranks, that do not run.
        """
        engines = set(setups)
        ranks = self.actor.refs("connect_sync")
        try:
            gather(self.engines.refs("connect_sync", engines=engines) | ranks, limit_s, CONNECTING)
        except Exception as error:
            names = [setup.transport["name"] for setup in setups.values()]
            answered(self.actor.refs("give_up_connecting", names))
            if isinstance(error, Late):
                self._raise_with_cause(error, ranks)
            if isinstance(error, EnvironmentFault | LostPeer | RayTaskError):
                self._check_running(error, engines)
            raise

    def _check_running(self, error: Exception, engines: set[int]) -> None:
        """Raises Late instead of `error` if some of these engines, or else some ranks, do not run.

        Their peers have waited in vain, and can tell only that.
        """
        silent = self.engines.not_running(self.engines.names_of(engines))
        if not silent:
            asked = self.actor.refs("write_stacks")
            running = answered(asked)
            silent = {name: "it did not even write its stacks" for name in asked if name not in running}
        if silent:
            text = f"{CONNECTING}: {in_short(error)}"
            if isinstance(error, MrlError):
                text = str(error)
            raise concerning(Late(f"{text}{listed_reasons(silent)}"), *silent) from error

    def _count_weights(self, answers: Mapping[str, Any]) -> None:
        """Counts the bytes of each engine's weights. `answers` also has those of ranks, which are ignored."""
        of_engines: Counter[int] = Counter()
        for name, answer in answers.items():
            if name.startswith("engine"):
                of_engines[int(name.split()[1])] += answer
        self._weight_bytes |= of_engines  # bytes of engines that stayed connected are known

    def _workers(self, engines: Collection[int]) -> list[int]:
        return [w for w in range(self.setup.rollout_layout.world_size) if self.setup.engine_of(w) in engines]

    def _setup(self, topology: dict[str, list[list[int]]]) -> SyncSetup:
        rollout = self._deployment.rollout
        return SyncSetup(
            hf_config=with_predicting(read_hf_config(self._model.path), rollout.drafts_with_model),
            train=self._deployment.layout.model_dump(),
            rollout={
                "num_engines": rollout.num_engines,
                "tensor": rollout.tensor_model_parallel_size,
                "data": rollout.data_parallel_size,
                "expert": rollout.expert_parallel_size,
            },
            dialect=self._deployment.cluster.device,
            dtype=rollout.weights_dtype(self._model.dtype),
            topology=topology,
            budget_bytes=self._reshard.budget_mb * MIB,
            timeout_s=self._reshard.timeout_s,
            transport={"kind": self._reshard.transport},
            fp8_block=rollout.fp8_block,
            vision=self._model.vision,
        )


def _hosting_rank(setup: SyncSetup) -> int:
    """Returns the rank at whose address the point-to-point group connects: its first member, which has the store.

    Rank 0 may not be in the group.
    """
    return next((number for side, number in p2p_members(setup) if side == "rank"), 0)


def _topology(devices: dict[str, Any], ranks: int) -> dict[str, list[list[int]]]:
    """Numbers the nodes in order. A process without an accelerator gets a device number of its own."""
    nodes: dict[str, int] = {}
    standing = [(nodes.setdefault(node, len(nodes)), device) for answer in devices.values() for node, device in answer]
    own_device = itertools.count(1 << 16)
    numbered = [[node, next(own_device) if device is None else device] for node, device in standing]
    return {"ranks": numbered[:ranks], "workers": numbered[ranks:]}


def _of_engine(answers: list[list[Report] | Exception]) -> list[Report] | Exception:
    """Joins the reports of all workers of an engine, rank by rank.

    Returns an error with all causes if a rank has one.
    """
    if errors := [answer for answer in answers if isinstance(answer, Exception)]:
        texts = sorted((str(error) for error in errors), key=lambda text: GAVE_UP in text)
        return RuntimeError("; ".join(dict.fromkeys(texts)))
    return [report for answer in answers for report in answer]


def _sending_faults(sends: Sequence[Report | Exception]) -> list[str]:
    """Returns why the sent data cannot be trusted: errors of ranks, causes first, else replicas that differ."""
    errors = sorted(
        (str(answer) for answer in sends if isinstance(answer, Exception)), key=lambda text: GAVE_UP in text
    )
    if errors:
        return errors
    stale = replica_faults(sends)
    if stale:
        return [describe(stale)]
    return []


def _by_engine(differing: list[Disagreement]) -> dict[int, list[Disagreement]]:
    groups = defaultdict(list)
    for disagreement in differing:
        groups[disagreement.engine].append(disagreement)
    return groups


def _describe_kernels(of_workers: Sequence[Mapping[str, Sequence[str]]]) -> str:
    """Names the kernels of attention and experts over all workers; empty if no worker tells."""
    parts = []
    for part, title in _KERNELS.items():
        names = {name for kernels in of_workers for name in kernels.get(part, ())}
        if names:
            parts.append(f"{title} {', '.join(sorted(names))}")
    return "; ".join(parts)


def _metrics(totals: SyncTotals, resynced: int, read_back: bool) -> dict[str, float]:
    """Returns the metrics. `read_back` says that what every engine finally holds was read."""
    return {
        "reshard/bytes_required": float(totals.bytes_required),
        "reshard/bytes_moved": float(totals.bytes_moved),
        "reshard/bytes_local": float(totals.bytes_local),
        "reshard/bytes_remote": float(totals.bytes_remote),
        "reshard/peak_staging_bytes": float(totals.staging_bytes),
        "reshard/resynced": float(resynced),
        "reshard/verified": float(read_back),
    }
