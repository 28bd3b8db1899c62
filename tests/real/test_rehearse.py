"""`mrl rehearse` from a configuration to its answer: real ranks, engines, a save and a resume;
marks of what was switched on.
"""

import json
from pathlib import Path

import pytest
from deadlines import RUN_S
from world import PRESET, ROOT, succeeded

pytestmark = pytest.mark.real
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert set(extra_info) <= {"index", "split"}, extra_info
    return {"score": float(ground_truth in solution_str), "acc": 0.0, "length": len(solution_str)}
"""
SETTINGS = {
    "model.path": "Qwen/Qwen3-30B-A3B", "model.dtype": "bfloat16", "data.train_files": ["gone.parquet"],
    "data.val_files": ["gone.parquet"],
    "data.max_prompt_length": 1024, "data.max_response_length": 4096, "data.train_batch_size": 128,
    "actor.ppo_mini_batch_size": 64,
    "actor.use_dynamic_bsz": True, "actor.ppo_max_token_len_per_gpu": 8192, "actor.param_offload": True,
    "actor.grad_offload": True,
    "actor.optimizer_offload": True, "actor.router_replay": "R2", "ref.param_offload": True,
    "algorithm.use_kl_loss": True,
    "algorithm.kl_loss_coef": 0.001,
    "algorithm.rollout_correction": {"level": "token", "mode": "truncate", "high": 2.0},
    "algorithm.filter_groups.metric": "acc", "trainer.test_freq": 20, "trainer.save_freq": 20,
    "model.override_transformer_config": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
        "moe_router_dtype": "fp32",
    },
}  # fmt: skip
WANTED = {
    "cluster.placement", "actor.layout.tensor_model_parallel_size", "actor.layout.expert_model_parallel_size",
    "actor.param_offload",
    "actor.grad_offload", "actor.optimizer_offload", "ref.param_offload",
    "model.override_transformer_config.recompute_granularity",
    "actor.use_remove_padding", "actor.use_dynamic_bsz", "actor.router_replay", "algorithm.adv_estimator",
    "algorithm.policy_loss.loss_mode", "algorithm.rollout_correction", "algorithm.use_kl_loss",
    "algorithm.filter_groups",
    "algorithm.overlong_buffer", "reward", "reshard.path", "trainer.val_before_train", "trainer.test_freq",
    "trainer.save_freq",
    "trainer.async_save", "--resume",
}  # fmt: skip


SCRIPT = ROOT / "tests" / "unit" / "verl_scripts" / "grpo_8b_gsm8k.sh"
WANTED_OF_THE_SCRIPT = {
    "cluster.placement", "actor.layout.tensor_model_parallel_size", "data parallelism", "rollout.num_engines",
    "rollout.tensor_model_parallel_size", "actor.grad_offload", "actor.use_remove_padding",
    "algorithm.adv_estimator", "algorithm.policy_loss.loss_mode", "algorithm.use_kl_loss", "ref.param_offload",
    "reward", "reshard.path", "trainer.val_before_train", "trainer.test_freq", "trainer.save_freq", "--resume",
}  # fmt: skip
WANTED_AHEAD = {
    "trainer.schedule", "cluster.placement", "actor.layout.tensor_model_parallel_size",
    "actor.layout.expert_model_parallel_size", "algorithm.policy_loss.loss_mode", "reward", "reshard.path",
    "trainer.save_freq", "--resume",
}  # fmt: skip


def rehearse(config: Path, work: Path, *arguments: str) -> dict:
    """The answer of a rehearsal that ends with exit code 0."""
    return json.loads(succeeded("rehearse", str(config), "--work", str(work), "--json", *arguments))


@pytest.mark.timeout(RUN_S + 60)
def test_dapo_with_most_switches_on_leaves_a_mark_of_each(tmp_path):
    """Two ranks and one engine; the reward is the user's, no row and no checkpoint is here."""
    (tmp_path / "mine.py").write_text(REWARD)
    settings = SETTINGS | {"reward.custom_reward_function.path": str(tmp_path / "mine.py")}
    given = [text for key, value in settings.items() for text in ("--set", f"{key}={json.dumps(value)}")]
    answer = rehearse(PRESET, tmp_path / "work", "--recipe", "dapo", *given)
    assert answer["failed"] == [] and answer["ok"]
    exercised = {entry["switch"]: entry["mark"] for entry in answer["exercised"]}
    assert exercised.keys() >= WANTED, {
        k: v for k, v in ((e["switch"], e["why"]) for e in answer["not_exercised"]) if k in WANTED
    }
    assert "a mapping with score, acc, length" in exercised["reward"]
    assert any("synthetic rows" in text for text in answer["stand_ins"]) and any(
        "are seeded" in text for text in answer["stand_ins"]
    )
    assert not [entry for entry in answer["not_exercised"] if entry["why"].startswith("no mark of it")]


@pytest.mark.long
@pytest.mark.timeout(RUN_S + 60)
def test_a_script_of_verl_rehearses_as_it_is_imported(tmp_path):
    """A dense model on four ranks, TP2 and two replicas, and two engines of TP2 on the same devices."""
    config = tmp_path / "imported.yaml"
    succeeded("import-verl", str(SCRIPT), "-o", str(config))
    check_exercised(rehearse(config, tmp_path / "work"), 4, WANTED_OF_THE_SCRIPT)


@pytest.mark.long
@pytest.mark.timeout(RUN_S + 60)
def test_generation_ahead_of_training_rehearses(tmp_path):
    """GSPO on two ranks, TP2 and EP2, beside an engine that is a step ahead of them."""
    settings = {key: SETTINGS[key] for key in ("model.path", "data.train_files", "data.val_files")} | {
        "trainer.schedule": "bounded", "trainer.max_staleness": 1, "trainer.save_freq": 20,
    }  # fmt: skip
    given = [text for key, value in settings.items() for text in ("--set", f"{key}={json.dumps(value)}")]
    check_exercised(rehearse(PRESET, tmp_path / "work", *given), 2, WANTED_AHEAD)


def check_exercised(answer: dict, ranks: int, wanted: set[str]) -> None:
    """Nothing failed, all that was wanted left its mark, and of what left none the reason is known."""
    assert answer["failed"] == [] and answer["ok"] and answer["ranks"] == ranks
    missing = wanted - {entry["switch"] for entry in answer["exercised"]}
    reasons = {entry["switch"]: entry["why"] for entry in answer["not_exercised"]}
    assert not missing, {switch: reasons.get(switch, "not in the configuration") for switch in missing}
    assert not [why for why in reasons.values() if why.startswith("no mark of it")]


@pytest.mark.long
@pytest.mark.timeout(RUN_S + 60)
@pytest.mark.parametrize("preset", ["qwen3-30b-a3b/h100-4x8-separate", "qwen3-235b-a22b/h200-8x8"])
def test_a_preset_rehearses(preset, tmp_path):
    """Four ranks; separate, and colocated with uneven stages under dynamic sampling."""
    answer = rehearse(ROOT / "parallel_configs" / f"{preset}.yaml", tmp_path / "work")
    assert answer["failed"] == [] and answer["ranks"] == 4
