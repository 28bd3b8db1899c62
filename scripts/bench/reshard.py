"""Seconds and memory of one weight sync: four Megatron ranks (TP2, PP2, EP2) to one vLLM worker, a float32 Qwen3-MoE of
about 0.43 GB.

python scripts/bench/reshard.py [--repeat 5] [--budget-mb 16] [--json]

Everything is measured in one run, in the same processes, after a warm-up; times are medians and wall clock of the
slowest process.

export_s      the bridge gathers every full tensor on every rank: what the slow path begins with
wire_s        pack, send, unpack, into plain tensors in load layout
reference_s   the same bytes in the same rounds and messages, packed and unpacked as one contiguous block each
digest_s      both sides' digests, the slower side; finalise_s: vLLM processes what was written; read_back_s: what it
              then holds is read
total_s       the whole sync with all of these, verified
floor         what of this cannot be left out, each alone in the engine's process, with the same sizes: copy_s (every
              byte of the experts once), pack_s (vLLM's operator puts them into the kernel's layout), digest_s (one
              pass), identity_s (linears that vLLM packs out of sight are read back), pack_linears_s (vLLM packs them);
              sum_s: two copies, two digests and one of each of the others. vllm_pack_s: the experts as vLLM's own
              reload packs them, into fresh memory that is copied afterwards
peak_extra_bytes   resident memory at its peak over that before transports were opened, at two depths of the model
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
from pathlib import Path
from statistics import median
from typing import Any

LAYERS = (8, 4)
TRAIN = {
    "world_size": 4,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
}
GOALS = {"wire": 1.5, "digest_s": 0.10, "shm": 1 / 10, "gloo": 1 / 3}
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

    def __init__(self, number: int, model: Path, port: int, lora_rank: int = 0):
        """`lora_rank`: of adapters on all linear layers; 0: none."""
        import torch

        from mrl.config.schema import RunConfig
        from mrl.megatron.actor import MegatronActor
        from mrl.megatron.local_parameters import LocalParameters

        torch.set_num_threads(1)
        config = RunConfig.model_validate({
            "model": {"path": str(model), "dtype": "float32"},
            "actor": {"layout": TRAIN, "ppo_mini_batch_size": 1, "lora": {"rank": lora_rank}},
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
        self.block = None

    def sync(self, update: int) -> dict:
        return self.sender.send(update, [0]).to_json()

    def wire(self, update: int) -> None:
        self.sender.transfer(update, [0])

    def reference(self, update: int) -> None:
        """Each message as one block out of contiguous memory of the shards' size."""
        import torch

        if self.block is None:
            self.messages = list(self.sender.plan.sends(self.number))
            self.block = torch.zeros(sum(m.nbytes for m in self.messages), dtype=torch.uint8)
        end, at = self.sender.end, 0
        end.begin(update, self.messages)
        for message in self.messages:
            end.slot(message).copy_(self.block[at : at + message.nbytes])
            end.post(message)
            at += message.nbytes
        end.finish()

    def export(self) -> float:
        began = time.perf_counter()
        for _ in self.actor.export_hf():
            pass
        return time.perf_counter() - began


class Engine:
    """One vLLM worker, in this process."""

    def __init__(self, model: Path):
        from vllm import LLM
        from vllm.config.weight_transfer import WeightTransferConfig

        from mrl.vllm.receive import adapter_module

        self._llm = LLM(  # kept: collecting it takes the model from the worker
            model=str(model), dtype="float32", skip_tokenizer_init=True, max_model_len=128, max_num_seqs=4,
            enforce_eager=True,
            enable_chunked_prefill=False, max_num_batched_tokens=128,
            weight_transfer_config=WeightTransferConfig(backend="mrl"),
            worker_extension_cls=f"{adapter_module()}.WorkerExtension",
        )  # fmt: skip
        self.worker = self._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.memory = Memory()

    level, peak = Rank.level, Rank.peak

    def connect(self, setup: dict) -> int:
        from mrl.reshard.setup import SyncSetup

        plan_hash = SyncSetup.from_json(setup).plan().hash
        self.worker.init_weight_transfer_engine({"path": "fast", "setup": setup, "engine": 0, "plan_hash": plan_hash})
        self.worker.meet_ranks()
        self.receiver = self.worker.weight_transfer_engine.path._receiver
        self.plain = self.block = None
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

    def reference(self, update: int) -> None:
        """Each message as one block into contiguous memory of the engine's size."""
        import torch

        from mrl.reshard.messages import by_round

        if self.block is None:
            self.rounds = by_round(self.receiver.plan.receives(0))
            self.block = torch.zeros(sum(m.nbytes for messages in self.rounds for m in messages), dtype=torch.uint8)
        end, at = self.receiver.end, 0
        end.begin(update, self.rounds)
        for messages in self.rounds:
            for buffer in end.take(messages):
                self.block[at : at + buffer.numel()].copy_(buffer)
                at += buffer.numel()
            end.release(messages)

    def floor(self) -> dict[str, float]:
        """Seconds of single steps, the best of three. The engine's weights are lost."""
        import torch
        from vllm._custom_ops import cpu_prepack_moe_weight

        from mrl.reshard.digest import lane_sums_of_each
        from mrl.vllm.v0_common import packed_linears

        model = self.worker.model_runner.get_model()
        layers = [layer for layer in model.modules() if hasattr(layer, "w13_weight")]
        isa = layers[0].quant_method.moe_kernel.fused_experts.isa
        loaded = {leaf: torch.randn_like(getattr(layers[0], leaf)) for leaf in ("w13_weight", "w2_weight")}
        pairs = [(loaded[leaf], getattr(layer, leaf).data) for layer in layers for leaf in loaded]
        linears = [(layer, weight.contiguous()) for layer, weight in _hidden_linears(model)]
        steps = {
            "copy_s": lambda: [kernel.copy_(load) for load, kernel in pairs],
            "pack_s": lambda: [torch.ops._C.prepack_moe_weight(load, kernel, isa) for load, kernel in pairs],
            "digest_s": lambda: [lane_sums_of_each(kernel, (0, 0)) for _, kernel in pairs],
            "identity_s": lambda: list(packed_linears(model)),
            "pack_linears_s": lambda: [_pack_linear(layer, weight) for layer, weight in linears],
            "vllm_pack_s": lambda: [kernel.copy_(cpu_prepack_moe_weight(load, isa)) for load, kernel in pairs],
        }
        with torch.no_grad():
            found = {name: min(_seconds(step) for _ in range(3)) for name, step in steps.items()}
        alone = sum(found[name] for name in ("pack_s", "identity_s", "pack_linears_s"))
        return found | {"sum_s": alone + 2 * found["copy_s"] + 2 * found["digest_s"]}


def _hidden_linears(model: Any) -> list[tuple[Any, Any]]:
    """(layer, weight) of linears whose weight lives on in the kernel's own form alone."""
    from mrl.vllm.v0_common import packed_linears

    layers = dict(model.named_modules())
    return [(layers[name], weight) for name, weight in packed_linears(model) if layers[name].weight.numel() == 0]


def _pack_linear(layer: Any, weight: Any) -> None:
    import torch

    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.quant_method.process_weights_after_loading(layer)


def _seconds(step: Any) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


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
        print(json.dumps({"answer": getattr(part, method)(*arguments)}), file=answers, flush=True)


class Process:
    """A part in a process of its own."""

    def __init__(self, folder: Path, name: str, arguments: list[str], environment: dict[str, str]):
        self.name, self._log = name, folder / f"{name}.log"
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
        return json.loads(line)["answer"]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class World:
    """The processes of one model, whose ranks train adapters where these have a rank."""

    def __init__(self, folder: Path, layers: int, lora_rank: int = 0):
        from mrl.cluster.prerequisites import free_port
        from mrl.platforms.hosting import get_hosting

        hosting, port = get_hosting("cpu"), str(free_port())
        model = write_model(folder / f"model-{layers}", layers)
        engine_environment = hosting.engine_environment(0, 1, 1, 1) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        self.engine = Process(folder, f"engine-{layers}", ["--engine", str(model)], engine_environment)
        self.ranks = [
            Process(
                folder,
                f"rank-{layers}-{r}",
                ["--rank", str(r), str(model), port, "--lora-rank", str(lora_rank)],
                hosting.actor_environment(),
            )
            for r in range(4)
        ]
        self.updates = 0
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

    def connect(self, kind: str, budget: int) -> Any:
        from mrl.cluster.prerequisites import free_port
        from mrl.reshard.setup import SyncSetup

        setup = SyncSetup(
            hf_config=self.config, train=TRAIN, rollout={"num_engines": 1, "tensor": 1, "data": 1, "expert": 1},
            dialect="cpu",
            dtype="float32", topology={"ranks": [[0, r] for r in range(4)], "workers": [[0, 4]]}, budget_bytes=budget,
            timeout_s=60.0,
            transport={"kind": kind, "name": f"bench-{uuid.uuid4().hex[:8]}", "address": f"127.0.0.1:{free_port()}"},
        )  # fmt: skip
        _, answers = self.call("connect", setup.to_json())
        return setup, answers[0]

    def transfer(self, method: str) -> tuple[float, list[Any]]:
        self.updates += 1
        return self.call(method, self.updates)

    def end(self) -> None:
        for part in self.all:
            part.end()


def measure_memory(world: World, kind: str, budget: int) -> dict[str, int]:
    """Peak over the level before transports were opened, through opening, a first sync and a second."""
    world.call("level")
    world.connect(kind, budget)
    for _ in range(2):
        world.transfer("sync")
    _, peaks = world.call("peak")
    return {"trainer": max(peaks[1:]), "engine": peaks[0]}


def measure_times(world: World, kind: str, budget: int, repeat: int) -> tuple[dict[str, Any], Any, int]:
    """Medians of one transport, the setup, and the bytes that the live engine needs."""
    from mrl.reshard.sync_report import disagreements

    setup, needed = world.connect(kind, budget)
    found: dict[str, list[float]] = {
        "wire_s": [],
        "reference_s": [],
        "total_s": [],
        "digest_s": [],
        "finalise_s": [],
        "read_back_s": [],
    }
    for number in range(repeat + 1):
        wire, _ = world.transfer("wire")
        reference, _ = world.transfer("reference")
        total, (report, *sends) = world.transfer("sync")
        if wrong := disagreements(
            setup, [s | {"digests": {int(w): d for w, d in s["digests"].items()}} for s in sends], [report]
        ):
            raise SystemExit(f"not verified: {wrong[0]}")
        if number == 0:  # warm-up
            continue
        seconds = report["seconds"]
        found["wire_s"].append(wire)
        found["reference_s"].append(reference)
        found["total_s"].append(total)
        found["digest_s"].append(max(seconds["digest"], *(s["seconds"]["digest"] for s in sends)))
        found["finalise_s"].append(seconds["process"] + seconds["finalise"])
        found["read_back_s"].append(seconds["read_back"])
    moved = report["bytes_moved"]
    return {key: round(median(values), 4) for key, values in found.items()} | {"bytes_moved": moved}, setup, needed


def measure(folder: Path, budget: int, repeat: int) -> dict[str, Any]:
    """Everything: see the module's docstring."""
    from mrl.model.vllm_parameters import target_parameters

    result: dict[str, Any] = {
        "budget_bytes": budget,
        "repeat": repeat,
        "peak_extra_bytes": {},
        "peak_allowed_bytes": {},
    }
    for layers in LAYERS:
        world = World(folder, layers)
        try:
            memory = {name: measure_memory(world, kind, budget) for name, kind in KINDS.items()}
            result["peak_extra_bytes"][f"{layers} layers"] = memory
            if layers == LAYERS[0]:
                for name, kind in KINDS.items():
                    result[name], setup, needed = measure_times(world, kind, budget, repeat)
                exports = [max(world.call("export", of=world.ranks)[1]) for _ in range(repeat + 1)][1:]
                result |= {
                    "export_s": round(median(exports), 4),
                    "bytes_required": needed,
                    "bytes_moved": result["shm"]["bytes_moved"],
                }
                (floor,) = world.call("floor", of=[world.engine])[1]
                result["floor"] = {name: round(seconds, 4) for name, seconds in floor.items()}
        finally:
            world.end()
    modules: dict[str, int] = {}
    for target in target_parameters(setup.model, setup.rollout_layout, 0, "cpu", "float32"):
        size = 4
        for extent in target.local_shape:
            size *= extent
        modules[target.module] = modules.get(target.module, 0) + size
    result["peak_allowed_bytes"] = {"trainer": 2 * budget, "engine": 2 * budget + 2 * max(modules.values())}
    return result


def verdicts(result: dict[str, Any]) -> dict[str, bool]:
    """Which goals are met."""
    met = {"bytes_moved == bytes_required": result["bytes_moved"] == result["bytes_required"]}
    for name in KINDS:
        one = result[name]
        met[f"{name} wire <= 1.5 x reference"] = one["wire_s"] <= GOALS["wire"] * one["reference_s"]
        met[f"{name} digest <= 0.10 s"] = one["digest_s"] <= GOALS["digest_s"]
        met[f"{name} total <= {GOALS[name]:.2f} x export"] = one["total_s"] <= GOALS[name] * result["export_s"]
    for depth, kinds in result["peak_extra_bytes"].items():
        for name, sides in kinds.items():
            for side, peak in sides.items():
                met[f"{name} {side} memory at {depth}"] = peak <= result["peak_allowed_bytes"][side]
    return met


def main() -> None:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--budget-mb", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--lora-rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank or args.engine:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is no answer
        if args.rank:
            number, model, port = args.rank
            serve(Rank(int(number), Path(model), int(port), args.lora_rank), answers)
        else:
            serve(Engine(Path(args.engine)), answers)
        os._exit(0)  # vLLM's own teardown waits for seconds
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), args.budget_mb * 2**20, args.repeat)
    result["goals"] = verdicts(result)
    if args.json:
        print(json.dumps(result))
        return
    print(
        f"{result['bytes_moved'] / 1e9:.3f} GB moved, {result['bytes_required'] / 1e9:.3f} GB required; export "
        f"{result['export_s']:.3f} s"
    )
    for name in KINDS:
        print(
            f"{name:6}" + "  ".join(f"{key} {value:.3f}" for key, value in result[name].items() if key.endswith("_s"))
        )
    print("floor " + "  ".join(f"{key} {value:.3f}" for key, value in result["floor"].items()))
    for depth, kinds in result["peak_extra_bytes"].items():
        print(
            f"peak extra MiB at {depth}: "
            f"{ ({n: {s: round(b / 2**20, 1) for s, b in sides.items()} for n, sides in kinds.items()}) }"
        )
    print(f"allowed MiB: { ({s: round(b / 2**20, 1) for s, b in result['peak_allowed_bytes'].items()}) }")
    for goal, is_met in result["goals"].items():
        print(f"{'met   ' if is_met else 'MISSED'} {goal}")


if __name__ == "__main__":
    main()
