"""`mrl rehearse` from a configuration to its answer: real ranks, engines, a save and a resume;
marks of what was switched on.
"""

import json
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deadlines import RUN_S
from PIL import Image
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
# settings of verl's run_qwen3_vl-30b-megatron.sh, in a script of our own: its tower is trained, as verl does by default
SEEING_SCRIPT = """
python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer.yaml' \\
    algorithm.adv_estimator=grpo \\
    data.train_files={data}/train.parquet \\
    data.val_files={data}/test.parquet \\
    data.train_batch_size=512 \\
    data.max_prompt_length=1024 \\
    data.max_response_length=2048 \\
    data.image_key=images \\
    actor_rollout_ref.model.path=Qwen/Qwen3-VL-30B-A3B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.actor.megatron.context_parallel_size=2 \\
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \\
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.01 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \\
    actor_rollout_ref.actor.megatron.param_offload=True \\
    actor_rollout_ref.actor.megatron.optimizer_offload=True \\
    actor_rollout_ref.actor.megatron.grad_offload=True \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.ref.megatron.param_offload=True \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=1 \\
    trainer.save_freq=20 \\
    trainer.test_freq=5
"""
WANTED_OF_IMAGES = {
    "model.vision", "cluster.placement", "actor.layout.tensor_model_parallel_size", "actor.param_offload",
    "actor.optimizer_offload", "actor.use_dynamic_bsz", "algorithm.use_kl_loss", "reward", "reshard.path",
    "trainer.test_freq", "trainer.save_freq", "--resume",
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
def test_a_script_of_verl_that_shows_images_rehearses_with_them(tmp_path):
    """Rows as geo3k's; the tower is trained, resumed and synced."""
    write_figures(tmp_path)
    (tmp_path / "run.sh").write_text(SEEING_SCRIPT.format(data=tmp_path))
    config = tmp_path / "imported.yaml"
    succeeded("import-verl", str(tmp_path / "run.sh"), "-o", str(config))
    answer = rehearse(config, tmp_path / "work")
    check_exercised(answer, 4, WANTED_OF_IMAGES)
    assert {entry["switch"]: entry["value"] for entry in answer["exercised"]}["model.vision"] == "trained"
    samples = tmp_path / "work" / "run" / "samples"
    shown = [len(row["images"]) for row in pq.read_table(samples / "step-2.parquet").to_pylist()]
    assert shown and all(shown)


def write_figures(folder: Path) -> None:
    """Files in the form of verl's geo3k."""
    for name, count in (("train", 40), ("test", 10)):
        rows = []
        for number in range(count):
            out = BytesIO()
            Image.new("RGB", (200 + 13 * (number % 7), 150), (5 * number, 90, 160)).save(out, "PNG")
            rows.append({
                "data_source": "hiyouga/geometry3k",
                "prompt": [{"role": "user", "content": f"<image>Find x of figure {number}. Think first, then answer."}],
                "images": [{"bytes": out.getvalue(), "path": None}],
                "reward_model": {"style": "rule", "ground_truth": str(number)},
                "extra_info": {"split": name, "index": number},
            })  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


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
@pytest.mark.parametrize(
    "preset", ["qwen3-30b-a3b/h100-4x8-separate", "qwen3-235b-a22b/h200-8x8", "qwen3.5-35b-a3b/h100-4x8-images"]
)
def test_a_preset_rehearses(preset, tmp_path):
    """Four ranks; separate, colocated with uneven stages under dynamic sampling, and with images."""
    answer = rehearse(ROOT / "parallel_configs" / f"{preset}.yaml", tmp_path / "work")
    assert answer["failed"] == [] and answer["ranks"] == 4
