"""One real VllmEngine through sleeps and syncs, weights shard by shard from files: `python engine_sleep.py JOB.json`.

vLLM's processes import this module as the worker extension; what it adds stands in the wire's place (engine_slices).
"""

import asyncio
import gc
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
from engine_slices import FileEnd, SlicesExtension, connect
from safetensors.torch import load_file

from mrl.data.samples import Samples
from mrl.engine import receive
from mrl.engine.leftovers import shared_memory_below
from mrl.engine.receive import installed_generation
from mrl.engine.requests import EngineSettings, Request, Sampling
from mrl.engine.vllm_engine import VllmEngine
from mrl.errors import Interrupted
from mrl.platforms.process_memory import live_bytes
from mrl.reshard.setup import SyncSetup

LENGTH = 12
REQUESTS = [Request(i, tuple(3 + (7 * i + j) % 100 for j in range(3 + i % 9)), i) for i in range(12)]


_freeze, _imported = gc.freeze, []  # live bytes of what the imports made, which the ledger is not to count


def _freeze_and_count() -> None:
    """The first time is that of CpuWorker.load_model, before the first tensor of the engine."""
    if not _imported:
        gc.unfreeze()
        _imported.append(live_bytes())
    _freeze()


gc.freeze = _freeze_and_count


class WorkerExtension(SlicesExtension):
    """The product's, with a wire of files under it."""

    def lay_wire(self) -> None:
        """Before the fast path connects."""
        receive.connect_receiver = connect

    def feed(self, folder: str) -> None:
        """What the wire brings from now on; nothing without a folder."""
        FileEnd.weights = load_file(Path(folder) / "model.safetensors") if folder else {}

    def counted(self) -> dict[str, int]:
        """Live bytes as the ledger has them, and as the garbage collector has them when nothing is hidden from it."""
        hidden = gc.get_freeze_count()
        gc.unfreeze()
        found = live_bytes(roots=self.known_tensors())
        return {"roots": live_bytes(), "all": found - _imported[0], "hidden": hidden, "packed": self.packed_bytes()}

    def holds_nan(self) -> dict[str, bool]:
        """By everything that kernels read: whether all its numbers are NaN."""
        model = self.computing_model()
        from mrl.engine.v0_common import packed_linears

        named = [*model.named_parameters(), *((f"{name}.<packed>", weight) for name, weight in packed_linears(model))]
        return {name: bool(weight.isnan().all()) for name, weight in named if weight.numel()}

    def cache_is_zero(self) -> bool:
        """Of the KV cache."""
        return not any(bool(layer.any()) for layer in self.model_runner.kv_caches)

    def resources(self) -> dict[str, int]:
        """What a leak would show in, of this process."""
        return {"handles": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}


if __name__ != "__main__":
    import importlib

    TransferEngine = importlib.import_module(receive.adapter_module()).TransferEngine


class SleepingEngine(VllmEngine):
    """The product's engine; its workers get the extension above."""

    seconds: ClassVar[dict[str, float]] = {}  # of the last cycle's parts

    async def start(self) -> float:
        """As the product's."""
        real, receive.adapter_module = receive.adapter_module, lambda: "engine_sleep"
        try:
            return await super().start()
        finally:
            receive.adapter_module = real

    async def answers(self) -> list:
        """Tokens and log-probs of fixed requests, all at once, in a fixed order."""
        sampling = Sampling(temperature=1.0, max_tokens=LENGTH, stop_token_ids=())
        found = Samples.joined([batch async for batch in self.generate(REQUESTS, sampling)])
        found = found.rows(np.argsort(found.sample_id))
        log_probs = np.split(found.rollout_log_probs, np.cumsum(found.response_lengths)[:-1])
        return [[ids.tolist(), values.tolist()] for ids, values in zip(found.responses(), log_probs, strict=True)]

    async def workers(self, method: str, *arguments) -> list:
        """Any method of the workers."""
        return await self._calls.workers(method, *arguments)

    async def lay_wire(self, setup: dict) -> None:
        """Connects the fast path, to files."""
        await self.workers("lay_wire")
        await self.agree_on_sync(setup, SyncSetup.from_json(setup).plan().hash)
        await self.connect_sync()

    async def bring(self, folder: str, path: str) -> None:
        """A checkpoint's weights by one of the two paths."""
        if path == "fast":
            await self.workers("feed", folder)
            await self.receive_weights(1, True)
            await self.workers("feed", "")
            return
        import hashlib

        import numpy as np

        data = (Path(folder) / "model.safetensors").read_bytes()
        await self.begin_update()
        await self.load_bucket(np.frombuffer(data, np.uint8), hashlib.sha256(data).hexdigest())
        await self.finish_update()

    async def sleep_and_sync(self, folder: str, version: int, path: str = "fast") -> dict:
        """One cycle; what the memory was in each state."""
        began = [time.monotonic()]
        memory = {"asleep": (await self.sleep()).left}
        began.append(time.monotonic())
        await self.wake_weights()
        began.append(time.monotonic())
        memory["weights"] = await self.memory()
        began.append(time.monotonic())
        await self.bring(folder, path)
        began.append(time.monotonic())
        await self.wake_cache()
        began.append(time.monotonic())
        memory["cache"] = await self.memory()
        await self.commit(version)
        spent = [b - a for a, b in itertools.pairwise(began)]
        self.seconds = dict(sleep=spent[0], wake_weights=spent[1], bring=spent[3], wake_cache=spent[4])
        return {state: [vars(one) for one in found] for state, found in memory.items()}


def settings_of(job: dict) -> EngineSettings:
    """Settings of the one engine."""
    expected = tuple((name, tuple(shape)) for name, shape in job["expected"])
    file = str(Path(tempfile.mkdtemp()) / "segments")
    return EngineSettings(0, job["arguments"], False, job["vocab_size"], expected, file)


async def refused(call) -> str:
    """What a call is refused with; empty when it is not."""
    try:
        await call
    except (RuntimeError, Interrupted) as error:
        return f"{type(error).__name__}: {error}"
    return ""


async def walk(engine: SleepingEngine, job: dict) -> dict:
    """Everything that the test asks about, in one start."""
    found: dict = {"answers": [await engine.answers()], "prints": [await engine.fingerprints()]}
    found["awake"] = [vars(one) for one in await engine.memory()]
    found["counted"] = await engine.workers("counted")
    await walk_syncs(engine, job, found)
    await walk_forgotten_sync(engine, job, found)
    await walk_flight(engine, job, found)
    return found


async def note(engine: SleepingEngine, found: dict) -> None:
    """Adds what the engine says and holds now."""
    found["answers"].append(await engine.answers())
    found["prints"].append(await engine.fingerprints())


async def walk_syncs(engine: SleepingEngine, job: dict, found: dict) -> None:
    """Both paths, there and back."""
    model, other, setup = job["model"], job["other"], job["setup"]
    await engine.lay_wire(setup)
    found["memory"] = []
    for version, (folder, path) in enumerate([(other, "fast"), (model, "fast"), (other, "slow"), (model, "slow")], 1):
        if path == "fast" and version > 2:
            await engine.lay_wire(setup)
        found["memory"].append(await engine.sleep_and_sync(folder, version, path))
        await note(engine, found)


async def walk_forgotten_sync(engine: SleepingEngine, job: dict, found: dict) -> None:
    """The engine sleeps and wakes without new weights; then it gets them after all."""
    await engine.sleep()
    found["asleep_refuses"] = [await refused(engine.receive_weights(9, True)), await refused(engine.fingerprints())]
    found["worker_refuses"] = await refused(engine.workers("start_weight_update"))
    await engine.wake_weights()
    found["nan"] = await engine.workers("holds_nan")
    found["connected_asleep"] = await refused(engine.lay_wire(job["setup"]))
    await engine.wake_cache()
    found["cache_is_zero"] = await engine.workers("cache_is_zero")
    found["forgotten"] = [await refused(engine.answers()), await refused(engine.commit(9))]
    engine._machine.received()  # forced past the fence
    await engine.commit(9)
    forced = await engine.answers()
    found["forced"] = [[t, ["nan" if math.isnan(p) else p for p in probs]] for t, probs in forced]
    await engine.sleep_and_sync(job["model"], 10)
    await note(engine, found)


async def walk_flight(engine: SleepingEngine, job: dict, found: dict) -> None:
    """Requests in flight, and requests that arrive while it is paused."""
    asked = asyncio.create_task(engine.answers())
    await until(lambda: len(engine._door.inside) == len(REQUESTS))
    report = await engine.sleep()
    found["aborted"] = report.aborted
    found["told"] = await refused(asked)
    await engine.wake_weights()
    await engine.bring(job["model"], "fast")
    await engine.wake_cache()
    await engine.commit(11)
    before = asyncio.create_task(engine.answers())
    await until(lambda: len(engine._door.inside) == len(REQUESTS))
    await engine.pause()
    during = asyncio.create_task(engine.answers())
    await asyncio.sleep(0.3)
    found["done_in_pause"] = [before.done(), during.done()]
    await engine.resume()
    found["answers"] += [await before, await during]


async def drafting(engine: SleepingEngine, job: dict) -> dict:
    """An engine that drafts: there and back, and a wake without a sync."""
    found: dict = {"answers": [await engine.answers()], "prints": [await engine.fingerprints()]}
    awake = [vars(one) for one in await engine.memory()]
    await engine.lay_wire(job["setup"])
    for version, folder in enumerate((job["other"], job["model"]), 1):
        found["memory"] = (await engine.sleep_and_sync(folder, version)) | {"awake": awake}
        await note(engine, found)
    await engine.sleep()
    await engine.wake_weights()
    found["nan"] = await engine.workers("holds_nan")
    await engine.wake_cache()
    found["cache_is_zero"] = await engine.workers("cache_is_zero")
    return found


async def cycles(engine: SleepingEngine, job: dict) -> dict:
    """Many sleeps and syncs, as many of them as there is time for; what each left behind."""
    began = time.monotonic()
    await engine.lay_wire(job["setup"])
    rows = []
    folders = [job["other"], job["model"]]
    answers = {}
    for number in range(job["cycles"]):
        if time.monotonic() - began > job["seconds"]:
            break
        memory = await engine.sleep_and_sync(folders[number % 2], number + 1)
        found = await engine.answers()
        equal = answers.setdefault(number % 2, found) == found
        rows.append({"asleep": memory["asleep"], "awake": [vars(one) for one in await engine.memory()], "equal": equal,
                     "resources": await engine.workers("resources"), "seconds": engine.seconds,
                     **own_resources()})  # fmt: skip
    return {"rows": rows}


def own_resources() -> dict[str, int]:
    """Of this process and those below it."""
    import psutil

    me = psutil.Process()
    return {"processes": len(me.children(recursive=True)), "segments": len(shared_memory_below(os.getpid())),
            "own_handles": len(os.listdir("/proc/self/fd")), "own_resident": me.memory_info().rss}  # fmt: skip


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that comes soon."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise TimeoutError


async def main(job: dict) -> dict:
    """Starts the engine, does the job and ends it."""
    engine = SleepingEngine(settings_of(job))
    try:
        await engine.start()
        return await {"walk": walk, "cycles": cycles, "drafting": drafting}[job["what"]](engine, job)
    finally:
        await engine.stop()


if __name__ == "__main__":
    assert installed_generation()
    file = Path(sys.argv[1])
    file.with_suffix(".out").write_text(json.dumps(asyncio.run(main(json.loads(file.read_text())))))
