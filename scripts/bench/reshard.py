"""Seconds and memory of one weight sync: four Megatron ranks (TP2, PP2, EP2) to one vLLM worker, a float32 Qwen3-MoE of
about 0.43 GB.

python scripts/bench/reshard.py [--repeat 5] [--budget-mb 16] [--layers 8 4] [--json]

Everything is measured in one run, in the same processes, after a warm-up. In each round every figure is taken once, one
after the other. Seconds are medians over the rounds, ratios are medians of the ratios inside a round. Two clocks: wall
clock of the slowest process, and processor seconds, which others on the machine change less. `loads`: the machine's,
before each round.

export_s      the bridge gathers every full tensor on every rank: what the slow path begins with
wire_s        pack, send, unpack, into plain tensors in load layout
digest_s      both sides' digests, the slower side; finalise_s: vLLM processes what was written; read_back_s: what it
              then holds is read
total_s       the whole sync with all of these, verified
total_ratio   total_s over export_s
processor     the same by processor seconds: of all processes together, but `digest_s` (of the slowest process),
              `finalise_s` and `read_back_s`; and of single parts, by side
peak_extra_bytes   resident memory at its peak over that before transports were opened, at each depth of the model
"""

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAYERS = (8, 4)
TRAIN = {
    "world_size": 4,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
}
GOALS = {"digest_s": 0.10, "total": {"shm": 0.12, "gloo": 0.33}}
KINDS = {"shm": "shm", "gloo": "p2p"}
_DEADLINE_S = 400.0


def hf_config(layers: int) -> dict[str, Any]:
    """107 million parameters at 8 layers, nearly all in experts."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 2048,
        "intermediate_size": 512,
        "moe_intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "max_position_embeddings": 256, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }  # fmt: skip


def write_model(folder: Path, layers: int) -> Path:
    """A checkpoint folder of random weights."""
    import numpy as np
    from safetensors.numpy import save_file

    from mrl.model import model_spec, tensor_specs

    folder.mkdir()
    config, random = hf_config(layers), np.random.default_rng(0)
    (folder / "config.json").write_text(json.dumps(config))
    specs = tensor_specs(model_spec(config))
    save_file(
        {s.name: random.standard_normal(s.shape, np.float32) * np.float32(0.05) for s in specs},
        folder / "model.safetensors",
    )
    return folder


class Memory:
    """Resident memory of this process over a level, in bytes."""

    def __init__(self) -> None:
        self._level = 0

    def set_level(self) -> None:
        """From here on, peaks count from what is held now."""
        self._level = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # starts a new peak

    def peak(self) -> int:
        """The most since `set_level`, over what was held then."""
        return _status("VmHWM") - self._level


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


class Rank:
    """One Megatron rank: methods are what the driver asks for."""

    def __init__(self, number: int, model: Path, port: int):
        import torch

        from mrl.config.schema import RunConfig
        from mrl.rank.actor import MegatronActor
        from mrl.rank.local_parameters import LocalParameters

        torch.set_num_threads(1)
        config = RunConfig.model_validate({
            "model": {"path": str(model), "dtype": "float32"},
            "actor": {"layout": TRAIN, "ppo_mini_batch_size": 1},
            "data": {"train_batch_size": 1}, "cluster": {"device": "cpu", "n_gpus_per_node": 5},
            "trainer": {"total_training_steps": 1},
        })  # fmt: skip
        self.number, self.actor, self.sender = number, MegatronActor(config, number, 4, "127.0.0.1", port), None
        self.shards, self.memory = LocalParameters(self.actor.chunks), Memory()

    def level(self) -> None:
        self.memory.set_level()

    def peak(self) -> int:
        return self.memory.peak()

    def connect(self, setup: dict) -> None:
        from mrl.reshard.connect import connect_sender
        from mrl.reshard.setup import SyncSetup

        if self.sender is not None:
            self.sender.end.close()
        self.sender = connect_sender(SyncSetup.from_json(setup), self.number, self.shards, self.actor.adapters)

    def sync(self, update: int) -> dict:
        return self.sender.send(update, [0]).to_json()

    def parts(self, update: int) -> dict[str, float]:
        """Processor seconds of the parts of a sync."""
        with processor_clock():
            return self.sync(update)["seconds"]

    def wire(self, update: int) -> None:
        self.sender.transfer(update, [0])

    def export(self) -> None:
        for _ in self.actor.export_hf():
            pass


class Engine:
    """One vLLM worker, in this process."""

    def __init__(self, model: Path):
        from vllm import LLM
        from vllm.config.weight_transfer import WeightTransferConfig

        from mrl.engine.receive import adapter_module

        self._llm = LLM(  # kept: collecting it takes the model from the worker
            model=str(model), dtype="float32", skip_tokenizer_init=True, max_model_len=128, max_num_seqs=4,
            enforce_eager=True,
            enable_chunked_prefill=False, max_num_batched_tokens=128,
            weight_transfer_config=WeightTransferConfig(backend="mrl"),
            worker_extension_cls=f"{adapter_module()}.WorkerExtension",
        )  # fmt: skip
        self.worker = self._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.memory = Memory()

    level, peak, parts = Rank.level, Rank.peak, Rank.parts

    def connect(self, setup: dict) -> int:
        from mrl.reshard.setup import SyncSetup

        plan_hash = SyncSetup.from_json(setup).plan().hash
        self.worker.init_weight_transfer_engine({"path": "fast", "setup": setup, "engine": 0, "plan_hash": plan_hash})
        self.worker.meet_ranks()
        self.receiver = self.worker.weight_transfer_engine.path._receiver
        self.plain = None
        return self.worker.weight_bytes()

    def sync(self, update: int) -> dict:
        self.worker.start_weight_update()
        self.worker.update_weights({"update": update, "read_back": True})
        self.worker.finish_weight_update()
        return self.worker.weight_update_report()

    def wire(self, update: int) -> None:
        if self.plain is None:
            self.plain = PlainTensors(self.receiver.plan)
        self.receiver.receive(self.plain, update)


class PlainTensors:
    """A Writer of tensors in load layout that stay."""

    def __init__(self, plan: Any):
        import torch

        from mrl.model.vllm_parameters import target_parameters

        targets = target_parameters(plan.model, plan.rollout, 0, plan.dialect, plan.dtype)
        self._tensors = {t.name: torch.zeros(t.local_shape) for t in targets}

    def tensor(self, parameter: str) -> Any:
        return self._tensors[parameter]

    def complete(self, module: str) -> None:
        pass


def serve(part: Rank | Engine, answers: Any) -> None:
    """Does what comes in on stdin, one JSON line a call, until it ends."""
    print(json.dumps({"answer": "ready"}), file=answers, flush=True)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        began = time.process_time()
        answer = getattr(part, method)(*arguments)
        used = time.process_time() - began
        print(json.dumps({"answer": answer, "processor_s": used}), file=answers, flush=True)


@contextmanager
def processor_clock() -> Iterator[None]:
    """Lets everything that times itself count processor seconds of this process."""
    from mrl.record.metrics import PhaseTimer

    wall = time.perf_counter
    time.perf_counter = time.process_time
    PhaseTimer.__init__.__defaults__ = (time.process_time,)
    try:
        yield
    finally:
        time.perf_counter = wall
        PhaseTimer.__init__.__defaults__ = (wall,)


class Process:
    """A part in a process of its own."""

    def __init__(self, folder: Path, name: str, arguments: list[str], environment: dict[str, str]):
        self.name, self._log = name, folder / f"{name}.log"
        self.processor_s = 0.0  # of the last answer
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log.open("w"), text=True,
            env=os.environ | environment,
        )  # fmt: skip

    def ask(self, method: str, *arguments: Any) -> None:
        self._process.stdin.write(json.dumps([method, arguments]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        ready, _, _ = select.select([self._process.stdout], [], [], _DEADLINE_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.end()
            raise SystemExit(f"{self.name} gave no answer:\n{self._log.read_text()[-3000:]}")
        told = json.loads(line)
        self.processor_s = told.get("processor_s", 0.0)
        return told["answer"]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class World:
    """The processes of one model."""

    def __init__(self, folder: Path, layers: int):
        from mrl.platforms.hosting import get_hosting
        from mrl.process.free_ports import free_port

        hosting, port = get_hosting("cpu"), str(free_port())
        model = write_model(folder / f"model-{layers}", layers)
        engine_environment = hosting.engine_environment(0, 1, 1, 1) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        path = {"PYTHONPATH": str(ROOT)}
        self.engine = Process(folder, f"engine-{layers}", ["--engine", str(model)], engine_environment | path)
        self.ranks = [
            Process(
                folder,
                f"rank-{layers}-{r}",
                ["--rank", str(r), str(model), port],
                hosting.actor_environment() | path,
            )
            for r in range(4)
        ]
        self.updates = 0
        self.bytes_required = 0
        self.config = hf_config(layers)
        for part in self.all:
            part.answer()

    @property
    def all(self) -> list[Process]:
        return [self.engine, *self.ranks]

    def call(self, method: str, *arguments: Any, of: list[Process] | None = None) -> tuple[float, list[Any]]:
        """Seconds until the last has answered, and the answers, the engine's first."""
        parts = of or self.all
        began = time.perf_counter()
        for part in parts:
            part.ask(method, *arguments)
        answers = [part.answer() for part in parts]
        return time.perf_counter() - began, answers

    def processor_s(self, of: list[Process] | None = None) -> float:
        """Processor seconds of these processes together, in the last call."""
        return sum(part.processor_s for part in of or self.all)

    def connect(self, kind: str, budget: int) -> Any:
        """Opens both sides anew. Returns the SyncSetup."""
        from mrl.process.free_ports import free_port
        from mrl.reshard.setup import SyncSetup

        setup = SyncSetup(
            hf_config=self.config, train=TRAIN, rollout={"num_engines": 1, "tensor": 1, "data": 1, "expert": 1},
            dialect="cpu",
            dtype="float32", topology={"ranks": [[0, r] for r in range(4)], "workers": [[0, 4]]}, budget_bytes=budget,
            timeout_s=60.0,
            transport={"kind": kind, "name": f"bench-{uuid.uuid4().hex[:8]}", "address": f"127.0.0.1:{free_port()}"},
        )  # fmt: skip
        _, answers = self.call("connect", setup.to_json())
        self.bytes_required = answers[0]
        return setup

    def transfer(self, method: str) -> tuple[float, list[Any]]:
        self.updates += 1
        return self.call(method, self.updates)

    def end(self) -> None:
        for part in self.all:
            part.end()


class Rounds:
    """What was measured over one transport, a figure a round."""

    def __init__(self, world: World, setup: Any):
        self.world = world
        self._setup = setup
        self.bytes_moved = 0
        self.wall: dict[str, list[float]] = {}
        self.processor: dict[str, list[float]] = {}

    def wire(self) -> None:
        """Bytes alone, into plain tensors."""
        self._keep("wire_s", self.world.transfer("wire")[0])

    def export(self) -> None:
        """The bridge's export, which only ranks take part in."""
        ranks = self.world.ranks
        seconds, _ = self.world.call("export", of=ranks)
        self._keep("export_s", seconds, ranks)

    def sync(self) -> None:
        """A whole sync, whose digests agree."""
        from mrl.reshard.sync_report import disagreements

        total, (report, *sends) = self.world.transfer("sync")
        told = [send | {"digests": {int(w): d for w, d in send["digests"].items()}} for send in sends]
        if wrong := disagreements(self._setup, told, [report]):
            raise SystemExit(f"not verified: {wrong[0]}")
        self.bytes_moved = report["bytes_moved"]
        self._keep("total_s", total)
        for name, seconds in _parts(report["seconds"], [send["seconds"] for send in sends]).items():
            self.wall.setdefault(name, []).append(seconds)

    def parts(self) -> None:
        """Another sync, whose parts are told in processor seconds."""
        _, (engine, *ranks) = self.world.transfer("parts")
        found = _parts(engine, ranks) | {f"engine.{name}": seconds for name, seconds in engine.items()}
        found |= {f"ranks.{name}": sum(rank[name] for rank in ranks) for name in ranks[0]}
        for name, seconds in found.items():
            self.processor.setdefault(name, []).append(seconds)

    def _keep(self, name: str, seconds: float, of: list[Process] | None = None) -> None:
        self.wall.setdefault(name, []).append(seconds)
        self.processor.setdefault(name, []).append(self.world.processor_s(of))

    def told(self) -> dict[str, Any]:
        """Medians of all rounds but the first, which warms up, and the rounds' seconds."""
        wall = {name: values[1:] for name, values in self.wall.items()}
        processor = {name: values[1:] for name, values in self.processor.items()}
        rounds = {name: [round(seconds, 4) for seconds in values] for name, values in wall.items()}
        return summary(wall) | {"processor": summary(processor), "bytes_moved": self.bytes_moved, "rounds": rounds}


def _parts(engine: dict[str, float], ranks: list[dict[str, float]]) -> dict[str, float]:
    return {
        "digest_s": max(engine["digest"], *(rank["digest"] for rank in ranks)),
        "finalise_s": engine["process"] + engine["finalise"],
        "read_back_s": engine["read_back"],
    }


def summary(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Medians of figures, and of the ratio inside a round."""
    found = {name: median(values) for name, values in seconds.items()}
    pairs = zip(seconds["total_s"], seconds["export_s"], strict=True)
    found["total_ratio"] = median(total / export for total, export in pairs)
    return {name: round(value, 4) for name, value in found.items()}


def measure_times(world: World, kind: str, budget: int, repeat: int) -> tuple[dict[str, Any], list[float]]:
    """Every figure of one transport once a round, and the load before each round."""
    rounds = Rounds(world, world.connect(kind, budget))
    loads = []
    for _ in range(repeat + 1):
        loads.append(round(os.getloadavg()[0], 2))
        for step in (rounds.wire, rounds.sync, rounds.parts, rounds.export):
            step()
    return rounds.told(), loads


def measure_memory(world: World, kind: str, budget: int) -> dict[str, int]:
    """Peak over the level before transports were opened, through opening, a first sync and a second."""
    world.call("level")
    world.connect(kind, budget)
    for _ in range(2):
        world.transfer("sync")
    _, peaks = world.call("peak")
    return {"trainer": max(peaks[1:]), "engine": peaks[0]}


def measure(folder: Path, depths: list[int], budget: int, repeat: int) -> dict[str, Any]:
    """Everything: see the module's docstring. `depths`: layers, the first of which is timed."""
    found: dict[str, Any] = {"peak_extra_bytes": {}}
    loads: dict[str, list[float]] = {}
    for depth in depths:
        world = World(folder, depth)
        try:
            memory = {way: measure_memory(world, kind, budget) for way, kind in KINDS.items()}
            found["peak_extra_bytes"][f"{depth} layers"] = memory
            if depth != depths[0]:
                continue
            for way, kind in KINDS.items():
                found[way], loads[way] = measure_times(world, kind, budget, repeat)
            found["bytes_required"] = world.bytes_required
        finally:
            world.end()
    found["export_s"] = found["shm"]["export_s"]
    found["bytes_moved"] = found["shm"]["bytes_moved"]
    allowed = {"trainer": 2 * budget, "engine": 2 * budget + 2 * largest_module(depths[0])}
    return found | {"budget_bytes": budget, "repeat": repeat, "loads": loads, "peak_allowed_bytes": allowed}


def largest_module(layers: int) -> int:
    """Bytes of the engine's largest module."""
    from mrl.model import model_spec
    from mrl.model.layout import RolloutLayout
    from mrl.model.vllm_parameters import target_parameters

    rollout = RolloutLayout(num_engines=1, tensor=1, data=1, expert=1)
    modules: dict[str, int] = {}
    for target in target_parameters(model_spec(hf_config(layers)), rollout, 0, "cpu", "float32"):
        modules[target.module] = modules.get(target.module, 0) + 4 * prod(target.local_shape)
    return max(modules.values())


def verdicts(result: dict[str, Any]) -> dict[str, bool]:
    """Which goals are met."""
    met = {"bytes_moved == bytes_required": result["bytes_moved"] == result["bytes_required"]}
    for name in KINDS:
        one = result[name]
        total = GOALS["total"][name]
        met[f"{name} digest <= 0.10 s"] = one["digest_s"] <= GOALS["digest_s"]
        met[f"{name} total <= {total:.2f} x export"] = one["total_ratio"] <= total
    for depth, kinds in result["peak_extra_bytes"].items():
        for name, sides in kinds.items():
            for side, peak in sides.items():
                met[f"{name} {side} memory at {depth}"] = peak <= result["peak_allowed_bytes"][side]
    return met


def show(result: dict[str, Any]) -> None:
    """Prints a table."""
    moved, required = (result[name] / 1e9 for name in ("bytes_moved", "bytes_required"))
    print(f"{moved:.3f} GB moved, {required:.3f} GB required; loads {result['loads']}")
    for name in KINDS:
        for clock, told in (("wall", result[name]), ("processor", result[name]["processor"])):
            words = [f"{key} {value:.3f}" for key, value in told.items() if isinstance(value, float)]
            print(f"{name} {clock}: {'  '.join(words)}")
    for depth, kinds in result["peak_extra_bytes"].items():
        words = [f"{name} {part} {peak / 2**20:.1f}" for name, parts in kinds.items() for part, peak in parts.items()]
        print(f"peak extra MiB at {depth}: {', '.join(words)}")
    print(f"allowed MiB: { ({s: round(b / 2**20, 1) for s, b in result['peak_allowed_bytes'].items()}) }")
    for goal, is_met in result["goals"].items():
        print(f"{'met   ' if is_met else 'MISSED'} {goal}")


def arguments() -> argparse.Namespace:
    """What the command line says; a process of the bench is told what it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--budget-mb", type=int, default=16)
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS), help="depths; the first is timed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Prints a table, or one JSON object."""
    args = arguments()
    if args.rank or args.engine:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is no answer
        if args.rank:
            number, model, port = args.rank
            serve(Rank(int(number), Path(model), int(port)), answers)
        else:
            serve(Engine(Path(args.engine)), answers)
        os._exit(0)  # vLLM's own teardown waits for seconds
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), args.layers, args.budget_mb * 2**20, args.repeat)
    result["goals"] = verdicts(result)
    if args.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
