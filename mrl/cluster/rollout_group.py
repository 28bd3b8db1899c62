"""All engines: requests are spread over them, answers stream back, new weights reach every one or none is used.

An engine is one Ray actor, or one for each of its data-parallel ranks: `engine 1 rank 0`. Ranks of one engine compute
every step together, so that whoever is asked alone to pause, to resume or to sleep waits for the others inside vLLM:
what changes an engine is asked of all of its ranks at once, after each of them has said that it is there.
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import ray

from mrl.cluster.calls import SETTLE_S, Late, gather
from mrl.cluster.engine_answers import EngineAnswers
from mrl.cluster.process_logs import log_file
from mrl.cluster.request_streams import Arrived, RequestStreams
from mrl.cluster.same_software import check_same
from mrl.cluster.seats import Seat, Seats, engine_seats
from mrl.cluster.stored_samples import SMALL_OBJECTS, StoredSamples
from mrl.cluster.workers import EngineWorker
from mrl.config.schema import RunConfig
from mrl.errors import Interrupted
from mrl.platforms.hosting import get_hosting
from mrl.schedule.engine_loads import places_of
from mrl.schedule.request_routing import RequestRouting
from mrl.vllm.requests import Request, Sampling, engine_settings, rank_name

JOINED_AT = 64  # parts: columns of a row each are kilobytes, of many rows a hundred bytes a row
PREPARE_S = 60.0  # for a rank that is there to say so; another may be in the middle of a long step


class VersionServed(NamedTuple):
    """What a version of the weights came to, in all engines."""

    stale_tokens: int  # that prefix caches gave its requests and other weights had computed: 0; see VllmEngine.commit
    cache_peak: float  # share of the KV cache, in the fullest engine
    preemptions: int  # since the engines were started


OnArrival = Callable[[list[Arrived]], None]


class RolloutGroup:
    """Handles of the engines and the weight version that all of them serve."""

    def __init__(
        self, config: RunConfig, run_dir: Path, poll: Callable[[], None] = lambda: None, seats: Seats | None = None
    ):
        """Starts every engine. Raises EnvironmentFault when a start-up check fails.

        `seats`: of the engines, by default on devices of their own.
        """
        self.config, self.poll = config, poll
        self.engine_ranks = data = config.rollout.data_parallel_size  # of one engine
        self.names = [rank_name(*divmod(number, data), data) for number in range(config.rollout.num_engines * data)]
        self.places = request_places(config)
        self.seats = seats or engine_seats(config)
        self.workers = [self._worker(number, seat, run_dir / "logs") for number, seat in enumerate(self.seats.seats)]
        self._software = self.refs("software")
        self._starting = self._start()

    def names_of(self, engines: Iterable[int]) -> list[str]:
        """Names of all ranks of these engines."""
        wanted = set(engines)
        return [name for number, name in enumerate(self.names) if number // self.engine_ranks in wanted]

    def _worker(self, number: int, seat: Seat, logs: Path) -> ray.actor.ActorHandle:
        """The actor of the `number`-th of all ranks, engine by engine."""
        rollout, hosting = self.config.rollout, get_hosting(self.config.cluster.device)
        settings = engine_settings(self.config, number // self.engine_ranks, logs, number % self.engine_ranks)
        own = hosting.engine_environment(
            number, len(self.names), rollout.tensor_model_parallel_size, rollout.cpu_kvcache_gib
        )
        kind = ray.remote(EngineWorker).options(
            runtime_env={"env_vars": SMALL_OBJECTS | seat.environment | own}, **seat.options
        )
        return kind.remote(settings, str(logs / log_file(settings.name)), seat.places)

    def _start(self) -> dict[str, ray.ObjectRef]:
        """Starts all ranks at once, those of one engine with the address where they meet: at their first one."""
        if self.engine_ranks == 1:
            return self.refs("start")
        meetings = [first.meeting_point.remote() for first in self.workers[:: self.engine_ranks]]
        numbered = enumerate(zip(self.names, self.workers, strict=True))
        return {name: worker.start.remote(meetings[number // self.engine_ranks]) for number, (name, worker) in numbered}

    def wait_started(self) -> None:
        """Blocks until every engine serves; the actor can start meanwhile.

        Raises EnvironmentFault where one has other software.
        """
        check_same(gather(self._software, self.config.rollout.start_timeout_s, "starting the engines", self.poll))
        gather(self._starting, self.config.rollout.start_timeout_s, "starting the engines", self.poll)

    def refs(self, method: str, *arguments, engines: Sequence[int] | None = None) -> dict[str, ray.ObjectRef]:
        """Calls a method on all ranks of all engines, or of some, without waiting; answers to come, by name."""
        return {
            name: getattr(worker, method).remote(*arguments)
            for number, (name, worker) in enumerate(zip(self.names, self.workers, strict=True))
            if engines is None or number // self.engine_ranks in engines
        }

    def call(self, method: str, *arguments) -> list:
        """Calls a method on all ranks of all engines; answers in their order.

        Raises Interrupted naming those that are lost, or not there in time.
        """
        self.prepare(method)
        return list(self._answers(self.refs(method, *arguments), self.config.cluster.step_timeout_s, method).values())

    def prepare(self, what: str, engines: Sequence[int] | None = None) -> None:
        """The first phase of what is asked of ranks that wait for each other: each says that it is there.

        Raises Late naming those that do not; where they were asked at once, all others would be late with them.
        """
        if self.engine_ranks > 1:
            self._answers(self.refs("check_there", engines=engines), PREPARE_S, f"{what}, asking who is there")

    def _answers(self, refs: dict[str, ray.ObjectRef], timeout_s: float, what: str) -> dict:
        """As `gather`; of ranks that are late together, whose processes do not run is told."""
        try:
            return gather(refs, timeout_s, what)
        except Late as error:
            raise Late(f"{error}{self._stopped()}") from error

    def _stopped(self) -> str:
        with suppress(Interrupted):
            answers = gather(self.refs("stopped_processes"), SETTLE_S, "looking for stopped processes")
            return "".join(f"; {name}: {', '.join(stopped)}" for name, stopped in answers.items() if stopped)
        return ""

    @cached_property
    def nodes(self) -> dict[str, str]:
        """Ray's id of the node that each rank of an engine is on, by its name."""
        places = self._answers(self.refs("places"), self.config.cluster.start_timeout_s, "asking where engines are")
        return {name: own[0][0] for name, own in places.items()}

    def streams(self) -> RequestStreams:
        """Nothing sent yet."""
        workers, limit_s = dict(zip(self.names, self.workers, strict=True)), self.config.rollout.generate_timeout_s
        return RequestStreams(workers, partial(self.refs, "check_there"), self.nodes, limit_s)

    def answers(self, sampling: Sampling) -> EngineAnswers:
        """Nothing asked yet."""
        return EngineAnswers(self.streams(), RequestRouting(self.names, self.places), sampling, self.poll)

    def generate(
        self, requests: list[Request], sampling: Sampling, on_arrival: OnArrival = lambda arrived: None
    ) -> StoredSamples:
        """All responses, ordered by `sample_id`; `on_arrival` is told at least twice a second of those that came since,
        if any.

        Raises Interrupted when an engine dies or stands still.
        """
        done: list[StoredSamples] = []
        answers = self.answers(sampling)
        answers.ask(requests)
        while answers.unanswered:
            arrived = answers.take()
            done += [part.samples for part in arrived]
            if len(done) >= JOINED_AT:
                done = [StoredSamples.joined(done)]
            on_arrival(arrived)
        samples = StoredSamples.joined(done)
        return samples.take(np.argsort(samples.rows.sample_id))

    def load_weights(self, buckets: Iterable[tuple[ray.ObjectRef, str]]) -> int:
        """Hands every engine full HF tensors; returns bytes received, all engines together. `commit` completes it.

        `buckets`: a reference to the bytes of a safetensors file as a uint8 array, and their SHA-256.

        An engine whose update failed holds no version and refuses to generate, so a mixture is never served.
        """
        self.call("begin_update")
        moved = sum(sum(self.call("load_bucket", data, sha256)) for data, sha256 in buckets)
        self.call("finish_update")
        return moved

    def commit(self, version: int) -> VersionServed:
        """From here on every engine serves `version`. Each of them holds it already; see VllmEngine.receive_weights.

        What the version before came to, in all engines.
        """
        stale, readings = zip(*self.call("commit", version), strict=True)
        peak = max(reading.cache_peak for reading in readings)
        return VersionServed(sum(stale), peak, sum(reading.preemptions for reading in readings))

    def pause_for_update(self, give_back: bool) -> bool:
        """Every engine pauses for new weights and `commit`; whether one of them gives its requests back.

        See VllmEngine.
        """
        return any(self.call("pause_for_update", give_back))

    def end_requests(self, handles: Mapping[str, list[int]]) -> None:
        """Ends requests that nobody waits for any more, by the name of the engine that has them."""
        workers = dict(zip(self.names, self.workers, strict=True))
        refs = {name: workers[name].end_requests.remote(numbers) for name, numbers in handles.items()}
        self._answers(refs, self.config.cluster.step_timeout_s, "ending requests")

    def sleep(self) -> None:
        """Every engine gives its devices' memory back, weights included, and gives up requests under way;
        see VllmEngine.sleep.
        """
        self.call("sleep")

    def wake_weights(self) -> None:
        """Every sleeping engine has room for weights again, which have to be brought there;
        see VllmEngine.wake_weights.
        """
        self.call("wake_weights")

    def wake_cache(self) -> None:
        """Every engine that was brought weights has its cache again, and serves after `commit`;
        see VllmEngine.wake_cache.
        """
        self.call("wake_cache")

    def fingerprints(self) -> list[dict[str, str]]:
        """Of each engine, all of its ranks together; see VllmEngine.fingerprints."""
        fingerprints, ranks = self.call("fingerprints"), self.engine_ranks
        return [dict(ChainMap(*fingerprints[first : first + ranks])) for first in range(0, len(fingerprints), ranks)]

    def stop(self) -> None:
        """Ends the engines and vLLM's processes below them."""
        with suppress(Exception):  # the run is over either way; killing the actors ends what is left
            gather(self.refs("stop"), 30.0, "stopping the engines")
        for worker in self.workers:
            ray.kill(worker)
        self.seats.release()


def request_places(config: RunConfig) -> int | None:
    """Requests that a front end has at most; None: each call's are spread before the first is answered.

    A response is a function of its request and the weights where what else an engine computes changes no bit, which
    engines check when they start. Elsewhere who is beside whom decides the last bits, and a run that is to repeat must
    not leave that to a clock.
    """
    needs_order = config.trainer.deterministic and not get_hosting(config.cluster.device).checks_batch_order
    return None if needs_order else places_of(config.rollout.max_num_seqs)
