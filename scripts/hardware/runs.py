"""Whole runs of a tiny model through `mrl train`: engines and ranks beside each other, in turns, stopped and resumed.

What a run's metrics say is what is checked: that the engine holds the trainer's weights (handshake, slices and read-
back are part of every sync), that both compute the same probabilities, that a sleeping engine gives its memory back.
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import ROOT, Figures, Machine, Skip, Wrong, check, expect

STEPS = 2
# of a run's own tests on the CPU in float32; of engines in bfloat16 1e-3 to 1e-2 is usual
_CLOSE = {True: 1e-4, False: 5e-2}
# an untaught model answers nothing rightly, and then nothing would be learnt: weights would never change
_REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 2
"""
# a word has three bits of fraction: tens of times coarser than bfloat16
_QUANTISED_CLOSE = 0.2
QUANTISED = {"model.dtype": "bfloat16", "rollout.quantization": "fp8"}
_TIMES = ("gen", "old_log_prob", "update_actor", "reshard", "step")


@check()
def run_separate(machine: Machine) -> Figures:
    """Ranks and an engine on devices of their own, with the engine's routes (R3); every sync read back."""
    _has_engines()
    with tempfile.TemporaryDirectory(prefix="mrl-ladder-") as folder:
        settings = separate_settings(machine.device, device_count(machine))
        rows = _trained(machine, "cpu.yaml", Path(folder), settings)
    return _judged(machine, rows) | _of_last(rows, "router/missing_routes", "router/rollout_drift")


@check()
def run_colocated(machine: Machine) -> Figures:
    """Ranks and an engine in turns on the same devices: sleep, wake, offload, and weights over the device's memory."""
    _has_engines()
    with tempfile.TemporaryDirectory(prefix="mrl-ladder-") as folder:
        rows = _trained(
            machine, "cpu-colocated.yaml", Path(folder), colocated_settings(machine.device, device_count(machine))
        )
    return _judged(machine, rows) | {name: value for name, value in rows[-1].items() if name.startswith("switch/")}


@check()
def run_quantised(machine: Machine) -> Figures:
    """The same with engines in FP8: words and scales of the trained weights, read back from what the kernels hold."""
    _has_engines()
    if machine.device == "npu":
        raise Skip("vllm-ascend has no engines in FP8")
    settings = colocated_settings(machine.device, device_count(machine))
    with tempfile.TemporaryDirectory(prefix="mrl-ladder-") as folder:
        world = make_world(Path(folder))
        _widen(world / "model")
        rows = _trained(machine, "cpu-colocated.yaml", Path(folder), settings | QUANTISED, world)
    return _judged(machine, rows, _QUANTISED_CLOSE) | _of_last(rows, "rollout_corr/k3_kl")


@check()
def resume(machine: Machine) -> Figures:
    """A step, a save and a step; the save resumed: the same bits, on devices too."""
    _has_engines()
    with tempfile.TemporaryDirectory(prefix="mrl-ladder-") as folder:
        world, settings = make_world(Path(folder)), colocated_settings(machine.device, device_count(machine))
        settings |= _files(world) | {"trainer.run_dir": str(Path(folder) / "run")}
        words = ("verify", _preset("cpu-colocated.yaml"), "--resume", "--steps", "1", "--json")
        out = _mrl(machine, *words, *_arguments(settings))
    found = json.loads(out.splitlines()[-1])
    expect(found["ok"], f"a resumed run is not the one that went on: {found.get('difference')}")
    return {name: found[name] for name in ("steps", "bytes") if name in found}


def separate_settings(device: str, devices: int) -> dict[str, Any]:
    """What differs from the CPU's preset on so many devices; raises Skip where two do not fit."""
    common: dict[str, Any] = {"actor.router_replay": "R3"}
    if device == "cpu":
        return common | {"rollout.enable_prefix_caching": False}  # tokens of cached prompts come without routes there
    if devices < 2:
        raise Skip("one device: ranks and engines take turns on it (run_colocated)")
    layout = {"actor.layout.world_size": 1, "actor.layout.tensor_model_parallel_size": 1,
              "actor.layout.sequence_parallel": False,
              "actor.layout.expert_model_parallel_size": 1, "cluster.n_gpus_per_node": 2}  # fmt: skip
    return common | layout | _on_device(device)


def colocated_settings(device: str, devices: int) -> dict[str, Any]:
    """The same of the preset whose engines and ranks share devices: two where there are two."""
    if device == "cpu":
        return {}
    ranks = 2 if devices > 1 else 1
    spread = {f"actor.layout.{kind}_model_parallel_size": ranks for kind in ("tensor", "expert")}
    shared = {
        "actor.layout.world_size": ranks,
        "actor.layout.sequence_parallel": ranks > 1,
        "cluster.n_gpus_per_node": ranks,
    }
    return spread | shared | {"rollout.tensor_model_parallel_size": ranks} | _on_device(device)


def _on_device(device: str) -> dict[str, Any]:
    return {
        "cluster.device": device,
        "model.dtype": "bfloat16",
        "model.allow_torch_layers": True,
        "rollout.gpu_memory_utilization": 0.3,
    }


def device_count(machine: Machine) -> int:
    """Devices of this host."""
    return 1 if machine.small else machine.platform._torch.device_count()


def make_world(folder: Path) -> Path:
    """The tiny world without its warm start: model, tokenizer and the sums that it learns."""
    spec = importlib.util.spec_from_file_location("make_tiny_world", ROOT / "scripts" / "make_tiny_world.py")
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    train, held_out = script.split_problems(seed=0)
    world = folder / "world"
    script.save_model(script.make_model(seed=0), script.make_tokenizer(), world / "model")
    rows = {"train": script.data_rows(train[:48], "train"), "val": script.data_rows(held_out[:8], "val")}
    script.write_data(world, rows)
    (world / "reward.py").write_text(_REWARD)
    return world


def _widen(model: Path) -> None:
    """Another model of random weights under the same tokenizer, with whole blocks of 128 on two ranks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    config.update({"hidden_size": 256, "head_dim": 128, "intermediate_size": 256, "moe_intermediate_size": 256})
    AutoModelForCausalLM.from_config(config).save_pretrained(model)


def _trained(
    machine: Machine, preset: str, folder: Path, settings: dict[str, Any], world: Path | None = None
) -> list[dict[str, float]]:
    run_dir = folder / "run"
    world = world or make_world(folder)
    _mrl(machine, "train", _preset(preset), "--run-dir", str(run_dir), *_arguments(settings | _files(world)))
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _files(world: Path) -> dict[str, Any]:
    return {
        "model.path": str(world / "model"), "data.train_files": str(world / "data" / "train.parquet"),
        "data.val_files": str(world / "data" / "val.parquet"), "data.train_batch_size": 8,
        "reward.custom_reward_function.path": str(world / "reward.py"),
        "actor.ppo_mini_batch_size": 4, "actor.optim.lr": 1e-3, "actor.optim.lr_warmup_steps": 0,
        "trainer.total_training_steps": STEPS, "trainer.save_freq": -1, "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "reshard.verify_every": 1,
    }  # fmt: skip


def _preset(name: str) -> str:
    return str(ROOT / "parallel_configs" / "tiny-moe" / name)


def _arguments(settings: dict[str, Any]) -> list[str]:
    return [text for key, value in settings.items() for text in ("--set", f"{key}={json.dumps(value)}")]


def _mrl(machine: Machine, *arguments: str) -> str:
    """What the command says; raises Wrong with the end of it where it fails."""
    from mrl.tools.own_command import run_mrl

    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        code = run_mrl(arguments, Path(log.name), machine.limit_s - 5)
        said = Path(log.name).read_text(errors="replace").strip()
    if code != 0:
        raise Wrong(f"mrl {arguments[0]} {'took too long' if code is None else f'ended with {code}'}: {said[-1000:]}")
    return said


def _judged(machine: Machine, rows: list[dict[str, float]], close: float | None = None) -> Figures:
    """`close`: nats that engine and trainer may be apart; left out: those of weights as they are trained."""
    close = close or _CLOSE[machine.small]
    expect(
        [row["training/global_step"] for row in rows] == list(range(1, STEPS + 1)),
        "steps are missing from metrics.jsonl",
    )
    expect(all(row["actor/grad_norm"] > 0 for row in rows), "no gradient: weights would not change between syncs")
    worst = max(row["training/rollout_log_probs_abs_diff_mean"] for row in rows)
    expect(worst < close, f"engine and trainer are {worst:.2g} nats apart on the same tokens and weights")
    expect(
        all(row["reshard/verified"] == 1 for row in rows), "what the engine holds was not read back as what was sent"
    )
    return {"log_prob_difference": worst} | _of_last(
        rows,
        "perf/mfu/actor",
        "perf/max_memory_allocated_gb",
        "reshard/bytes_moved",
        *(f"timing_s/{name}" for name in _TIMES),
    )


def _of_last(rows: list[dict[str, float]], *names: str) -> Figures:
    return {name: rows[-1][name] for name in names if name in rows[-1]}


def _has_engines() -> None:
    missing = [name for name in ("vllm", "ray", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise Skip(f"not installed here: {', '.join(missing)}")
