"""All engines: requests are spread over them, answers stream back, new weights reach every one or none is used."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import ray

from mrl.cluster.calls import gather, unwrap
from mrl.cluster.seats import Seats, engine_seats
from mrl.cluster.workers import EngineWorker
from mrl.config.schema import RunConfig
from mrl.errors import Interrupted
from mrl.platforms.hosting import get_hosting
from mrl.vllm.requests import Completion, Request, Sampling, engine_settings


class RolloutGroup:
    """Handles of the engines and the weight version that all of them serve."""

    def __init__(self, config: RunConfig, run_dir: Path, poll: Callable[[], None] = lambda: None, seats: Seats | None = None):
        """Starts every engine. Raises EnvironmentFault when a start-up check fails.

        `seats`: of the engines, by default on devices of their own.
        """
        self.config, self.poll = config, poll
        hosting = get_hosting(config.cluster.device)
        count, workers = config.rollout.num_engines, config.rollout.tensor_model_parallel_size * config.rollout.data_parallel_size
        self.seats = seats or engine_seats(config)
        kind = ray.remote(EngineWorker)
        self.engines = [
            kind.options(
                runtime_env={"env_vars": seat.environment | hosting.engine_environment(i, count, workers, config.rollout.cpu_kvcache_gib)},
                **seat.options,
            ).remote(engine_settings(config, i, run_dir / "logs"), str(run_dir / "logs" / f"engine-{i}.log"), seat.places)
            for i, seat in enumerate(self.seats.seats)
        ]
        self._starting = self.refs("start")

    def wait_started(self) -> None:
        """Blocks until every engine serves; the actor can start meanwhile."""
        gather(self._starting, self.config.rollout.start_timeout_s, "starting the engines", self.poll)

    def refs(self, method: str, *arguments, engines: Sequence[int] | None = None) -> dict[str, ray.ObjectRef]:
        """Calls a method on all engines, or on some, without waiting; answers to come, by name."""
        return {f"engine {i}": getattr(e, method).remote(*arguments) for i, e in enumerate(self.engines) if engines is None or i in engines}

    def call(self, method: str, *arguments) -> list:
        """Calls a method on all engines; answers in their order."""
        return list(gather(self.refs(method, *arguments), self.config.cluster.step_timeout_s, method).values())

    def generate(self, requests: list[Request], sampling: Sampling, on_batch: Callable[[list[Completion]], None]) -> list[Completion]:
        """All completions in the order of `requests`; `on_batch` sees them as they finish.

        Raises Interrupted when an engine dies or the deadline passes.
        """
        completions: dict[int, Completion] = {}
        streams = {
            self.engines[i].generate.options(num_returns="streaming").remote(share, sampling): f"engine {i}"
            for i, share in enumerate(spread(requests, len(self.engines)))
            if share
        }
        deadline = time.monotonic() + self.config.rollout.generate_timeout_s
        while streams:
            self.poll()
            ready, _ = ray.wait(list(streams), timeout=0.5)
            for stream in ready:
                self._take(stream, streams, completions, on_batch)
            if not ready and time.monotonic() > deadline:
                late = ", ".join(streams.values())
                raise Interrupted(
                    f"generation: {len(requests) - len(completions)} of {len(requests)} responses missing, waiting for {late}"
                )
        return [completions[r.sample_id] for r in requests]

    def _take(self, stream, streams: dict, completions: dict[int, Completion], on_batch: Callable) -> None:
        try:
            ref = next(stream)
        except StopIteration:
            del streams[stream]
            return
        batch = unwrap(ref, streams[stream], "generation")
        completions.update((c.sample_id, c) for c in batch)
        on_batch(batch)

    def load_weights(self, buckets: Iterable[tuple[ray.ObjectRef, str]]) -> int:
        """Hands every engine full HF tensors; returns bytes received, all engines together. `commit` completes it.

        `buckets`: a reference to the bytes of a safetensors file as a uint8 array, and their SHA-256.

        An engine whose update failed holds no version and refuses to generate, so a mixture is never served.
        """
        self.call("begin_update")
        moved = sum(sum(self.call("load_bucket", data, sha256)) for data, sha256 in buckets)
        self.call("finish_update")
        return moved

    def commit(self, version: int) -> None:
        """From here on every engine serves `version`. Each of them holds it already; see VllmEngine.receive_weights."""
        self.call("commit", version)

    def sleep(self) -> None:
        """Every engine gives its devices' memory back, weights included, and gives up requests under way; see VllmEngine.sleep."""
        self.call("sleep")

    def wake_weights(self) -> None:
        """Every sleeping engine has room for weights again, which have to be brought there; see VllmEngine.wake_weights."""
        self.call("wake_weights")

    def wake_cache(self) -> None:
        """Every engine that was brought weights has its cache again, and serves after `commit`; see VllmEngine.wake_cache."""
        self.call("wake_cache")

    def fingerprints(self) -> list[dict[str, str]]:
        """Of each engine; see VllmEngine.fingerprints."""
        return self.call("fingerprints")

    def stop(self) -> None:
        """Ends the engines and vLLM's processes below them."""
        with suppress(Exception):  # the run is over either way; killing the actors ends what is left
            gather(self.refs("stop"), 30.0, "stopping the engines")
        for engine in self.engines:
            ray.kill(engine)
        self.seats.release()


def spread(requests: list[Request], engines: int) -> list[list[Request]]:
    """Requests of each engine: prompts go round, responses of one prompt stay together and share its cached prefix."""
    prompts: dict[tuple[int, ...], int] = {}
    shares: list[list[Request]] = [[] for _ in range(engines)]
    for request in requests:
        shares[prompts.setdefault(request.prompt_ids, len(prompts)) % engines].append(request)
    return shares
