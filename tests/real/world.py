"""A world for whole runs in tests: the tiny world's tokenizer, model and task, without its warm start."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadlines import END_S, RUN_S

ROOT = Path(__file__).resolve().parents[2]
PRESET = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"


def make_world(folder: Path, prompts: int = 48) -> Path:
    """Writes `model/`, `data/train.parquet` and `data/val.parquet`; returns the folder."""
    spec = importlib.util.spec_from_file_location("make_tiny_world", ROOT / "scripts" / "make_tiny_world.py")
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    train, held_out = script.split_problems(seed=0)
    script.save_model(script.make_model(seed=0), script.make_tokenizer(), folder / "model")
    rows = {"train": script.data_rows(train[:prompts], "train"), "val": script.data_rows(held_out[:16], "val")}
    script.write_data(folder, rows)
    return folder


def put_model(world: Path, make: Callable[..., Any]) -> Path:
    """Another model under the world's tokenizer: `make` is given what of its configuration must fit; the folder."""
    folder = world / "model"
    old = json.loads((folder / "config.json").read_text())
    fitting = ("vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    make(**{key: old[key] for key in fitting if key in old}).save_pretrained(folder)
    return world


def overrides(world: Path, **values) -> list[str]:
    """`--set` arguments that put the tiny preset on this world, with few prompts; `values` have `__` for dots."""
    settings = {
        "model.path": world / "model",
        "data.train_files": world / "data" / "train.parquet",
        "data.val_files": world / "data" / "val.parquet",
        "data.train_batch_size": 8,
        "actor.ppo_mini_batch_size": 4,
        "actor.optim.lr_warmup_steps": 1,
        "reward.custom_reward_function.path": ROOT / "tests" / "real" / "digits_reward.py",
    } | {key.replace("__", "."): value for key, value in values.items()}
    return [text for key, value in settings.items() for text in ("--set", f"{key}={json.dumps(value, default=str)}")]


FOUR_STEPS = {
    "trainer__total_training_steps": 4,
    "trainer__save_freq": 2,
    "trainer__test_freq": 3,
    "trainer__val_before_train": False,
    "trainer__max_actor_ckpt_to_keep": 3,
    "trainer__deterministic": True,
}
# GRPO with a KL to the start, replayed routes and a token budget: all that a run has to have again that goes on.
# Offloaded tensors and an engine of TP2, as of a run whose ranks and engine take turns on the same devices. The default
# recipe (GSPO), nothing offloaded, is killed in long tests: test_resume, test_engines_back, those of test_rank_restart.
RECIPE = "grpo"
GRPO = ("--recipe", RECIPE)
FOUR_GRPO_STEPS = FOUR_STEPS | {
    "cluster__n_gpus_per_node": 4,
    "rollout__tensor_model_parallel_size": 2,
    "actor__param_offload": True,
    "actor__grad_offload": True,
    "actor__optimizer_offload": True,
    "ref__param_offload": True,
    "trainer__val_before_train": True,
    "rollout__n": 4,
    "algorithm__use_kl_loss": True,
    "algorithm__kl_loss_coef": 1e-3,
    "actor__router_replay": "R2",
    "actor__use_dynamic_bsz": True,
    "actor__ppo_max_token_len_per_gpu": 256,
}
RESPONSES = 32  # of such a step


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    pid: int
    returncode: int
    stdout: str
    stderr: str


def mrl(*arguments: str, seconds: float = RUN_S, **popen) -> Done:
    """The command to its end, `seconds` at most: then it is killed with all that is of its session.

    `popen`: as subprocess.Popen has them.
    """
    given = {
        "cwd": ROOT,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "start_new_session": True,
    } | popen
    process = subprocess.Popen(["mrl", *arguments], **given)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=END_S)
        raise AssertionError(
            f"mrl {arguments[0]}: not done after {seconds:.0f} s\n{out[-3000:]}\n{err[-3000:]}"
        ) from None
    return Done(process.pid, process.returncode, out, err)


def succeeded(*arguments: str) -> str:
    """Standard output of a command that must end well."""
    done = mrl(*arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def metrics(run_dir: Path) -> list[dict]:
    """Rows of metrics.jsonl, a torn last line left out; none before the file is there."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def replayed(run_dir: Path) -> list[int]:
    """Responses that were not generated again, of each step that has some."""
    counts = [row.get("trainer/replayed_responses", 0) for row in metrics(run_dir)]
    return [int(count) for count in counts if count]


def without_times(rows: list[dict]) -> list[dict]:
    """What an exact resume must repeat bit by bit."""
    clock = ("timing_", "perf/", "switch/", "reshard/seconds", "reshard/peak_", "trainer/replayed_responses")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in rows]
