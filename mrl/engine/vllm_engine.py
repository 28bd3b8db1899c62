"""One vLLM engine as a Python object: start, generate, pause, sleep, take new weights.

There is no Ray here; the cluster wraps the engine in an actor. engine_state.py says which call is legal when. vLLM's
own sleep and wake are not used. After them 0.23 resumes by itself at any wake, and 0.32 at the last one. So this class
pauses and resumes the scheduler, exactly once each. It calls the workers directly to give memory back or take it.
"""

import asyncio
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mrl.data.samples import Sample, Samples, packed
from mrl.engine import draft_check
from mrl.engine.admission import Admission, TurnedBack
from mrl.engine.cache_use import CachedPrefixes, CacheUse
from mrl.engine.completions import (
    ABORTED,
    Spans,
    bits_of,
    engine_input,
    nothing_of,
    sample_of,
    sampling_parameters,
    stamped_spans,
    unstamped_spans,
    with_routes,
)
from mrl.engine.engine_calls import EngineCalls
from mrl.engine.engine_scheduler import EngineScheduler
from mrl.engine.engine_state import AWAKE, CACHE, FENCED, REFUSES_REQUESTS, WEIGHTS, EngineMachine, EngineState
from mrl.engine.engine_updates import EngineUpdates
from mrl.engine.forking import leave_server, start_server
from mrl.engine.leftovers import note, noted, noted_start, remove_all, rendezvous_files, shared_memory_below
from mrl.engine.requests import EngineReading, EngineSettings, Request, Sampling, VersionServed, log_name
from mrl.errors import EnvironmentFault, Interrupted
from mrl.platforms.hosting import set_communicator_defaults
from mrl.platforms.imports import many_imports
from mrl.platforms.process_memory import ProcessMemory
from mrl.platforms.versions import VllmGeneration

if TYPE_CHECKING:
    from mrl.engine.image_inputs import RequestImages


@dataclass(frozen=True)
class SleepReport:
    """The result of one sleep."""

    aborted: int  # requests that were in flight, or waited; their streams end with Interrupted
    left: tuple[ProcessMemory, ...]  # memory that each worker still holds


class VllmEngine:
    """AsyncLLM, the state it is in, and the version of the weights that it serves.

    Control verbs (all but `generate`) run one after the other, in the order of their calls.
    """

    def __init__(self, settings: EngineSettings):
        self.settings = settings
        self._machine = EngineMachine(settings.name)
        self._door = Admission()
        self._control = asyncio.Lock()
        self._calls = EngineCalls(settings.name, self._die)
        self._scheduler = EngineScheduler(self._calls, self._door, settings)
        self._updates = EngineUpdates(self._calls, settings, self._note_files)
        self._generation: VllmGeneration | None = None
        self._numbers = itertools.count()  # of requests
        self._made = 0  # tokens of finished responses
        self._newest = 0  # the version that it served last
        self._prefixes = CachedPrefixes(block=1)
        self._cache = CacheUse()
        self._rendezvous: set[Path] = set()  # files through which the workers met
        self._images: RequestImages | None = None  # made for the first request with images
        self._handles: dict[int, str] = {}  # handle -> name of a request that is here and can be ended

    @property
    def version(self) -> int | None:
        """The version of the weights that it serves; None while it must not generate."""
        return self._machine.version

    @property
    def reading(self) -> EngineReading:
        """The engine's meters now; legal in every state."""
        cache = self._cache
        return EngineReading(self._made + self._calls.tokens_inside, cache.share, cache.peak, cache.preemptions)

    async def start(self, meeting: tuple[str, int] | None = None) -> float:
        """Starts vLLM and checks it; returns seconds. Raises EnvironmentFault where either fails.

        An engine that loaded no weights refuses to generate until a sync has brought some. `meeting`: address and port
        of the first data-parallel rank, where the ranks of the engine meet. The call returns when all have.
        """
        began = time.monotonic()
        remove_all(noted(self.settings.segments_file))  # left by an engine of this run that was killed
        with noted_start(self.settings.segments_file) as folder:
            await self._start(meeting, folder)
            if self.settings.check_order:
                await self._check_order()
            if self.settings.speculates:
                await self._check_drafts()
        if self.settings.awaits_weights:
            self._door.shut()
            self._machine.await_weights()
        self._note_files()
        return time.monotonic() - began

    async def _start(self, meeting: tuple[str, int] | None, folder: Path) -> None:
        set_communicator_defaults()
        if self.settings.is_on_cpu:
            start_server(folder)
        with many_imports():
            from vllm.config.weight_transfer import WeightTransferConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.envs import enable_envs_cache
            from vllm.v1.engine.async_llm import AsyncLLM

            from mrl.engine.receive import BACKEND, adapter_module, installed_generation

        self._generation = installed_generation()
        address = {}
        if meeting is not None:
            address = {"data_parallel_address": meeting[0], "data_parallel_rpc_port": meeting[1]}
        arguments = AsyncEngineArgs(
            **self.settings.arguments,
            **address,
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            worker_extension_cls=f"{adapter_module()}.WorkerExtension",
        )
        try:
            self._calls.llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[self._cache.stat_logger()])
        except Exception as error:  # vLLM ends its own children first; their output holds the reason
            raise EnvironmentFault(
                f"{self.settings.name} did not start ({type(error).__name__}: {error}); "
                f"see logs/{log_name(self.settings.name)}.log in the run directory"
            ) from error
        finally:
            leave_server()
        enable_envs_cache()  # as vLLM does in its core; a request reads the environment some ten times
        self._calls.watch(has_peers=self.settings.data_ranks > 1)
        self._prefixes = CachedPrefixes(self._calls.llm.vllm_config.cache_config.block_size)
        await self._updates.connect_slow()
        await self._stamp_version(0)
        await self._capture_routes()
        if self.settings.drafts_with_model:
            await self._calls.workers("note_drafter")
        if self.settings.images is not None:
            await self._calls.workers("see_images", *astuple(self.settings.images))
            if not self.settings.syncs_tower:
                await self._calls.workers("note_tower")
        self._rendezvous = rendezvous_files(await self._calls.workers("rendezvous"))
        self._machine.serve(0)
        self._door.open()

    async def generate(self, requests: list[Request], sampling: Sampling) -> AsyncIterator[Samples]:
        """Yields responses as they finish. Those that finish together are rows of one batch.

        Requests wait while the engine is PAUSED. Raises RuntimeError where it refuses them, Interrupted when it sleeps
        or dies.
        """
        self._machine.check("generate")
        finished: asyncio.Queue[Sample | Exception] = asyncio.Queue()
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
                yield packed([replace(sample, engine=self.settings.engine_id) for sample in batch])
        finally:
            for task in tasks:
                task.cancel()

    async def _put_completion(self, finished: asyncio.Queue, request: Request, sampling: Sampling) -> None:
        try:
            await finished.put(await self._complete(request, sampling))
        except Exception as error:
            await finished.put(error)

    async def _complete(self, request: Request, sampling: Sampling) -> Sample:
        """Returns the response; for a request that was ended or given back, the part that exists."""
        name = f"{request.sample_id}-{next(self._numbers)}"
        given = self._input(request)
        if request.handle is not None:
            self._handles[request.handle] = name
        try:
            await self._door.enter(name)
            begun = self.version
            final = await self._final_output(name, request, given, sampling)
        except TurnedBack:
            return nothing_of(request, self._newest)
        finally:
            self._handles.pop(request.handle, None)
        answer = final.outputs[0]
        if answer.finish_reason == ABORTED and self._machine.state in REFUSES_REQUESTS:
            raise Interrupted(f"sample {request.sample_id}: {self._asleep_under(len(answer.token_ids))}")
        sample = sample_of(request, answer, self._spans_of(request, answer, begun))
        if sampling.routes:
            return with_routes(sample, await self._routes(name, request, answer))
        return sample

    def _input(self, request: Request) -> dict[str, Any]:
        """Returns the prompt as vLLM takes it. Raises RuntimeError for images where the engine sees none."""
        if not request.images:
            return engine_input(request)
        if self.settings.images is None:
            raise RuntimeError(f"{self.settings.name} sees no images, and sample {request.sample_id} has some")
        if self._images is None:
            from mrl.engine.image_inputs import RequestImages

            self._images = RequestImages(self.settings.arguments["model"], self.settings.images)
        return self._images.input_of(request)

    async def _final_output(self, name: str, request: Request, given: dict[str, Any], sampling: Sampling) -> Any:
        self._prefixes.enter(name, request.prompt_ids)
        final = None
        try:
            with self._calls.alive():
                parameters = sampling_parameters(request, sampling)
                async for output in self._calls.llm.generate(given, parameters, request_id=name):
                    final = output
        finally:
            self._door.leave(name)
            ended = ()
            if final is not None:
                ended = (final.outputs[0].token_ids, final.num_cached_tokens or 0)
            self._prefixes.leave(name, *ended)
        self._made += len(final.outputs[0].token_ids)
        return final

    def _asleep_under(self, tokens: int) -> str:
        return f"{self.settings.name} was put to sleep while it generated; {tokens} tokens are lost"

    async def _stamp_version(self, version: int) -> None:
        """Tells vLLM the version of its weights, in generations that stamp completions with it."""
        if self._generation.stamps_versions:
            with self._calls.alive():
                await self._calls.llm.update_weight_version(str(version))

    def _spans_of(self, request: Request, answer: Any, begun: int) -> Spans:
        """Returns which weights made which of its tokens. Raises RuntimeError where that is unknown or impossible."""
        try:
            if self._generation.stamps_versions:
                return stamped_spans(answer, begun, self._newest)
            return unstamped_spans(begun, self._newest)
        except RuntimeError as error:
            raise RuntimeError(f"{self.settings.name}, sample {request.sample_id}: {error}") from None

    async def _routes(self, name: str, request: Request, answer: Any) -> np.ndarray | None:
        """Returns the routes of prompt and response, or None where vLLM returned none. Raises DataError for impossible
        ones.
        """
        tokens = len(request.prompt_ids) + len(answer.token_ids)
        routes = answer.routed_experts
        if self.settings.captures_routes:
            shape, data = (await self._calls.workers("take_routes", name, tokens - 1))[0]
            routes = np.frombuffer(data, np.int16).reshape(shape)
        return self.settings.routes.from_engine(routes, tokens, f"{self.settings.name}, sample {request.sample_id}")

    async def _capture_routes(self) -> None:
        if not self.settings.captures_routes:
            return
        try:
            await self._calls.workers("capture_routes")
        except RuntimeError as error:
            raise EnvironmentFault(
                f"{self.settings.name} cannot return routes (actor.router_replay: R3): {error}"
            ) from error

    async def _forget_routes(self) -> None:
        """Drops the routes of given-up requests before new weights. Where routes are recorded, no request is held over
        an update.
        """
        if self.settings.captures_routes:
            await self._calls.workers("forget_routes")

    async def _check_order(self) -> None:
        """Checks that the same prompts in two orders give the same bits, without which no run can be repeated exactly.

        Data-parallel ranks check at once, each beside other prompts of the others, which must not change a bit either.
        """
        rng = random.Random(0)
        width = min(24, self.settings.arguments["max_model_len"] // 2)
        vocab = self.settings.vocab_size
        requests = []
        for number in range(8):
            prompt = [rng.randrange(vocab) for _ in range(1 + number * width // 8)]
            requests.append(Request(number, tuple(prompt), number))
        sampling = Sampling(temperature=1.0, max_tokens=8, stop_token_ids=())
        runs = []
        for order in (requests, requests[::-1]):
            done = Samples.joined([batch async for batch in self.generate(order, sampling)])
            runs.append(done.rows(np.argsort(done.sample_id)))
            await self._scheduler.drop_cache()
        if differing := sum(bits_of(runs[0], i) != bits_of(runs[1], i) for i in range(len(requests))):
            raise EnvironmentFault(
                f"{self.settings.name}: {differing} of {len(requests)} prompts gave other bits in another order"
                f"{' and beside other prompts of the other ranks' if self.settings.data_ranks > 1 else ''}; "
                "on CPU keep chunked prefill off (rollout.enable_chunked_prefill), and try model.dtype: float32"
            )

    async def _check_drafts(self) -> None:
        """Checks tokens and log-probs made with drafts. Raises EnvironmentFault where they are not the model's."""
        longest = self.settings.arguments["max_model_len"]
        asked = draft_check.requests(self.settings.vocab_size, longest)
        answers = Samples.joined([batch async for batch in self.generate(asked, draft_check.SAMPLING)])
        scores = []
        for prompt, response in zip(answers.prompts(), answers.responses(), strict=True):
            ids = [*prompt.tolist(), *response.tolist()]
            scores.append(list(draft_check.scored(await self._prompt_log_probs(ids), ids, len(prompt))))
        await self._scheduler.drop_cache()
        self._cache.renew()
        if fault := draft_check.fault(answers, scores, self.settings.arguments["dtype"]):
            raise EnvironmentFault(
                f"{self.settings.name}: with rollout.speculation {fault}; leave it out, or use a "
                "tried vLLM (`mrl doctor`)"
            )

    async def _prompt_log_probs(self, ids: list[int]) -> Any:
        """Returns vLLM's log-probs of a prompt's tokens, by position."""
        final = None
        prompt = {"type": "token", "prompt_token_ids": ids}
        with self._calls.alive():
            name = f"check-{next(self._numbers)}"
            async for output in self._calls.llm.generate(prompt, draft_check.scoring_parameters(), request_id=name):
                final = output
        return final.prompt_logprobs

    @asynccontextmanager
    async def _controlled(self, verb: str) -> AsyncIterator[None]:
        """Runs one control verb after those before it. Refuses an illegal one, or enters the state to which it
        leads.
        """
        async with self._control:
            self._machine.enter(verb)
            yield

    async def pause(self) -> None:
        """Holds requests from here on, those in flight and new ones, until `resume` or `commit`.

        Requests in flight continue afterwards. The weights of that time compute their prompt and tokens again.
        """
        async with self._controlled("pause"):
            await self._hold_requests()

    async def _hold_requests(self) -> None:
        await self._scheduler.pause("keep")
        self._cache.paused()

    async def pause_for_update(self, give_back: bool) -> bool:
        """Pauses for an update and a commit that follow. Returns whether requests are given back with their tokens.

        Otherwise they are held and continue with the next weights. vLLM 0.23 does not say which weights made which
        token, so there they are always given back. Requests that come before the commit are given back too. Each has to
        be sent again, behind its tokens.
        """
        gives_back = give_back or not self._generation.stamps_versions
        async with self._controlled("pause_for_update"):
            if gives_back:
                await self._scheduler.pause("abort")
                self._door.turn_back()
                await self._scheduler.empty()
            else:
                await self._hold_requests()
        return gives_back

    async def end_requests(self, handles: Collection[int]) -> None:
        """Ends requests; ignores handles that are not here. Their streams yield the tokens that exist."""
        async with self._controlled("end_requests"):
            await asyncio.sleep(0)  # a request of the call just before is known once its task has begun
            names = [self._handles[handle] for handle in handles if handle in self._handles]
            for name in names:
                self._door.turn_back_one(name)
            if under_way := [name for name in names if name in self._door.inside]:
                await self._calls.ask(self._calls.llm.abort(under_way))

    async def resume(self) -> None:
        """Ends a pause without new weights."""
        async with self._control:
            self._machine.check("resume")
            await self._scheduler.resume()
            self._machine.enter("resume")
            self._door.open()

    async def sleep(self) -> SleepReport:
        """Gives the memory of weights and KV cache back to the device. Requests in flight, or waiting, are ended.

        Returns when the device of every worker was idle and has its memory back. Nothing else may take memory of that
        device meanwhile, because vLLM compares the free memory before and after.
        """
        async with self._controlled("sleep"):
            aborted = len(self._door.inside)
            await self._scheduler.pause("abort")
            await self._scheduler.empty()
            aborted += self._door.send_away(self._asleep_under(0))
            await self._calls.workers("give_memory")
            return SleepReport(aborted, tuple(await self._memory()))

    async def give_up(self) -> EngineState:
        """Ends all requests and takes the version away, in any state; returns the new state.

        It is called when ranks are lost whose weights the engine held or was receiving. Other ranks will bring theirs.
        """
        async with self._controlled("give_up"):
            if self._machine.state is FENCED:
                await self._scheduler.pause("abort")
                await self._scheduler.empty()
                self._door.send_away(f"{self.settings.name} was given up for other weights")
            return self._machine.state

    async def wake_weights(self) -> None:
        """Takes memory for the weights. Its content is no valid weight until an update has brought some."""
        await self._wake("wake_weights", WEIGHTS)

    async def wake_cache(self) -> None:
        """Takes memory for the KV cache. The engine then lacks only a version."""
        await self._wake("wake_cache", CACHE)

    async def _wake(self, verb: str, part: str) -> None:
        """Changes the state only when all workers are awake, so that the call can be repeated."""
        async with self._control:
            self._machine.check(verb)
            await self._calls.workers("take_memory", part)
            self._machine.enter(verb)

    async def memory(self) -> list[ProcessMemory]:
        """Returns the memory that each worker's process holds now, asleep or not."""
        async with self._controlled("memory"):
            return await self._memory()

    async def _memory(self) -> list[ProcessMemory]:
        return [ProcessMemory(**answer) for answer in await self._calls.workers("held_memory")]

    async def begin_update(self) -> None:
        """Enters a weight update by the slow path: buckets, `finish_update`, then `commit`."""
        async with self._update("begin_update"):
            await self._updates.begin()

    async def load_bucket(self, data: np.ndarray, sha256: str) -> int:
        """Loads one bucket: safetensors bytes as a uint8 array, with their SHA-256. Returns bytes."""
        async with self._controlled("load_bucket"):
            return await self._updates.load_bucket(data, sha256)

    async def finish_update(self) -> None:
        """Leaves the slow path's update. Raises RuntimeError when a tensor did not come or was not written."""
        async with self._controlled("finish_update"):
            await self._updates.finish()
            self._machine.received()

    async def agree_on_sync(self, setup: dict[str, Any], plan_hash: str) -> int:
        """Agrees on the plan of weight syncs (EngineUpdates.agree_on_fast); returns the bytes of the weights."""
        async with self._controlled("agree_on_sync"):
            return await self._updates.agree_on_fast(setup, plan_hash, self._machine.holds_weights)

    async def connect_sync(self) -> None:
        """Connects the workers with the ranks (EngineUpdates.connect_fast)."""
        async with self._controlled("connect_sync"):
            await self._updates.connect_fast()

    async def release_arenas(self) -> None:
        """Unlinks the shared memory of syncs, once every rank has it open."""
        async with self._controlled("release_arenas"):
            self._updates.release_arenas()

    async def receive_weights(self, update: int, read_back: bool) -> list[dict[str, Any]]:
        """Takes one sync; returns the report of each worker (WorkerExtension.weight_update_report). `commit` has to
        follow.
        """
        async with self._update("receive_weights"):
            reports = await self._updates.receive(update, read_back)
            self._machine.received()
            return reports

    @asynccontextmanager
    async def _update(self, verb: str) -> AsyncIterator[None]:
        """Holds the engine for an update: no request gets in, from before its first byte on.

        Data-parallel ranks have to stand still first. After the last request they compute some more steps together, and
        a rank between two weights must not take part. So all ranks are called at once. Raises RuntimeError while
        unpaused requests run.
        """
        async with self._control:
            if self._machine.state is AWAKE and self._door.inside:
                raise RuntimeError(
                    f"{self.settings.name} refuses {verb}: {len(self._door.inside)} requests are under way; "
                    "first pause it"
                )
            self._machine.enter(verb)
            self._door.shut()
            if self.settings.data_ranks > 1 and not self._scheduler.is_paused:
                await self._scheduler.pause("keep")
            yield

    async def commit(self, version: int) -> VersionServed:
        """Serves the weights received last as `version`, and empties caches. Returns counts of the version before."""
        async with self._control:
            self._machine.check("commit")
            peak = self._cache.peak
            preemptions = self._cache.preemptions
            drafts = self._cache.drafts
            await self._stamp_version(version)
            await self._scheduler.drop_cache()
            await self._forget_routes()
            stale = self._prefixes.renew()
            self._newest = version
            self._cache.renew()
            await self._scheduler.resume()
            self._machine.serve(version)
            self._door.open()
            return VersionServed(stale, peak, preemptions, drafts)

    async def check_there(self) -> None:
        """Returns once vLLM's processes have answered, in every state. Raises Interrupted when one is lost."""
        await self._calls.check_there()

    async def fingerprints(self) -> dict[str, str]:
        """Returns the SHA-256 of every tensor that a worker of this engine computes with, by rank and name."""
        merged: dict[str, str] = {}
        async with self._controlled("fingerprints"):
            for worker in await self._calls.workers("weight_fingerprints"):
                merged |= worker
        return merged

    def _die(self) -> None:
        self._machine.die()
        self._door.shut()
        self._door.send_away(f"vLLM's processes below {self.settings.name} died", lost=True)

    def _note_files(self) -> None:
        """Writes down the files that a kill would leave behind, so that the next engine removes them."""
        note(self.settings.segments_file, self._updates.files | self._rendezvous)

    async def stop(self) -> None:
        """Ends vLLM's processes and removes what an unfinished update left behind. Legal in every state."""
        # the file lists what processes held that have died since
        segments = shared_memory_below(os.getpid()) | noted(self.settings.segments_file)
        self._updates.drop_buckets()
        self._updates.release_arenas()
        if self._calls.llm is not None:
            self._calls.llm.shutdown()
        remove_all(segments)  # vLLM kills its workers before they can free what they shared with each other
