"""All engines: requests stream to them and answers come back. New weights reach every engine, or none uses them.

An engine is one Ray actor, or one for each of its data-parallel ranks: `engine 1 rank 0`. The ranks of one engine
compute every step together. A rank that is asked alone to pause, resume or sleep would wait for the others inside vLLM.
So calls that change an engine go to all its ranks at once, after each has answered a first call.
"""

import os
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import ray

from mrl.cluster.calls import Late, answered, ask, gather
from mrl.cluster.deadlines import Deadlines
from mrl.cluster.engine_fleet import EngineFleet
from mrl.cluster.process_logs import concerning, log_file, processes_of
from mrl.cluster.request_streams import RequestStreams
from mrl.cluster.seats import Seats
from mrl.config.deployment import Deployment
from mrl.config.schema import RunConfig
from mrl.engine.engine_state import ASLEEP, CONTROL_VERBS, WEIGHTS_AWAKE
from mrl.engine.engine_worker import EngineWorker
from mrl.engine.process_watch import end_processes
from mrl.engine.requests import DraftCounts, EngineSettings, VersionServed, engine_settings
from mrl.errors import LostProcess
from mrl.model import ModelSpec
from mrl.plan.generation_times import with_found_drafts
from mrl.platforms.hosting import get_hosting
from mrl.platforms.tuned_experts import FOLDER
from mrl.process.ray_nodes import on_node
from mrl.process.same_software import check_same
from mrl.schedule.engine_loads import request_limit_of
from mrl.store.response_store import SMALL_OBJECTS

GIVE_UP_S = 30.0  # seconds for an engine to abandon its work, once it knows that its ranks are gone
CONVERSATIONS = 4  # times the requests that an engine computes: if tools take three quarters of the time, it stays busy
PREPARE_S = 60.0  # seconds for a live rank to answer; another may be in the middle of a long step


@dataclass(frozen=True)
class EngineOrder:
    """The engines of a run: `settings` are those of each rank, engine by engine."""

    deployment: Deployment
    settings: tuple[EngineSettings, ...]
    max_requests: int | None  # of `request_limit`
    logs: Path

    @classmethod
    def of(cls, config: RunConfig, model: ModelSpec, logs: Path, by_sync: bool = False) -> "EngineOrder":
        """Returns the order of a configuration.

        `by_sync`: engines read no weights, and answer nothing before a sync brings them.
        """
        deployment = Deployment.of(config)
        config = with_found_drafts(config, model)
        settings = tuple(
            engine_settings(config, model, engine, logs, data_rank, by_sync)
            for engine in range(config.rollout.num_engines)
            for data_rank in range(config.rollout.data_parallel_size)
        )
        return cls(deployment, settings, request_limit(deployment, config.trainer.deterministic), logs)

    def reading_from(self, text: Path, images: Path) -> "EngineOrder":
        """Returns the same engines with weights and images from folders of an evaluation. See EngineSettings."""
        return replace(self, settings=tuple(settings.reading_from(text, images) for settings in self.settings))


class RolloutGroup:
    """Handles of the engines, and the weight version that all of them serve."""

    def __init__(
        self,
        order: EngineOrder,
        seats: Seats,
        poll: Callable[[], None] = lambda: None,
        before: "RolloutGroup | None" = None,
    ):
        """Starts nothing, see `start`. `stop` releases the seats.

        `before` is the group that this one replaces, without the engines retired there.
        """
        self.cluster = order.deployment.cluster
        self.rollout = order.deployment.rollout
        self._deadlines = Deadlines.of_steps(self.cluster)
        self.max_requests = order.max_requests
        self.poll = poll
        self.engine_ranks = self.rollout.data_parallel_size  # of one engine
        self.names = [each.name for each in order.settings]
        self.seats = seats
        self._settings = order.settings
        self._logs = order.logs
        self.peers_wait_s = 0.0  # that an engine in a weight sync waits for ranks that are gone; WeightSync sets it
        self._below: dict[int, list[tuple[int, float]]] = {}  # processes of each rank, and their start times
        self.workers: list[ray.actor.ActorHandle] = [] if before is None else list(before.workers)
        self.fleet = EngineFleet(self, self.rollout.start_timeout_s)
        self._earlier_devices = {} if before is None else before.process_devices
        if before is not None:
            self.fleet.continue_from(before.fleet)
        self._software: dict[str, ray.ObjectRef] = {}
        self._asked_devices: dict[str, ray.ObjectRef] = {}
        self._starting: dict[str, ray.ObjectRef] = {}

    def start(self) -> None:
        """Starts all engines that are not retired, and waits for none of them; see `wait_started`."""
        self._make_workers()
        self._software = self.refs("software")
        self._asked_devices = self.refs("devices")  # before they start, because they answer nothing meanwhile
        # all ranks at once, after they have said where they are
        for engine in sorted(self.fleet.reached()):
            self._starting |= self._start_of(engine, [self._asked_devices[name] for name in self.names_of([engine])])

    @property
    def have_loaded(self) -> bool:
        """Tells whether all engines start with the weights of the checkpoint and none waits for a sync."""
        return not any(settings.awaits_weights for settings in self._settings)

    def names_of(self, engines: Iterable[int]) -> list[str]:
        """Returns the names of all ranks of these engines."""
        wanted = set(engines)
        return [name for number, name in enumerate(self.names) if number // self.engine_ranks in wanted]

    def _make_workers(self) -> None:
        """Makes workers of engines that are not retired. For the others the old worker stays."""
        there = self.names_of(self.fleet.reached())
        before = self.workers
        self.workers = []  # one by one, so that `stop` ends those that were made
        for number, name in enumerate(self.names):
            self.workers.append(self._worker(number) if name in there else before[number])

    def _worker(self, number: int) -> ray.actor.ActorHandle:
        """Makes the actor of the `number`-th of all ranks, engine by engine."""
        settings = self._settings[number]
        seat = self.seats.seats[number]
        own = get_hosting(self.cluster.device).engine_environment(
            number, len(self.names), self.rollout.tensor_model_parallel_size, self.rollout.cpu_kvcache_gib
        )
        if self.rollout.tuned_experts is not None:
            own[FOLDER] = str(Path(self.rollout.tuned_experts).absolute())
        kind = ray.remote(EngineWorker).options(
            runtime_env={"env_vars": SMALL_OBJECTS | seat.environment | own}, **seat.options
        )
        log = str(self._logs / log_file(settings.name))
        if settings.turns is None:
            return kind.remote(settings, log, seat.devices)
        return kind.remote(settings, log, seat.devices, dict(os.environ), str(Path.cwd()))

    def _start_of(self, engine: int, answered: Sequence[ray.ObjectRef] = ()) -> dict[str, ray.ObjectRef]:
        """Starts the ranks of one engine with the address of its first rank, where they connect.

        `answered` are answers that must come first.
        """
        meeting = None
        if self.engine_ranks > 1:
            meeting = self.workers[engine * self.engine_ranks].meeting_point.remote()
        return self.refs("start", meeting, *answered, engines=[engine])

    def start_again(self, engine: int) -> dict[str, ray.ObjectRef]:
        """Starts an ended engine on the same seats.

        Returns references, by name, to answers that come once it serves.
        """
        for number in self._ranks_of(engine):
            self.workers[number] = self._worker(number)
        return self._start_of(engine)

    def end(self, engine: int) -> None:
        """Kills an engine's actors and all processes below them, including stopped ones."""
        for number in self._ranks_of(engine):
            ray.kill(self.workers[number])
            self._end_below(self.names[number], self._below.pop(number, []))

    def _end_below(self, name: str, processes: list[tuple[int, float]]) -> None:
        if self.nodes[name] == ray.get_runtime_context().get_node_id():
            end_processes(processes)
            return
        with suppress(Exception):  # if its node is gone, so are the processes
            ended = ray.remote(max_retries=0)(end_processes).options(**on_node(self.nodes[name])).remote(processes)
            gather({name: ended}, PREPARE_S, "ending what is left of an engine")

    def note_devices(self, engine: int) -> None:
        """Asks a started engine for its software, which must be the driver's, where it is, and for its processes.

        Raises EnvironmentFault for other software.
        """
        limit_s = self.cluster.start_timeout_s
        check_same(gather(self.refs("software", engines=[engine]), limit_s, "asking for the software of an engine"))
        self.process_devices |= gather(self.refs("devices", engines=[engine]), limit_s, "asking where an engine is")
        self.nodes |= {name: devices[0][0] for name, devices in self.process_devices.items()}
        self._note_processes(engine)

    def _note_processes(self, engine: int) -> None:
        found = gather(self.refs("processes", engines=[engine]), self.cluster.start_timeout_s, "asking for processes")
        self._below |= {self.names.index(name): processes for name, processes in found.items()}

    def _ranks_of(self, engine: int) -> range:
        return range(engine * self.engine_ranks, (engine + 1) * self.engine_ranks)

    def wait_started(self) -> None:
        """Waits until every engine serves. The actor can start meanwhile.

        Raises EnvironmentFault if one has other software.
        """
        check_same(gather(self._software, self.rollout.start_timeout_s, "starting the engines", self.poll))
        gather(self._starting, self.rollout.start_timeout_s, "starting the engines", self.poll)
        for engine in sorted(self.fleet.reached()):
            self._note_processes(engine)

    def refs(self, method: str, *arguments, engines: Collection[int] | None = None) -> dict[str, ray.ObjectRef]:
        """Calls all ranks of all reachable engines, or of some, without waiting. Returns references to the answers, by
        name.

        `method` is one of CONTROL_VERBS, or a method of EngineWorker.
        """
        asked = self.fleet.reached() if engines is None else engines
        return {
            name: ask(worker, CONTROL_VERBS, method, *arguments)
            for number, (name, worker) in enumerate(zip(self.names, self.workers, strict=True))
            if number // self.engine_ranks in asked
        }

    def call(self, method: str, *arguments, engines: Collection[int] | None = None) -> list:
        """Calls all ranks as `refs` does, and returns the answers of those that survive, in their order.

        Raises Interrupted that names the lost or late ones, if the run cannot go on without them.
        """
        self.prepare(method, engines)
        asked = self.fleet.epochs()
        refs = self.refs(method, *arguments, engines=self._still(engines))
        return list(self._in_time(refs, asked, method).values())

    def answers(self, method: str, phase: str) -> dict[str, Any]:
        """Calls all engines and returns their answers by name. `phase` is the name of the call in errors."""
        asked = self.fleet.epochs()
        return self._in_time(self.refs(method), asked, phase)

    def _still(self, engines: Collection[int] | None) -> Collection[int] | None:
        if engines is None:
            return engines
        return self.fleet.reached() & set(engines)

    def prepare(self, what: str, engines: Collection[int] | None = None) -> None:
        """Asks ranks that wait for each other whether they are alive, before they are asked for more.

        Raises Late that names those that do not answer. Without this check, all others would be late too.
        """
        if self.engine_ranks > 1:
            self.check_there(what, engines)

    def check_there(self, what: str, engines: Collection[int] | None = None) -> None:
        """Asks all ranks of all engines, or of some, whether they are alive.

        Raises Late that names those that do not answer, Interrupted for those that died.
        """
        limit_s = min(PREPARE_S, self._deadlines.of("check_there"))
        asked = self.fleet.epochs()
        self._answers(self.refs("check_there", engines=engines), asked, limit_s, f"{what}, asking who is there")

    def _in_time(self, refs: dict[str, ray.ObjectRef], asked: Mapping[str, int], phase: str) -> dict[str, Any]:
        """Waits for answers as long as calls of this phase may take. `asked` as in `_answers`."""
        began = time.monotonic()
        answers = self._answers(refs, asked, self._deadlines.of(phase), phase)
        if refs and len(answers) == len(refs):  # otherwise the time includes the wait for a lost engine
            self._deadlines.ended(phase, time.monotonic() - began)
        return answers

    def _answers(
        self, refs: dict[str, ray.ObjectRef], asked: Mapping[str, int], timeout_s: float, what: str
    ) -> dict[str, Any]:
        """Gathers answers, without engines that are lost meanwhile if the run can go on without them.

        `asked` are the fleet's epochs from before the calls. Later ones could be of an engine that another thread
        started again, and that was not asked. If several ranks are late, the error says whose processes do not run.
        """
        while True:
            try:
                return gather(refs, timeout_s, what)
            except LostProcess as error:
                lost = error
                if isinstance(error, Late):
                    late = processes_of(error)
                    lost = concerning(Late(f"{error}{listed_reasons(self.not_running(late))}"), *late)
                if not self.fleet.loses(lost, asked):
                    raise lost from error.__cause__
                left = set(self.names_of(self.fleet.reached()))
                refs = {name: ref for name, ref in refs.items() if name in left}

    def not_running(self, late: Collection[str]) -> dict[str, str]:
        """Returns those of the `late` ranks that do not run: their stopped processes, or that they are silent."""
        refs = {name: ref for name, ref in self.refs("stopped_processes").items() if name in late}
        found = answered(refs)
        reasons = {name: ", ".join(found.get(name, ["it does not answer"])) for name in refs}
        return {name: reason for name, reason in reasons.items() if reason}

    @cached_property
    def process_devices(self) -> dict[str, list[tuple[str, int | None]]]:
        """Ray's node id and the device of each worker of each rank, by the rank's name.

        Retired engines keep their former entries.
        """
        asked = self.fleet.epochs()  # none is started again before all have said where they are
        found = self._answers(self._asked_devices, asked, self.cluster.start_timeout_s, "asking where engines are")
        known = self._earlier_devices | found
        return {name: known[name] for name in self.names if name in known}

    @cached_property
    def nodes(self) -> dict[str, str]:
        """Ray's node id of each engine rank, by its name."""
        return {name: own[0][0] for name, own in self.process_devices.items()}

    def streams(self) -> RequestStreams:
        """Makes the streams of requests. Nothing is sent yet."""
        limit_s = self.rollout.generate_timeout_s
        return RequestStreams(self.fleet, partial(self.refs, "check_there"), self.nodes, limit_s)

    def load_weights(self, buckets: Iterable[tuple[ray.ObjectRef, str]], engines: Collection[int]) -> int:
        """Gives these engines full HF tensors. Returns the received bytes in total. `commit` completes the update.

        `buckets` are references to the bytes of a safetensors file as a uint8 array, each with its SHA-256. An engine
        whose update failed has no version and refuses to generate, so a mixture is never served.
        """
        self.call("begin_update", engines=engines)
        moved = sum(sum(self.call("load_bucket", data, sha256, engines=engines)) for data, sha256 in buckets)
        self.call("finish_update", engines=engines)
        return moved

    def commit(self, version: int, engines: Collection[int]) -> VersionServed:
        """Lets these engines serve `version`, whose weights each of them already holds.

        Returns counts of the version before, over all of them.
        """
        served = self.call("commit", version, engines=engines)
        self.fleet.committed(self._still(engines), version)
        if not served:
            return VersionServed(0, 0.0, 0)
        stale, peaks, preemptions, drafts = zip(*served, strict=True)
        return VersionServed(sum(stale), max(peaks), sum(preemptions), sum(drafts, DraftCounts()))

    def pause_for_update(self, give_back: bool) -> bool:
        """Pauses every engine for new weights and `commit`. Returns whether one of them gives its requests back.

        See VllmEngine.
        """
        return any(self.call("pause_for_update", give_back))

    def give_up(self, version: int, sleeps: bool) -> None:
        """Ends all requests of every engine, which serves nothing until it is synced to `version`.

        With `sleeps` it is also put to sleep. Raises Interrupted if one does not answer within GIVE_UP_S, after
        `peers_wait_s`.
        """
        asked = self.fleet.epochs()
        limit_s = GIVE_UP_S + self.peers_wait_s
        states = set(self._answers(self.refs("give_up"), asked, limit_s, "giving up requests").values())
        self.fleet.rewind(version)
        if not sleeps or states == {ASLEEP}:
            return
        if states == {WEIGHTS_AWAKE}:
            self.call("wake_cache")
        self.call("sleep")

    def end_requests(self, handles: Mapping[str, list[int]]) -> None:
        """Ends requests that are no longer needed, by the name of the engine that has them."""
        asked = self.fleet.epochs()
        serving = self.fleet.serving()
        here = {name: numbers for name, numbers in handles.items() if name in serving}
        refs = {name: serving[name].worker.do.remote("end_requests", numbers) for name, numbers in here.items()}
        self._in_time(refs, asked, "ending requests")

    def fingerprints(self) -> list[dict[str, str]]:
        """Returns one set of fingerprints for each engine, over all its ranks, with the names of
        VllmEngine.fingerprints.
        """
        fingerprints = self.call("fingerprints")
        ranks = self.engine_ranks
        return [dict(ChainMap(*fingerprints[first : first + ranks])) for first in range(0, len(fingerprints), ranks)]

    def stop(self) -> None:
        """Ends the engines and vLLM's processes below them."""
        with suppress(Exception):  # the run is over in any case; killing the actors ends the rest
            gather(self.refs("stop"), 30.0, "stopping the engines")
        for worker in self.workers:
            ray.kill(worker)
        self.seats.release()


def listed_reasons(reasons: Mapping[str, str]) -> str:
    """Returns what RolloutGroup.not_running found, to stand behind an error."""
    return "".join(f"; {name}: {reason}" for name, reason in reasons.items())


def request_limit(deployment: Deployment, deterministic: bool) -> int | None:
    """Returns the limit of requests at a front end; None: all are distributed before the first is answered.

    With conversations it exceeds what the engine samples at once, so that others generate while tools run; see
    TurnGate.

    Returns None if the run must be repeatable and the rest of a batch may change bits. Then timing must not decide
    which requests are computed together. If the rest of a batch changes no bit, which engines check when they start, a
    limit is safe.
    """
    needs_order = deterministic and not get_hosting(deployment.cluster.device).checks_batch_order
    if needs_order:
        return None
    limit = request_limit_of(deployment.rollout.max_num_seqs)
    if deployment.rollout.turns is None:
        return limit
    return CONVERSATIONS * limit
