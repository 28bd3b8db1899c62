"""The table of axes: which values a run of the tiny preset can have in each respect, and what they are as settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covering import Row

from mrl.cli.validate import check_config
from mrl.config.load import load_config
from mrl.errors import MrlError

ROOT = Path(__file__).resolve().parents[2]
PRESETS = {
    "separate": ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml",
    "colocated": ROOT / "parallel_configs" / "tiny-moe" / "cpu-colocated.yaml",
}
STEPS = 4
ALONE = {
    "actor.layout.tensor_model_parallel_size": 1,
    "actor.layout.expert_model_parallel_size": 1,
    "actor.layout.sequence_parallel": False,
}
BOUNDED = {"trainer.schedule": "bounded", "trainer.max_staleness": 2}
DAPO = {
    "algorithm.policy_loss.loss_mode": "vanilla",
    "algorithm.policy_loss.clip_ratio_low": 0.2,
    "algorithm.policy_loss.clip_ratio_high": 0.28,
    "algorithm.filter_groups.enable": True,
    "algorithm.filter_groups.max_num_gen_batches": 10,
}
PPO = {"algorithm.adv_estimator": "gae", "algorithm.policy_loss.loss_mode": "vanilla"}
CRITIC_APART = "critic apart"
DRAFTING = "GLM, drafting"
# none of the actor's degrees
ONE_RANK = {
    f"{cut}_parallel_size": 1 for cut in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
}

# of each axis the first value goes with every other one
SETTINGS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "schedule": {
        "sync": {},
        "one step off": {"trainer.schedule": "one_step_off"},
        "in order": BOUNDED,
        "in order, partial": BOUNDED | {"trainer.partial_rollouts": True, "trainer.segment_tokens": 1},
        "ready first": BOUNDED | {"trainer.order": "ready_first"},
        "ready first, partial": BOUNDED | {"trainer.order": "ready_first", "trainer.partial_rollouts": True},
    },
    "placement": {"separate": {}, "colocated": {}},
    "engine": {
        "two": {"rollout.num_engines": 2, "rollout.tensor_model_parallel_size": 1},
        "TP2": {"rollout.num_engines": 1, "rollout.tensor_model_parallel_size": 2},
        "DP2 EP2": {
            "rollout.num_engines": 1,
            "rollout.tensor_model_parallel_size": 1,
            "rollout.data_parallel_size": 2,
            "rollout.expert_parallel_size": 2,
        },
    },
    "actor": {
        "TP2": ALONE | {"actor.layout.tensor_model_parallel_size": 2, "actor.layout.sequence_parallel": True},
        "TP2 EP2": {},
        "PP2": ALONE | {"actor.layout.pipeline_model_parallel_size": 2},
        "VPP2": ALONE
        | {
            "actor.layout.pipeline_model_parallel_size": 2,
            "actor.layout.virtual_pipeline_model_parallel_size": 2,
        },
        "CP2": ALONE | {"actor.layout.context_parallel_size": 2},
        "DP2": ALONE,
    },
    "family": {
        "Qwen3-MoE": {},
        "dense, tied": {},
        "shared experts": {},
        "GLM": {},
        "latent": {"rollout.enable_prefix_caching": False},
        "gated delta": {"rollout.enable_prefix_caching": False},
        "Qwen3-MoE, ngram": {"rollout.speculation": {"method": "ngram", "tokens": 2, "lookup": 1}},
        # by its layer for multi-token prediction, which is trained along
        DRAFTING: {"rollout.speculation": {"method": "mtp", "tokens": 2}, "actor.mtp": {"train": True}},
    },
    "adapters": {"none": {}, "LoRA": {"actor.lora.rank": 4, "actor.lora.alpha": 8}},
    "turns": {"one": {}, "calculator": {"rollout.turns.tools": ["calculator"], "rollout.turns.max_turns": 3}},
    "images": {"none": {}, "frozen tower": {"model.vision": "frozen"}, "trained tower": {"model.vision": "trained"}},
    "loss": {
        "GSPO": {},
        "GRPO": {"algorithm.policy_loss.loss_mode": "vanilla"},
        "DAPO with filtering": DAPO,
        "on-policy": {"algorithm.anchor": "on_policy", "actor.ppo_mini_batch_size": 8},
        "PPO with a critic": PPO,
        CRITIC_APART: PPO | {"critic.layout": ONE_RANK | {"tensor_model_parallel_size": 2}},
    },
    "correction": {"off": {}, "token": {"algorithm.rollout_correction.level": "token"}},
    "replay": {"off": {}, "R2": {"actor.router_replay": "R2"}, "R3": {"actor.router_replay": "R3"}},
    "reference": {
        "none": {},
        "KL": {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": 1e-3},
        "teacher": {"distillation.enabled": True},
    },
    "offload": {
        "off": {},
        "on": {"actor.param_offload": True, "actor.grad_offload": True, "actor.optimizer_offload": True},
    },
    "dtype": {
        "float32": {},
        "bfloat16": {"model.dtype": "bfloat16"},
        "bfloat16, engines in FP8": {
            "model.dtype": "bfloat16",
            "rollout.quantization": "fp8",
            "rollout.quantization_block": 32,
        },
    },
    "save": {"meanwhile": {}, "waits": {"trainer.async_save": False}},
    "end": {value: {} for value in ("finished", "SIGTERM", "SIGKILL", "engine lost", "rank lost")},
    "then": {value: {} for value in ("resume", "other layout", "other schedule", "convert", "eval", "report")},
}
AXES = {axis: tuple(values) for axis, values in SETTINGS.items()}
TRIPLED = ("schedule", "placement", "end", "then")


def settings(row: Row, world: Path, steps: int = STEPS) -> dict[str, Any]:
    """Values by key of the run that a row is, on the models and data of `world`."""
    data = world / "data"
    found = {
        "model.path": str(world / folder_of(row["family"])),
        "data.train_files": str(data / "train.parquet"),
        "data.val_files": str(data / "val.parquet"),
        "data.train_batch_size": 8,
        "actor.ppo_mini_batch_size": 4,
        "actor.optim.lr_warmup_steps": 1,
        "rollout.n": 4,
        "rollout.val_kwargs.n": 1,
        "reward.custom_reward_function.path": str(ROOT / "tests" / "real" / "digits_reward.py"),
        "trainer.total_training_steps": steps,
        "trainer.save_freq": 1,
        "trainer.test_freq": 1,
        "trainer.max_actor_ckpt_to_keep": 2 * STEPS,
        "trainer.val_before_train": False,
        "trainer.logger": ["console"],
    }
    for axis, value in row.items():
        found |= SETTINGS[axis][value]
    if row["turns"] != "one":
        found |= _of_tools(world / "tools")
    if row["images"] != "none":
        found |= _of_images(world / "images")
    if row["loss"] == CRITIC_APART and row["actor"] == "TP2":  # where the critic would lie as the actor does
        found["critic.layout"] = ONE_RANK | {"pipeline_model_parallel_size": 2}
    if row["reference"] == "teacher":  # of the actor's tokenizer
        found["distillation.teacher_model.model_path"] = found["model.path"]
    workers = found.get("rollout.data_parallel_size", 1) * 2 // found.get("rollout.data_parallel_size", 1)
    found["cluster.n_gpus_per_node"] = 2 if row["placement"] == "colocated" else 2 + workers
    found["cluster.cpus_per_actor"] = 0.25
    found["cluster.cpus_per_engine"] = 0.25
    return found


def folder_of(family: str) -> str:
    """The folder of a family's model in the world."""
    return family.removesuffix(", ngram").replace(",", "").replace(" ", "-")


def _of_tools(world: Path) -> dict[str, Any]:
    return {
        "model.path": str(world / "model"),
        "data.train_files": str(world / "data" / "train.parquet"),
        "data.val_files": str(world / "data" / "val.parquet"),
        "data.max_prompt_length": 24,
        "data.max_response_length": 96,
        "reward.custom_reward_function.path": str(world / "reward.py"),
    }


def _of_images(world: Path) -> dict[str, Any]:
    return {
        "model.path": str(world / "model"),
        "data.train_files": str(world / "data" / "train.parquet"),
        "data.val_files": str(world / "data" / "val.parquet"),
        "data.max_prompt_length": 96,
        "data.max_response_length": 96,
        "reward.custom_reward_function.path": str(world / "reward.py"),
    }


def other_layout(row: Row) -> Row:
    """The same run on another layout of the actor."""
    return {**row, "actor": "PP2" if row["actor"] != "PP2" else "TP2"}


def other_schedule(row: Row) -> Row:
    """The same run by a schedule that its checkpoints cannot go on with."""
    return {**row, "schedule": "sync" if row["schedule"] != "sync" else "in order"}


def as_overrides(found: Mapping[str, Any]) -> list[str]:
    """KEY=VALUE of settings, as the command line takes them."""
    import json

    return [f"{key}={json.dumps(value)}" for key, value in found.items()]


def refusal(row: Row, world: Path) -> str | None:
    """What `mrl validate` has against a row, or against the layout that its run goes on with."""
    if row["turns"] != "one" and folder_of(row["family"]) != "Qwen3-MoE":
        return "the model that calls a tool is a Qwen3-MoE"
    if row["images"] != "none" and row["family"] != "Qwen3-MoE":
        return "the model that sees is a Qwen3-VL-MoE, whose text model is a Qwen3-MoE"
    rows = [row, other_layout(row)] if row["then"] == "other layout" else [row]
    for one in rows:
        try:
            resolved = load_config(PRESETS[one["placement"]], overrides=as_overrides(settings(one, world)))
            broken, _ = check_config(resolved)
        except MrlError as error:
            return _without_root(error)
        if broken:
            return _without_root(broken[0])
    return None


def _without_root(said: object) -> str:
    return str(said).replace(f"{ROOT}/", "")
