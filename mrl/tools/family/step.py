"""One training step of a tiny model on this machine's CPUs: one rank, one engine, a sync that is verified."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.config.yaml_tree import dump_value
from mrl.model import ModelSpec
from mrl.model.wrapped import with_text_config
from mrl.tools.own_command import run_mrl, stopped_by_sigterm
from mrl.tools.rehearse.small_model import write_checkpoint, write_tokenizer

_VOCAB_SIZE = 320  # rows of the embedding: a token a byte, and those of the chat template
_RESPONSE = 8
DIFFERENCE = 1e-4  # largest difference of a log-prob between engine and ranks
_DIFFERENCE = "training/rollout_log_probs_abs_diff_max"
_PROMPTS = 8


@dataclass(frozen=True)
class Step:
    """What a step showed."""

    said: str
    faults: tuple[str, ...] = ()


def train_step(config: dict[str, Any], whole: dict[str, Any], work: Path, deadline_s: float) -> Step:
    """Trains two steps, so that the engine generates the second with weights that only a sync can have brought.

    `whole`: configuration of a model that reads images around the text model; empty for the text model alone.
    """
    folder = work / "model"
    write_tokenizer(folder)
    last = _VOCAB_SIZE - 1
    words = {"vocab_size": _VOCAB_SIZE, "eos_token_id": last}
    model = write_checkpoint(folder, with_text_config(whole or config, words), (last,), _RESPONSE)
    rows = work / "rows.jsonl"
    rows.write_text("".join(json.dumps(_row(number)) + "\n" for number in range(_PROMPTS * 2)), encoding="utf-8")
    file = work / "run.yaml"
    file.write_text("".join(f"{key}: {dump_value(value)}\n" for key, value in _run(folder, rows, model).items()))
    log = work / "train.log"
    with stopped_by_sigterm():
        code = run_mrl(["train", str(file), "--run-dir", str(work / "run")], log, deadline_s)
    if code != 0:
        text = log.read_text(encoding="utf-8", errors="replace").rstrip()
        start = max(text.rfind("\nmrl train: "), 0)
        return Step("a run of two steps", (f"mrl train ended with {code}: {text[start:][-1500:].strip()}",))
    lines = (work / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if row.get("training/global_step")]
    return _judged(steps)


def _judged(steps: list[dict[str, Any]]) -> Step:
    faults = []
    if len(steps) != 2:
        faults.append(f"{len(steps)} steps in place of 2")
    off = max((row[_DIFFERENCE] for row in steps), default=float("inf"))
    if not off < DIFFERENCE:
        faults.append(f"engine and ranks differ by {off:.1e} in a log-prob")
    for row in steps:
        number = row["training/global_step"]
        if row["reshard/verified"] != 1:
            faults.append(f"step {number}: the engine does not hold the trainer's weights")
        if not row["actor/grad_norm"] > 0:
            faults.append(f"step {number}: the gradient is {row['actor/grad_norm']}")
    return Step(f"two steps, synced bit by bit; engine and ranks to {off:.1e}", tuple(faults))


def _row(number: int) -> dict[str, Any]:
    return {
        "data_source": "family",
        "prompt": [{"role": "user", "content": f"{number} + {number} ="}],
        "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
    }


def _run(folder: Path, rows: Path, model: ModelSpec) -> dict[str, Any]:
    rollout = {
        "num_engines": 1,
        "n": 4,
        "cpu_kvcache_gib": 1,
        "enforce_eager": True,
        "start_timeout_s": 600,
        "generate_timeout_s": 300,
    }
    if model.is_latent or model.is_hybrid:
        rollout["enable_prefix_caching"] = False
    return {
        "recipe": "gspo",
        "model": {"path": str(folder), "dtype": "float32"},
        "cluster": {
            "device": "cpu",
            "nnodes": 1,
            "n_gpus_per_node": 2,
            "placement": "separate",
            "cpus_per_actor": 0.5,
            "cpus_per_engine": 1,
            "step_timeout_s": 600,
        },
        "actor": {
            "layout": {"world_size": 1},
            "optim": {"lr": 1e-3, "lr_decay_style": "constant"},
            "ppo_mini_batch_size": _PROMPTS,
            "ppo_micro_batch_size_per_gpu": 32,
        },
        "rollout": rollout,
        "data": {
            "train_files": str(rows),
            "train_batch_size": _PROMPTS,
            "max_prompt_length": 64,
            "max_response_length": _RESPONSE,
        },
        "reward": {"custom_reward_function": {"path": str(_reward(folder.parent)), "name": "compute_score"}},
        "trainer": {
            "experiment_name": "family-check",
            "total_training_steps": 2,
            "save_freq": -1,
            "test_freq": -1,
            "val_before_train": False,
        },
    }


def _reward(work: Path) -> Path:
    """Writes a reward that random answers differ in: the share of their letters that are digits."""
    file = work / "reward.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return (sum(map(ord, solution_str)) % 7) / 7\n",
        encoding="utf-8",
    )
    return file
