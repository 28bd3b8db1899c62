"""All ranks of the trained model, called together."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from mrl.cluster.calls import Late, LostPeer, answered, ask, blame, gather, gather_all, late, unwrap
from mrl.cluster.deadlines import LEAST_S, Deadlines
from mrl.cluster.late_ranks import with_cause
from mrl.cluster.process_logs import concerning, log_file, processes_of
from mrl.cluster.seats import Seats
from mrl.config.schema import RunConfig
from mrl.config.teacher_model import TeacherModel, teacher_of
from mrl.errors import EnvironmentFault, Interrupted
from mrl.model import ModelSpec, load_model_spec
from mrl.model.layout import TrainLayout
from mrl.platforms.hosting import get_hosting
from mrl.platforms.inventory import host_identity_faults
from mrl.platforms.process_tree import end_below
from mrl.process.same_software import check_same
from mrl.process.shared_folder import check_seen, marked
from mrl.rank.rank_step import FETCHING, PHASES, ReplicaRows, Scored, StepRows
from mrl.rank.rank_worker import LOOKING, MODEL_VERBS, WRITING, ActorWorker
from mrl.store.response_store import ResponseStore
from mrl.store.routes import start_readers

SCORE = "score"
_EXPORT = "weight export"
_ENDS_S = 3.0  # until a rank that Ray ends has ended; a stopped one never does
_AHEAD = 2  # objects: head and data of one bucket are made while the previous one is loaded


def put_once(arguments: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Returns the arguments of ranks. What several ranks get of a step becomes one object for all of them.

    A store of samples holds thousands of references, which would be written again for every rank.
    """
    shared = (ResponseStore, StepRows, ReplicaRows)
    same = {id(value): value for own in arguments for value in own if isinstance(value, shared)}
    put = {key: ray.put(value) for key, value in same.items()}
    return [[put.get(id(value), value) for value in own] for own in arguments]


@dataclass(frozen=True)
class RankOrder:
    """What ranks compute: the complete configuration, which each of them gets, and what follows from it and `model`."""

    config: RunConfig
    model: ModelSpec
    layout: TrainLayout
    teacher: TeacherModel | None
    critic_layout: TrainLayout | None

    @classmethod
    def of(cls, config: RunConfig, model: ModelSpec) -> "RankOrder":
        """Returns the order of a configuration. Raises ConfigError like TrainLayout.build."""
        layout = TrainLayout.build(config.actor.layout, model)
        critic_layout = None
        if config.of_critic is not None:
            critic_layout = TrainLayout.build(config.of_critic.actor.layout, model)
        return cls(config, model, layout, teacher_of(config, load_model_spec), critic_layout)


class ActorGroup:
    """Handles of the actor ranks. Small answers are returned, and large data stays behind references."""

    def __init__(
        self,
        order: RankOrder,
        seats: Seats,
        run_dir: Path,
        poll: Callable[[], None] = lambda: None,
        worker: type[ActorWorker] = ActorWorker,
    ):
        """Starts nothing, see `start`. `stop` releases the seats."""
        config = order.config
        self.config = config
        self.model = order.model
        self.layout = order.layout
        self.teacher = order.teacher
        self.critic_layout = order.critic_layout
        self.poll = poll
        least_s = LEAST_S
        if config.cluster.nnodes > 1:  # so long a rank may wait in a sync for an engine that was lost there
            least_s += config.reshard.timeout_s
        self._deadlines = Deadlines.of_steps(config.cluster, least_s)
        self._scores = 0  # calls of `score`
        self.pids: list[int] = []  # of ranks that have started
        self.route_readers: dict[str, ray.actor.ActorHandle] = {}  # by node, see mrl/store/routes.py
        self.seats = seats
        self.workers: list[ray.actor.ActorHandle] = []
        self._run_dir = run_dir
        self._worker = worker

    def start(self, checkpoint: Path | None, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Starts every rank and loads the model. Raises what the ranks raise, with the rank's name.

        `meanwhile` runs while they load.
        """
        hosting = get_hosting(self.config.cluster.device)
        limit = self.config.cluster.start_timeout_s
        kind = ray.remote(concurrency_groups={WRITING: 1, LOOKING: 1})(self._worker)
        config = self.config.model_dump()
        for rank, seat in enumerate(self.seats.seats):
            environment = {"env_vars": seat.environment | hosting.actor_environment()}
            log = str(self._run_dir / "logs" / log_file(f"rank {rank}"))
            made = kind.options(runtime_env=environment, **seat.options)
            self.workers.append(made.remote(config, rank, log, seat.devices))
        check_same(gather(self.refs("software"), limit, "starting the actor", self.poll))
        identities = gather(self.refs("host_identity"), limit, "starting the actor", self.poll)
        if faults := host_identity_faults(identities.values()):
            raise EnvironmentFault("; ".join(faults))
        with marked(self._run_dir) as mark:
            seen = gather(self.refs("sees", mark), limit, "looking for the run directory", self.poll)
            check_seen(self._run_dir, seen)
        first = {"rank 0": self.workers[0].host.remote()}
        address = gather(first, limit, "starting the actor", self.poll)["rank 0"]
        port = self.config.cluster.port
        if port is None:
            port = gather({"rank 0": self.workers[0].free_port.remote()}, limit, "starting the actor")["rank 0"]
        starting = self.refs("start", address, port, str(checkpoint) if checkpoint else None)
        meanwhile()
        self.pids = list(self._answers(starting, limit, "start", lambda: None).values())
        asked = {"rank 0": self.workers[0].do.remote("kernels")}
        print(f"actor: {gather(asked, limit, 'asking the actor what it computes with')['rank 0']}")

    def read_routes_at(self, nodes: Iterable[str]) -> None:
        """Starts processes on these nodes that read routes, if ranks on other nodes need parts of them."""
        layout = self.layout
        cut = layout.pipeline * layout.context * (layout.tensor if layout.sequence_parallel else 1) > 1
        if self.config.actor.router_replay == "R3" and cut and sum(node["Alive"] for node in ray.nodes()) > 1:
            self.route_readers = start_readers(nodes)

    def call(
        self, method: str, *arguments: Any, timeout_s: float | None = None, interruptible: bool = False
    ) -> list[Any]:
        """Calls a method on all ranks. Returns answers in rank order."""
        refs = self.refs(method, *arguments)
        poll = self.poll if interruptible else lambda: None
        return list(self._answers(refs, timeout_s, method, poll).values())

    def answers(self, method: str, phase: str, ranks: Collection[int] | None = None) -> dict[str, Any]:
        """Calls all ranks, or some, and returns their answers by name. `phase` is the name of the call in errors."""
        return self._answers(self.refs(method, ranks=ranks), None, phase, lambda: None)

    def refs(self, method: str, *arguments: Any, ranks: Collection[int] | None = None) -> dict[str, ray.ObjectRef]:
        """Calls all ranks, or some, without waiting. Returns references to the answers, by name.

        `method` is one of MODEL_VERBS, or a method of ActorWorker.
        """
        asked = range(len(self.workers)) if ranks is None else ranks
        return {f"rank {i}": ask(self.workers[i], MODEL_VERBS, method, *arguments) for i in asked}

    def each(
        self, method: str, arguments: Sequence[Sequence[Any]], phase: str, interruptible: bool = False
    ) -> list[Any]:
        """Calls a method on all ranks, each with its own arguments. Returns answers in rank order.

        `phase` is the name of the call in errors.
        """
        poll = self.poll if interruptible else lambda: None
        refs = self.refs_each(method, arguments)
        return list(self._answers(refs, None, phase, poll).values())

    def each_keeping(self, method: str, arguments: Sequence[Sequence[Any]], phase: str) -> tuple[list[Any], list[Any]]:
        """Calls like `each` a method that returns two values, which a signal may interrupt.

        Returns the first of each rank, and references to the second, which stays where it is.
        """
        refs = self.refs_each(method, arguments)
        first = {name: of_rank[0] for name, of_rank in refs.items()}
        return list(self._answers(first, None, phase, self.poll).values()), [second for _, second in refs.values()]

    def score(self, arguments: Sequence[Sequence[Any]]) -> tuple[list[Scored], list[Any]]:
        """Calls `score` on all ranks, like `each_keeping`. A signal ends it where ranks exchange numbers next.

        The deadline of each of its phases is that phase's, and begins with it.
        """
        self._scores += 1
        refs = self.refs_each("score", [(self._scores, *of_rank) for of_rank in arguments])
        scored = self._in_phases({name: of_rank[0] for name, of_rank in refs.items()})
        return scored, [second for _, second in refs.values()]

    def _in_phases(self, refs: dict[str, ray.ObjectRef]) -> list[Scored]:
        began = time.monotonic()
        looks_s = min(map(self._deadlines.of, PHASES))  # no deadline passes unseen between two looks
        left_s = looks_s
        while True:
            try:
                answers = gather(refs, left_s, SCORE, self._poll_scoring)
                break
            except Late as error:
                left_s = min(looks_s, self._left_s(error, time.monotonic() - began))
            except LostPeer as error:
                raise with_cause(error, self.refs) from error
        for phase in PHASES:
            if seconds := [scored.seconds[phase] for scored in answers.values() if phase in scored.seconds]:
                self._deadlines.ended(phase, max(seconds))
        return list(answers.values())

    def _poll_scoring(self) -> None:
        try:
            self.poll()
        except BaseException:
            self.refs("stop_scoring", self._scores)  # nobody waits for it
            raise

    def _left_s(self, error: Late, so_far_s: float) -> float:
        """Returns in how many seconds the first rank that has not answered misses the deadline of its phase.

        Raises Late where one has. A rank that does not say its phase is taken to be where another one is.
        """
        late_ones = processes_of(error)
        said = answered(self.refs("phase"))
        at = {name: said[name] for name in late_ones if name in said and said[name][0]}
        longest = max(at.values(), key=lambda each: each[1], default=(FETCHING, so_far_s))
        left_s = math.inf
        for phase, seconds in (at.get(name, longest) for name in late_ones):
            limit_s = self._deadlines.of(phase)
            left_s = min(left_s, limit_s - seconds)
            if left_s <= 0:
                raise with_cause(late(phase, late_ones, limit_s), self.refs) from error
        return left_s

    def _answers(
        self, refs: dict[str, ray.ObjectRef], timeout_s: float | None, phase: str, poll: Callable[[], None]
    ) -> dict[str, Any]:
        """Gathers answers. If ranks are late, the error names those that are the cause; see late_ranks."""
        began = time.monotonic()
        try:
            answers = gather(refs, timeout_s or self._deadlines.of(phase), phase, poll)
        except (Late, LostPeer) as error:
            raise with_cause(error, self.refs) from error
        self._deadlines.ended(phase, time.monotonic() - began)
        return answers

    def refs_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> dict[str, ray.ObjectRef]:
        """Calls every rank with its own arguments, without waiting. Returns references to the answers, by name."""
        own = zip(self.workers, put_once(arguments), strict=True)
        return {f"rank {i}": getattr(worker, method).remote(*given) for i, (worker, given) in enumerate(own)}

    def offload(self) -> None:
        """Moves what `actor.*_offload` names off the devices until it is needed. Does nothing without such a key."""
        if self.config.actor.offloaded:
            self.call("offload")

    def bring(self, *kinds: str) -> None:
        """Moves these kinds of what `actor.*_offload` names onto all devices, and the others off them."""
        if self.config.actor.offloaded:
            self.call("bring", *kinds)

    def prefetch(self, *kinds: str) -> None:
        """Begins to move these kinds of what `actor.*_offload` names onto the devices, beside other computation."""
        if self.config.actor.offloaded:
            self.call("prefetch", *kinds)

    def export_buckets(self, limit_bytes: int) -> Iterator[tuple[ray.ObjectRef, str]]:
        """Yields buckets of full HF tensors as rank 0 makes them, one ahead: a reference to the data, and its SHA-256.

        Raises what `call` raises. Never fetches a bucket's data.
        """
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": _AHEAD}
        streams = {
            w.export_buckets.options(**options).remote(limit_bytes): f"rank {i}" for i, w in enumerate(self.workers)
        }
        first = next(iter(streams))
        while first in streams:
            head = self._next_of(first, streams)
            if head is not None:
                sha256 = self._exported(head, streams[first])
                yield self._next_of(first, streams), sha256
        while streams:
            self._next_of(next(iter(streams)), streams)

    def _next_of(self, stream: Any, streams: dict) -> ray.ObjectRef | None:
        """Returns the next reference of one rank's stream; None at its end, when it leaves `streams`.

        The other ranks yield nothing, or fail.
        """
        limit = self.config.cluster.step_timeout_s
        deadline = time.monotonic() + limit
        while stream in streams:
            ready, _ = ray.wait(list(streams), timeout=0.5, fetch_local=False)
            if not ready and time.monotonic() > deadline:
                late = Interrupted(
                    f"{_EXPORT}: nothing from {streams[stream]} within {limit:g} s; see logs/ in the run directory"
                )
                raise concerning(late, streams[stream])
            for ready_stream in ready:
                ref = next(ready_stream, None)
                if ref is None:
                    del streams[ready_stream]
                elif ready_stream is stream:
                    return ref
                else:
                    self._exported(ref, streams[ready_stream])
        return None

    def _exported(self, ref: ray.ObjectRef, name: str) -> Any:
        try:
            return unwrap(ref, name, _EXPORT)
        except (LostPeer, ray.exceptions.RayTaskError) as error:
            raise blame(error, self.refs("host"), _EXPORT) from error

    def meeting_point(self, rank: int = 0) -> str:
        """Returns host:port on the host of `rank`; the port is free now."""
        worker = self.workers[rank]
        refs = {f"rank {rank} host": worker.host.remote(), f"rank {rank} port": worker.free_port.remote()}
        host, port = gather(refs, self.config.cluster.start_timeout_s, "finding a port").values()
        return f"{host}:{port}"

    def take_checkpoint(self) -> int:
        """Makes every rank copy its part of a checkpoint to host memory.

        Returns the bytes that writing all will need.
        """
        return sum(self.call("take_checkpoint"))

    def are_free(self, within_s: float) -> bool:
        """Tells whether every rank answers in that time. A rank that sends weights to a lost engine does not."""
        try:
            gather(self.refs("host"), within_s, "asking the ranks")
        except Interrupted:
            return False
        return True

    def write_checkpoint(self, folder: Path) -> list[dict]:
        """Makes every rank write its copy while it answers other calls. Returns its parts of the manifest in rank
        order.

        Raises EnvironmentFault, after all ranks have stopped writing, if a disk fails or needs more than
        cluster.step_timeout_s.
        """
        try:
            parts = gather_all(
                self.refs("write_checkpoint", str(folder)), self.config.cluster.step_timeout_s, "write_checkpoint"
            )
        except Late as error:
            raise EnvironmentFault(f"{error}; the disk is slow, or raise cluster.step_timeout_s") from error
        return list(parts.values())

    def stop(self) -> None:
        """Ends the ranks. Safe to call twice."""
        for worker in self.workers:
            ray.kill(worker)
        # Ray takes one that dies before its own message for lost, and says so on the screen of a run that went well
        end_below(self.pids, own_s=_ENDS_S)
        self.seats.release()
