"""All ranks of the trained model, called together."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from mrl.cluster.same_software import check_same
from mrl.cluster.seats import Seats, actor_seats
from mrl.cluster.shared_folder import check_seen, marked
from mrl.cluster.workers import LOOKING, MODEL_VERBS, WRITING, ActorWorker
from mrl.config.schema import RunConfig
from mrl.config.teacher_model import teacher_of
from mrl.errors import EnvironmentFault, Interrupted
from mrl.flow.response_store import ResponseStore
from mrl.flow.routes import start_readers
from mrl.model import load_model_spec
from mrl.model.layout import TrainLayout
from mrl.platforms.hosting import get_hosting
from mrl.platforms.process_tree import end_below
from mrl.remote.calls import SETTLE_S, Late, LostPeer, ask, blame, gather, gather_all, unwrap
from mrl.remote.deadlines import Deadlines
from mrl.remote.process_logs import concerning, log_file, processes_of

_EXPORT = "weight export"
_AHEAD = 2  # objects: the head and the data of one bucket are made while the bucket before is loaded


def put_once(arguments: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Arguments of ranks, with samples that several of them are given as one object that all of them fetch.

    They hold thousands of references, which would be written again for every rank.
    """
    same = {id(value): value for own in arguments for value in own if isinstance(value, ResponseStore)}
    put = {key: ray.put(value) for key, value in same.items()}
    return [[put.get(id(value), value) for value in own] for own in arguments]


class ActorGroup:
    """Handles of the actor ranks; small answers come back, large things stay behind references."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        checkpoint: Path | None,
        poll: Callable[[], None] = lambda: None,
        worker: type[ActorWorker] = ActorWorker,
        seats: Seats | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ):
        """Starts every rank and loads the model. Raises what the ranks raise, with the rank's name.

        `seats`: of the ranks, by default on devices of their own; `meanwhile`: done while they load.
        """
        self.config = config
        self.poll = poll
        self._deadlines = Deadlines.of_steps(config.cluster)
        self.pids: list[int] = []  # of ranks that have started
        self.route_readers: dict[str, ray.actor.ActorHandle] = {}  # by node; see mrl/flow/routes.py
        self.model = load_model_spec(config.model.path)
        self.layout = TrainLayout.build(config.actor.layout.model_dump(), self.model)
        self.teacher = teacher_of(config, load_model_spec)
        hosting = get_hosting(config.cluster.device)
        self.seats = seats or actor_seats(config.cluster, config.actor.layout)
        kind = ray.remote(concurrency_groups={WRITING: 1, LOOKING: 1})(worker)
        self.workers = [
            kind.options(
                runtime_env={"env_vars": seat.environment | hosting.actor_environment()}, **seat.options
            ).remote(config.model_dump(), rank, str(run_dir / "logs" / log_file(f"rank {rank}")), seat.places)
            for rank, seat in enumerate(self.seats.seats)
        ]
        try:
            self._start(checkpoint, run_dir, meanwhile)
        except BaseException:
            self.stop()  # nobody else has them
            raise

    def _start(self, checkpoint: Path | None, run_dir: Path, meanwhile: Callable[[], None]) -> None:
        limit = self.config.cluster.start_timeout_s
        check_same(gather(self.refs("software"), limit, "starting the actor", self.poll))
        with marked(run_dir) as mark:
            check_seen(run_dir, gather(self.refs("sees", mark), limit, "looking for the run directory", self.poll))
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
        """Routes lie on these nodes: where ranks need a part of them and may be elsewhere,
        processes there cut it out.
        """
        layout = self.layout
        cut = layout.pipeline * layout.context * (layout.tensor if layout.sequence_parallel else 1) > 1
        if self.config.actor.router_replay == "R3" and cut and sum(node["Alive"] for node in ray.nodes()) > 1:
            self.route_readers = start_readers(nodes)

    def call(
        self, method: str, *arguments: Any, timeout_s: float | None = None, interruptible: bool = False
    ) -> list[Any]:
        """Calls a method on all ranks; answers in rank order."""
        refs = self.refs(method, *arguments)
        poll = self.poll if interruptible else lambda: None
        return list(self._answers(refs, timeout_s, method, poll).values())

    def refs(self, method: str, *arguments: Any) -> dict[str, ray.ObjectRef]:
        """Asks all ranks without waiting; answers to come, by name.

        `method`: one of MODEL_VERBS, or a method of ActorWorker.
        """
        return {f"rank {i}": ask(worker, MODEL_VERBS, method, *arguments) for i, worker in enumerate(self.workers)}

    def each(
        self, method: str, arguments: Sequence[Sequence[Any]], phase: str, interruptible: bool = False
    ) -> list[Any]:
        """Calls a method on all ranks, each with its own arguments; answers in rank order.

        `phase`: how errors name it.
        """
        poll = self.poll if interruptible else lambda: None
        refs = self.refs_each(method, arguments)
        return list(self._answers(refs, None, phase, poll).values())

    def _answers(
        self, refs: dict[str, ray.ObjectRef], timeout_s: float | None, phase: str, poll: Callable[[], None]
    ) -> dict[str, Any]:
        """Gathers answers. Where ranks are late together, the error names those whose processes do not run at all."""
        began = time.monotonic()
        try:
            answers = gather(refs, timeout_s or self._deadlines.of(phase), phase, poll)
        except Late as error:
            raise self._told(error) from error
        self._deadlines.ended(phase, time.monotonic() - began)
        return answers

    def _told(self, error: Late) -> Late:
        """The error with whom to blame: all ranks that run write where they are, so the others are the culprits."""
        asked = self.refs("write_stacks")
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=SETTLE_S)
        silent = [name for name, ref in asked.items() if ref not in ready]
        if silent and len(silent) < len(asked):
            words = f"{', '.join(silent)} did not even say where it is: stopped, or cut off"
            return concerning(Late(f"{error}; {words}; where the others are stands in logs/*.stacks"), *silent)
        where = "where they are stands in logs/*.stacks"
        if silent:
            where = "none of them said where it is"
        return concerning(Late(f"{error}; {where}"), *processes_of(error))

    def refs_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> dict[str, ray.ObjectRef]:
        """Calls every rank with arguments of its own and waits for nobody; answers to come, by name."""
        own = zip(self.workers, put_once(arguments), strict=True)
        return {f"rank {i}": getattr(worker, method).remote(*given) for i, (worker, given) in enumerate(own)}

    def offload(self) -> None:
        """What `actor.*_offload` names leaves the devices until it is needed again. Does nothing without such a key."""
        if self.config.actor.offloaded:
            self.call("offload")

    def bring(self, *kinds: str) -> None:
        """Brings these kinds of what `actor.*_offload` names onto all devices, and moves the others off them."""
        if self.config.actor.offloaded:
            self.call("bring", *kinds)

    def prefetch(self, *kinds: str) -> None:
        """Begins to bring these kinds of what `actor.*_offload` names, beside what is computed on the devices next."""
        if self.config.actor.offloaded:
            self.call("prefetch", *kinds)

    def export_buckets(self, limit_bytes: int) -> Iterator[tuple[ray.ObjectRef, str]]:
        """Buckets of full HF tensors as rank 0 makes them, one ahead: a reference to the data, and its SHA-256.

        Raises what `call` raises; data of a bucket is never fetched here.
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
        """The next reference of one rank's stream; None at its end, where it leaves `streams`.

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
        """host:port, free now, on the host of `rank`."""
        worker = self.workers[rank]
        refs = {f"rank {rank} host": worker.host.remote(), f"rank {rank} port": worker.free_port.remote()}
        host, port = gather(refs, self.config.cluster.start_timeout_s, "finding a port").values()
        return f"{host}:{port}"

    def take_checkpoint(self) -> int:
        """Every rank copies its part of a checkpoint to host memory; the bytes that writing all of them will need."""
        return sum(self.call("take_checkpoint"))

    def are_free(self, within_s: float) -> bool:
        """Whether every rank answers in that time: one that sends weights to an engine that is lost does not."""
        try:
            gather(self.refs("host"), within_s, "asking the ranks")
        except Interrupted:
            return False
        return True

    def write_checkpoint(self, folder: Path) -> list[dict]:
        """Every rank writes the copy it took, while it answers other calls; its parts of the manifest in rank order.

        Raises EnvironmentFault, once no rank writes any more, when a disk does not take it or is slower than
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
        """Ends the ranks; twice is once."""
        for worker in self.workers:
            ray.kill(worker)
        end_below(self.pids)
        self.seats.release()
