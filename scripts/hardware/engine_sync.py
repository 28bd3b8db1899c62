"""The product's own engine and one rank on one device: weights by ipc, captured graphs, digests, log-probs, sleep, FP8.

No Ray: the check is the driver, the engine lives in its process and the rank in another. The rank has random weights,
which no file holds, under adapters, so that neither gradients nor an optimizer take the place of a second copy.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

from checks import Figures, Machine, Skip, check, expect
from layer_slices import sizes

from mrl.units import GIB

# nats between engine and trainer on the same tokens and weights, at most in the mean: float32, bfloat16, FP8
_CLOSE = {"float32": 1e-4, "bfloat16": 5e-2, "fp8": 0.2}
_LENGTH = 16  # tokens of a response
_LOUDER = 3.0  # times a matrix at a model's birth: a model that finds all words alike shows no error
_DEADLINE_S = 120.0


@check(limit_s=280)
def engine_sync(machine: Machine) -> Figures:
    """All layers of Qwen3-30B-A3B between a rank and an engine of one device: seconds of a sync, the same digests on
    both sides and in what the kernels hold, log-probs before and after other weights came under captured graphs, and
    after a sleep that keeps nothing.
    """
    return asyncio.run(_walked(machine, _config(machine, 48, {"rollout.gpu_memory_utilization": 0.46})))


@check(limit_s=150)
def engine_sync_fp8(machine: Machine) -> Figures:
    """The same of fewer layers at their real width with an engine that holds FP8."""
    settings = {"rollout.gpu_memory_utilization": 0.4, "rollout.quantization": "fp8"}
    return asyncio.run(_walked(machine, _config(machine, 12, settings), sleeps=False))


@check(limit_s=120)
def engine_routes(machine: Machine) -> Figures:
    """The experts that the engine's routers chose, of every token and layer, twice the same."""
    settings = {"rollout.gpu_memory_utilization": 0.4, "actor.router_replay": "R3"}
    if machine.small:
        settings["rollout.enable_prefix_caching"] = False
    return asyncio.run(_walked(machine, _config(machine, 6, settings), sleeps=False, routes=True))


def _config(machine: Machine, layers: int, settings: Figures) -> dict[str, Any]:
    from mrl.config.schema import RunConfig, with_values

    layout = {"world_size": 1, "tensor_model_parallel_size": 1, "sequence_parallel": False}
    dtype = "float32" if machine.small and "rollout.quantization" not in settings else "bfloat16"
    config = RunConfig.model_validate({
        "model": {"path": "", "dtype": dtype, "allow_torch_layers": True},
        "actor": {"layout": layout, "lora": {"rank": 16}, "ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 4},
        "rollout": {"n": 1, "max_num_seqs": 16},
        "data": {"train_batch_size": 4, "max_prompt_length": 32, "max_response_length": _LENGTH},
        "cluster": {"device": machine.device, "placement": "colocated", "n_gpus_per_node": 1},
    })  # fmt: skip
    model = sizes(machine.device) | {"num_hidden_layers": machine.size(layers, 2, "layers"), "torch_dtype": dtype}
    if machine.small:  # whole blocks of 128
        model |= {"head_dim": 128, "moe_intermediate_size": 128}
    return {"config": with_values(config, settings).model_dump(), "sizes": model}


def engine_environment(machine: Machine) -> dict[str, str]:
    """What mrl gives an engine's process: the size of its cache on a CPU, where vLLM would take a share of the host's
    memory, and on a device segments that others can open.
    """
    from mrl.platforms.hosting import get_hosting

    return get_hosting(machine.device).engine_environment(0, 1, 1, kvcache_gib=1)


async def _walked(machine: Machine, given: dict[str, Any], sleeps: bool = True, routes: bool = False) -> Figures:
    if find_spec("vllm") is None:
        raise Skip("vLLM is not installed")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(given["sizes"]))
        given["config"]["model"]["path"] = folder
        file = Path(folder) / "run.json"
        file.write_text(json.dumps(given["config"]))
        with _rank(machine, file) as rank:
            os.environ.update(engine_environment(machine))
            pair = _Pair(machine, rank, given["config"], Path(folder))
            try:
                return await pair.walk(sleeps, routes)
            finally:
                await pair.engine.stop()


class _Pair:
    """The engine here and the rank there."""

    def __init__(self, machine: Machine, rank: "_Rank", config: dict[str, Any], folder: Path):
        from mrl.config.schema import RunConfig
        from mrl.engine.requests import engine_settings
        from mrl.engine.vllm_engine import VllmEngine
        from mrl.model import load_model_spec

        self.machine, self.rank = machine, rank
        self.config = RunConfig.model_validate(config)
        spec = load_model_spec(self.config.model.path)
        self.engine = VllmEngine(engine_settings(self.config, spec, 0, folder, by_sync=True))
        self.version = 0

    async def walk(self, sleeps: bool, routes: bool) -> Figures:
        began = time.monotonic()
        await self.engine.start()
        found = self.machine.part({"engine_start_s": time.monotonic() - began})
        setup = self._setup()
        plan_hash = setup.plan().hash
        nbytes = await self.engine.agree_on_sync(setup.to_json(), plan_hash)
        began = time.monotonic()
        await asyncio.gather(self._ask("connect", setup.to_json()), self.engine.connect_sync())
        await self.engine.release_arenas()
        found |= {"connect_s": time.monotonic() - began, "gib": nbytes / GIB, "rounds": setup.plan().num_rounds}
        found |= self.machine.part(await self._synced("first"))
        found |= self.machine.part(await self._agrees("first", routes))
        await self._ask("scale", 0.8)
        found |= self.machine.part(await self._synced("second"))
        found |= self.machine.part(await self._agrees("second", routes))
        if sleeps:
            report = await self.engine.sleep()
            left = sum(memory.live_bytes for memory in report.left)
            found |= self.machine.part({"asleep_gib": left / GIB})
            await self.engine.wake_weights()
            found |= await self._synced("after sleep", wakes=True)
            found |= self.machine.part(await self._agrees("after sleep", routes))
        return found

    def _setup(self) -> Any:
        from mrl.model import read_hf_config
        from mrl.reshard.setup import SyncSetup
        from mrl.units import MIB

        rollout, device = self.config.rollout, self.machine.device
        return SyncSetup(
            hf_config=read_hf_config(self.config.model.path), train=self.config.actor.layout.model_dump(),
            rollout={"num_engines": 1, "tensor": 1, "data": 1, "expert": 1}, dialect=device,
            dtype=rollout.weights_dtype(self.config.model.dtype),
            topology={"ranks": [[0, 0]], "workers": [[0, int(self.machine.small)]]},
            budget_bytes=self.machine.size(self.config.reshard.budget_mb, 1, "budget_mb") * MIB,
            timeout_s=_DEADLINE_S, transport={"kind": "auto", "name": f"ladder-{uuid.uuid4().hex[:8]}"},
            fp8_block=rollout.fp8_block,
        )  # fmt: skip

    async def _ask(self, method: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(self.rank.ask, method, *arguments)

    async def _synced(self, name: str, wakes: bool = False) -> Figures:
        self.version += 1
        began = time.monotonic()
        sent, (report,) = await asyncio.gather(
            self._ask("send", self.version), self.engine.receive_weights(self.version, True)
        )
        seconds = time.monotonic() - began
        for kind in ("received", "held"):
            unlike = [name for name, digest in report[kind].items() if sent["digests"][name] != digest]
            expect(not unlike, f"{name}: what the engine {kind} is not what was sent: {unlike[:3]}")
        if wakes:
            await self.engine.wake_cache()
        await self.engine.commit(self.version)
        parts = {"rank_parts": sent["seconds"], "engine_parts": report["seconds"]}
        return {f"{name}_sync_s": seconds} | {f"{name}_{key}": value for key, value in parts.items()}

    async def _agrees(self, name: str, routes: bool) -> Figures:
        """Log-probs of sampled tokens by both."""
        import numpy as np

        from mrl.data.samples import Samples
        from mrl.engine.requests import Request, Sampling

        requests = [Request(i, tuple(3 + (7 * i + j) % 100 for j in range(4 + i)), i) for i in range(4)]
        sampling = Sampling(temperature=1.0, max_tokens=_LENGTH, stop_token_ids=(), routes=routes)
        both = []
        for _ in range(1 + routes):
            found = Samples.joined([batch async for batch in self.engine.generate(requests, sampling)])
            both.append(found.rows(np.argsort(found.sample_id)))
        found = both[0]
        prompts = [len(request.prompt_ids) for request in requests]
        theirs = await self._ask("log_probs", prompts, found.response_lengths.tolist(), found.token_ids.tolist())
        apart = float(np.abs(found.rollout_log_probs - np.array(theirs)).mean())
        close = _CLOSE["fp8" if self.config.rollout.fp8_block else self.config.model.dtype]
        expect(apart < close, f"{name}: engine and rank are {apart:.2g} nats apart on the same tokens and weights")
        figures = {f"{name}_nats_apart": apart, f"{name}_mean_log_prob": float(found.rollout_log_probs.mean())}
        if routes:
            same = all((one.routes == other.routes).all() for one, other in [both])
            expect(found.routes is not None and same, f"{name}: the engine's routes of the same requests differ")
            figures["routes"] = list(found.routes.shape)
        return figures


# --------------------------------------------------------------------------------------------------------- the rank


class _Rank:
    """Its process, asked by lines."""

    def __init__(self, process: subprocess.Popen):
        self._process = process

    def ask(self, method: str, *arguments: Any) -> Any:
        self._process.stdin.write(json.dumps([method, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        expect(bool(line), f"the rank ended in {method}")
        answer = json.loads(line)
        expect("error" not in answer, f"the rank's {method}: {answer.get('error')}")
        return answer["answer"]


@contextmanager
def _rank(machine: Machine, config: Path) -> Iterator[_Rank]:
    from mrl.platforms.hosting import get_hosting

    command = [sys.executable, __file__, machine.device, str(config)]
    own = os.environ | get_hosting(machine.device).actor_environment()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own)
    try:
        yield _Rank(process)
    finally:
        process.kill()
        process.wait()


class Served:
    """What the rank can be asked."""

    def __init__(self, device: str, config: Path):
        import torch

        from mrl.config.schema import RunConfig
        from mrl.platforms import prepare_process
        from mrl.platforms.hosting import set_rank_defaults
        from mrl.process.free_ports import free_port

        self.config = RunConfig.model_validate_json(config.read_text())
        set_rank_defaults(device, False, self.config.model.grouped_gemm)
        prepare_process(device, self.config.actor.layout.model_dump(), {})
        from mrl.rank import actor as module

        class Unloaded(module.MBridge):
            def load_hf(self, path: str) -> None:
                """Weights stay as Megatron makes them."""

        module.MBridge = Unloaded
        self.actor = module.MegatronActor(self.config, 0, 1, "127.0.0.1", free_port())
        self.sender: Any = None
        with torch.no_grad():
            self.scale(_LOUDER)

    def scale(self, factor: float) -> None:
        """Makes every matrix of the base model so many times as large."""
        import torch

        with torch.no_grad():
            for chunk in self.actor.chunks:
                for parameter in chunk.parameters():
                    if parameter.dim() > 1 and not parameter.requires_grad:
                        parameter.mul_(factor)

    def connect(self, setup: dict[str, Any]) -> None:
        from mrl.rank.local_parameters import LocalParameters
        from mrl.reshard.connect import connect_sender
        from mrl.reshard.setup import SyncSetup

        shards = LocalParameters(self.actor.chunks)
        self.sender = connect_sender(SyncSetup.from_json(setup), 0, shards, self.actor.adapters)

    def send(self, update: int) -> dict[str, Any]:
        report = self.sender.send(update, [0])
        return {"digests": report.digests[0], "seconds": report.seconds}

    def log_probs(self, prompts: list[int], responses: list[int], token_ids: list[int]) -> list[float]:
        import numpy as np

        from mrl.data.batch import TrainBatch

        nothing = np.zeros(sum(responses), np.float32)
        batch = TrainBatch(
            prompt_lengths=np.array(prompts), response_lengths=np.array(responses),
            temperature=np.ones(len(prompts), np.float32), token_ids=np.array(token_ids, np.int32),
            rollout_log_probs=nothing,
        )  # fmt: skip
        result = self.actor.log_probs(batch)
        found = np.zeros(sum(responses), np.float32)
        found[batch.token_indices(result.rows)] = result.log_probs
        return found.tolist()


def main() -> None:
    """Answers until its stdin ends."""
    from checks import quiet

    quiet()
    served: Any = None
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            served = served or Served(sys.argv[1], Path(sys.argv[2]))
            answer = {"answer": getattr(served, method)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
