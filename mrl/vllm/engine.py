"""One vLLM engine as a Python object: start, generate, take new weights.

No Ray here; the cluster wraps it in an actor.
"""

import asyncio
import itertools
import os
import random
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mrl.data.routes import ASKED
from mrl.errors import EnvironmentFault, Interrupted, described
from mrl.platforms.hosting import BUCKET_FOLDER
from mrl.platforms.versions import VllmGeneration
from mrl.vllm.requests import Completion, EngineSettings, Request, Sampling

WATCH_S = 1.0  # between looks whether vLLM's processes live
DROP_S = 5.0  # for blocks of the prefix cache to come free


class VllmEngine:
    """AsyncLLM plus the weight version it serves.

    While an update is under way, or after one failed, it is fenced and serves nothing (`fence`).
    """

    def __init__(self, settings: EngineSettings):
        self.settings = settings
        self.version: int | None = None
        self._llm = None
        self._generation: VllmGeneration | None = None
        self._numbers = itertools.count()  # of requests and of buckets
        self._buckets: Path | None = None  # folder of an update by the slow path
        self._path = "slow"  # or "fast": what vLLM's workers are ready for
        self._arenas: tuple[Path, ...] = ()  # files of weight syncs that still have a name

    async def start(self) -> float:
        """Starts vLLM and checks it; returns seconds. Raises EnvironmentFault when the start-up check fails."""
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from mrl.vllm.receive import BACKEND, adapter_module, installed_generation

        began = time.monotonic()
        self._generation = installed_generation()
        _remove_all(_noted(self.settings.segments_file))  # of an engine of this run that was killed
        arguments = AsyncEngineArgs(
            **self.settings.arguments,
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            worker_extension_cls=f"{adapter_module()}.WorkerExtension",
        )
        try:
            self._llm = AsyncLLM.from_engine_args(arguments)
        except Exception as error:  # vLLM ends its own children first; the reason stands in their output
            raise EnvironmentFault(
                f"engine {self.settings.engine_id} did not start ({type(error).__name__}: {error}); "
                f"see logs/engine-{self.settings.engine_id}.log in the run directory"
            ) from error
        await self._connect_slow_path()
        with self._alive():
            await self._stamp_version(0)
            await self._capture_routes()
        self.version = 0
        self._note_shared_memory()
        if self.settings.check_order:
            await self._check_order()
        return time.monotonic() - began

    async def generate(self, requests: list[Request], sampling: Sampling) -> AsyncIterator[list[Completion]]:
        """Yields completions as they finish, those that finish together in one list."""
        if self.version is None:
            raise RuntimeError(f"engine {self.settings.engine_id} holds no committed weights and must not generate")
        finished: asyncio.Queue[Completion | Exception] = asyncio.Queue()
        tasks = [asyncio.create_task(self._put_completion(finished, r, sampling)) for r in requests]
        try:
            left = len(requests)
            while left:
                batch = [await finished.get()]
                while not finished.empty():
                    batch.append(finished.get_nowait())
                for item in batch:
                    if isinstance(item, Exception):
                        raise item
                left -= len(batch)
                yield batch
        finally:
            for task in tasks:
                task.cancel()

    async def _put_completion(self, finished: asyncio.Queue, request: Request, sampling: Sampling) -> None:
        try:
            await finished.put(await self._complete(request, sampling))
        except Exception as error:
            await finished.put(error)

    async def _complete(self, request: Request, sampling: Sampling) -> Completion:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=request.seed, logprobs=0,
            max_tokens=sampling.max_tokens, stop_token_ids=list(sampling.stop_token_ids), detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY, flat_logprobs=True, extra_args={ASKED: True} if sampling.routes else None,
        )  # fmt: skip
        name, version_before = f"{request.sample_id}-{next(self._numbers)}", self.version
        final = None
        with self._alive():
            async for output in self._llm.generate({"prompt_token_ids": list(request.prompt_ids)}, parameters, request_id=name):
                final = output
        answer = final.outputs[0]
        versions = self._versions_of(answer, version_before)
        if versions != {str(self.version)}:
            raise RuntimeError(f"sample {request.sample_id} was generated with weight versions {versions}, not {self.version}")
        first = answer.logprobs.start_indices  # with logprobs=0 the sampled token's entry stands first at each position
        log_probs = tuple(answer.logprobs.logprobs[i] for i in first)
        routes = await self._routes(name, request, answer) if sampling.routes else None
        return Completion(request.sample_id, tuple(answer.token_ids), log_probs, answer.finish_reason, self.version, routes)

    async def _stamp_version(self, version: int) -> None:
        """Tells vLLM which version its weights have now, where completions are stamped with it."""
        if self._generation.stamps_versions:
            await self._llm.update_weight_version(str(version))

    def _versions_of(self, answer: Any, version_before: int | None) -> set[str]:
        """Versions that took part in a completion.

        Where vLLM does not stamp them: those served when the request came and when it ended.
        """
        if self._generation.stamps_versions:
            return {span.version for span in answer.weight_versions or ()}
        return {str(version_before), str(self.version)}

    async def _routes(self, name: str, request: Request, answer: Any) -> np.ndarray | None:
        """Routes of prompt and response, or None where vLLM returned none. Raises DataError for such as cannot be."""
        tokens, routes = len(request.prompt_ids) + len(answer.token_ids), answer.routed_experts
        if self.settings.captures_routes:
            with self._alive():
                shape, data = (await self._workers("take_routes", name, tokens - 1))[0]
            routes = np.frombuffer(data, np.int16).reshape(shape)
        return self.settings.routes.from_engine(routes, tokens, f"engine {self.settings.engine_id}, sample {request.sample_id}")

    async def _capture_routes(self) -> None:
        if not self.settings.captures_routes:
            return
        try:
            await self._workers("capture_routes")
        except RuntimeError as error:
            raise EnvironmentFault(f"engine {self.settings.engine_id} cannot tell its routes (actor.router_replay: R3): {error}") from error

    async def _forget_routes(self) -> None:
        """With new weights: requests that were given up left theirs behind, and no other is under way."""
        if self.settings.captures_routes:
            await self._workers("forget_routes")

    async def _check_order(self) -> None:
        """The same prompts in two orders must give the same bits; else no run can be repeated or resumed exactly."""
        rng = random.Random(0)
        width = min(24, self.settings.arguments["max_model_len"] // 2)
        vocab = self.settings.vocab_size
        requests = [Request(i, tuple(rng.randrange(vocab) for _ in range(1 + i * width // 8)), i) for i in range(8)]
        sampling = Sampling(temperature=1.0, max_tokens=8, stop_token_ids=())
        runs = []
        for order in (requests, requests[::-1]):
            completions = [c async for batch in self.generate(order, sampling) for c in batch]
            runs.append(sorted(completions, key=lambda c: c.sample_id))
            await self._drop_cache()
        if runs[0] != runs[1]:
            differing = sum(a != b for a, b in zip(*runs, strict=True))
            raise EnvironmentFault(
                f"engine {self.settings.engine_id}: {differing} of {len(requests)} prompts gave other bits in another order; "
                "on CPU keep chunked prefill off (rollout.enable_chunked_prefill)"
            )

    async def _connect_slow_path(self) -> None:
        expected = {name: list(shape) for name, shape in self.settings.expected}
        with self._alive():
            await self._workers("init_weight_transfer_engine", {"path": "slow", "expected": expected})
        self._path = "slow"

    def fence(self) -> None:
        """Fences the engine, before the first byte of an update: it holds no version, so `generate` refuses.

        Only `commit` (fast path) and `commit_update` (slow path) give it a version again. Weights that are half new,
        or that the digests disagree about, are therefore never sampled from.
        """
        self.version = None

    async def begin_update(self) -> None:
        """Enters the weight update by the slow path; the engine is fenced until `commit_update`."""
        self.fence()
        if self._path != "slow":
            await self._connect_slow_path()
        self._buckets = Path(tempfile.mkdtemp(prefix=BUCKET_FOLDER, dir=_memory_folder()))
        self._note_shared_memory()
        with self._alive():
            await self._workers("start_weight_update")

    async def load_bucket(self, data: np.ndarray, sha256: str) -> int:
        """Loads one bucket, safetensors bytes as a uint8 array with their SHA-256; returns bytes."""
        # a name of its own: workers keep tensors of a layer mapped until its last bucket has come; pages outlive names
        path = self._buckets / f"bucket-{next(self._numbers)}.safetensors"
        with path.open("wb") as file:
            file.write(memoryview(data))
        with self._alive():
            await self._workers("update_weights", {"bucket": str(path), "sha256": sha256})
        path.unlink()
        return len(data)

    async def commit_update(self, version: int) -> None:
        """Leaves the update, drops what was cached under the old weights and serves `version`."""
        with self._alive():
            await self._workers("finish_weight_update")
            await self._leave_old_weights(version)
        shutil.rmtree(self._buckets)
        self._buckets = None
        self._note_shared_memory()
        self.version = version

    async def connect_sync(self, setup: dict[str, Any], plan_hash: str) -> int:
        """Agrees on the plan of weight syncs, checks vLLM's parameters against it, meets the ranks; returns bytes of weights.

        Raises EnvironmentFault: another plan, or parameters that are not as the plan has them, by name.
        """
        from mrl.reshard.setup import SyncSetup
        from mrl.reshard.transport_shm import arena_files

        agreed, engine = SyncSetup.from_json(setup), self.settings.engine_id
        agreed.check_hash(plan_hash, f"engine {engine}")
        workers = [agreed.worker(engine, position) for position in range(self.settings.workers)]
        self._arenas = tuple(path for worker in workers for path in arena_files(agreed, worker))
        self._note_shared_memory()
        info = {"path": "fast", "setup": setup, "engine": engine, "plan_hash": plan_hash}
        with self._alive():
            try:
                await self._workers("init_weight_transfer_engine", info)
            except Exception as error:
                raise self._refusal(error) from error
            self._path = "fast"
            return sum(await self._workers("weight_bytes"))

    def _refusal(self, error: Exception) -> Exception:
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineDeadError):
            return error
        return EnvironmentFault(
            f"engine {self.settings.engine_id} cannot take weights by the plan: {error}; reshard.path: slow goes through vLLM's own loader"
        )

    def release_arenas(self) -> None:
        """Unlinks shared memory, now that every rank has it open: nothing is left behind however a process ends."""
        for path in self._arenas:
            path.unlink(missing_ok=True)
        self._arenas = ()
        self._note_shared_memory()

    async def receive_weights(self, update: int, read_back: bool) -> list[dict[str, Any]]:
        """Takes one sync; returns each worker's report (WorkerExtension.weight_update_report).

        The engine is fenced until `commit`.
        """
        self.fence()
        with self._alive():
            try:
                await self._workers("start_weight_update")
                await self._workers("update_weights", {"update": update, "read_back": read_back})
                await self._workers("finish_weight_update")
            except Exception as error:
                await self._abandon(error)
                raise
            return await self._workers("weight_update_report")

    async def _abandon(self, error: Exception) -> None:
        """Drops the update that `error` ended. Raises RuntimeError with both causes when that fails too."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._workers("abandon_update")
        except EngineDeadError:
            raise
        except Exception as second:
            raise RuntimeError(f"{described(error)}; and dropping the update failed: {described(second)}") from error

    async def commit(self, version: int) -> None:
        """Serves what was received last, as `version`, and drops what was cached under the old weights."""
        with self._alive():
            await self._leave_old_weights(version)
        self.version = version

    async def _leave_old_weights(self, version: int) -> None:
        await self._stamp_version(version)
        await self._drop_cache()
        await self._forget_routes()

    async def _drop_cache(self) -> None:
        """Empties the prefix cache, which old weights filled. Raises Interrupted when vLLM does not empty it.

        vLLM 0.23 and 0.32 answer True, with prefix caching off as well, or False while a block is in use, that of a
        request that was just aborted for example. Of several data-parallel cores 0.32 answers for all, 0.23 for the
        first.
        """
        deadline = time.monotonic() + DROP_S
        while not (emptied := await self._ask(self._llm.reset_prefix_cache())) and time.monotonic() < deadline:
            await asyncio.sleep(DROP_S / 50)
        if emptied is not True and self.settings.arguments.get("enable_prefix_caching", True):
            raise Interrupted(
                f"engine {self.settings.engine_id}: vLLM did not empty its prefix cache within {DROP_S:g} s (it answered {emptied}), "
                f"so it still holds what other weights computed; see logs/engine-{self.settings.engine_id}.log in the run directory"
            )

    async def fingerprints(self) -> dict[str, str]:
        """SHA-256 of everything each worker of this engine computes with, by rank and name."""
        merged: dict[str, str] = {}
        with self._alive():
            for worker in await self._workers("weight_fingerprints"):
                merged |= worker
        return merged

    async def _workers(self, method: str, *arguments: Any) -> list[Any]:
        """What a method of each of this engine's workers returns.

        Raises RuntimeError with all that they raised, causes first.
        """
        from mrl.reshard.sync_report import GAVE_UP

        answers = await self._ask(self._llm.collective_rpc("answer", args=(method, arguments)))
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            raise RuntimeError("; ".join(sorted(dict.fromkeys(errors), key=lambda text: GAVE_UP in text)))
        return [answer["value"] for answer in answers]

    async def _ask(self, call: Awaitable[Any]) -> Any:
        """The answer of vLLM's processes.

        One that died never answers, and vLLM tells only requests so: its death is watched for here.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(call)
        while not (await asyncio.wait([task], timeout=WATCH_S))[0]:
            if self._llm.errored:
                task.cancel()
                raise EngineDeadError
        return task.result()

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """vLLM's processes may die below an engine that lives: that is a lost worker like any other."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            engine = self.settings.engine_id
            raise Interrupted(
                f"engine {engine}: vLLM's process below it died; see logs/engine-{engine}.log in the run directory"
            ) from error

    def _note_shared_memory(self) -> None:
        """Writes down what a kill would leave behind, for the successor to remove."""
        paths = shared_memory_below(os.getpid()) | ({self._buckets} if self._buckets else set()) | set(self._arenas)
        Path(self.settings.segments_file).write_text("\n".join(map(str, paths)))

    async def stop(self) -> None:
        """Ends vLLM's processes and removes what an unfinished update left behind."""
        segments = shared_memory_below(os.getpid()) | _noted(self.settings.segments_file)  # what a process that died held was noted
        if self._buckets is not None:
            shutil.rmtree(self._buckets, ignore_errors=True)
        self.release_arenas()
        if self._llm is not None:
            self._llm.shutdown()
        _remove_all(segments)  # vLLM's workers are killed before they give back what they shared with each other


def shared_memory_below(pid: int) -> set[Path]:
    """Shared memory that descendants of `pid` have mapped: segments of multiprocessing and of vLLM's CPU collectives."""
    import psutil

    segments = set()
    for child in psutil.Process(pid).children(recursive=True):
        try:
            paths = {Path(region.path) for region in child.memory_maps()}
        except psutil.Error:
            continue
        segments |= {p for p in paths if p.parent == Path("/dev/shm") and (p.name.startswith("psm_") or "cpushm" in p.name)}
    return segments


def _noted(file: str) -> set[Path]:
    return set(map(Path, Path(file).read_text().split())) if Path(file).exists() else set()


def _remove_all(paths: set[Path]) -> None:
    for path in paths:
        if path.name.startswith(BUCKET_FOLDER):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _memory_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
