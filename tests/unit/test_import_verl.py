"""verl's scripts carried over: what one says about layout, batch, clip, rate and loss stands in ours,
and no key is lost silently.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from machine import times_slower

from mrl.cli import import_verl
from mrl.cli.main import main
from mrl.cli.validate import check_config
from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.config.schema import RunConfig, leaf
from mrl.errors import LONGEST, ConfigError
from mrl.model import planning_model_spec
from mrl.tools.import_verl.handlers import HANDLERS
from mrl.tools.import_verl.hydra_values import hydra_value
from mrl.tools.import_verl.keys import ROWS, row_of
from mrl.tools.import_verl.report import KINDS
from mrl.tools.import_verl.translate import import_overrides, import_script
from mrl.tools.switches import missing_switches

SCRIPTS = Path(__file__).parent / "verl_scripts"
LAYOUT, LOSS, OPTIM, CORRECTION = (
    "actor.layout.",
    "algorithm.policy_loss.",
    "actor.optim.",
    "algorithm.rollout_correction.",
)
ROLLOUT = "actor_rollout_ref.rollout."
MEGATRON = "actor_rollout_ref.actor.megatron."
ADAM, OUR_ADAM = "actor_rollout_ref.actor.optim.override_optimizer_config.", OPTIM + "override_optimizer_config."

# For each script, what it says, in our words and worked out by hand. Learning-rate schedules count updates here,
# training steps there.
SAYS = {
    "gspo_30b_megatron": {
        LAYOUT + "world_size": 16, LAYOUT + "tensor_model_parallel_size": 4, LAYOUT + "pipeline_model_parallel_size": 4,
        LAYOUT + "expert_model_parallel_size": 8, LAYOUT + "expert_tensor_parallel_size": 1,
        "data.train_batch_size": 32, "actor.ppo_mini_batch_size": 4, "rollout.n": 2, "rollout.num_engines": 1,
        "rollout.tensor_model_parallel_size": 4, "rollout.data_parallel_size": 8, "data.max_prompt_length": 2048,
        "data.max_response_length": 8192, "actor.ppo_max_token_len_per_gpu": 10240,
        "rollout.max_num_batched_tokens": 10240,
        LOSS + "loss_mode": "gspo", LOSS + "loss_agg_mode": "seq-mean-token-mean", LOSS + "clip_ratio_low": 3e-4,
        LOSS + "clip_ratio_high": 4e-4, OPTIM + "lr": 1e-6, OPTIM + "lr_warmup_steps": 80, OPTIM + "weight_decay": 0.1,
        OPTIM + "clip_grad": 1.0, "algorithm.overlong_buffer.len": 4096, "algorithm.use_kl_loss": False,
        "cluster.device": "npu",
        "cluster.placement": "colocated", "model.override_transformer_config.use_flash_attn": True,
        "actor.grad_offload": True,
        "trainer.total_training_steps": 300, "trainer.experiment_name": "GSPO-30B-tp4-ep",
        "trainer.log_val_generations": 10,
        "rollout.val_kwargs.temperature": 1.0, "ref.param_offload": False,
    },
    "dapo_32b_fsdp": {
        LAYOUT + "world_size": 64, LAYOUT + "tensor_model_parallel_size": 8, LAYOUT + "pipeline_model_parallel_size": 2,
        "data.train_batch_size": 64, "actor.ppo_mini_batch_size": 32, "rollout.n": 16, "rollout.num_engines": 16,
        "actor.ppo_max_token_len_per_gpu": 22528, LOSS + "loss_mode": "vanilla", LOSS + "loss_agg_mode": "token-mean",
        LOSS + "clip_ratio_low": 0.2, LOSS + "clip_ratio_high": 0.28, LOSS + "clip_ratio_c": 10.0, OPTIM + "lr": 1e-6,
        OPTIM + "lr_warmup_steps": 20, "actor.param_offload": True, "actor.optimizer_offload": True,
        "actor.grad_offload": True,
        "model.override_transformer_config.recompute_granularity": "full", "algorithm.overlong_buffer.enable": True,
        "reward.reward_manager": "dapo", "rollout.val_kwargs.temperature": 0.0, "data.filter_overlong_prompts": False,
        "data.drop_duplicates": False,
    },
    "dapo_8b_custom_reward": {
        LAYOUT + "world_size": 16, LAYOUT + "tensor_model_parallel_size": 2, "data.train_batch_size": 128,
        "actor.ppo_micro_batch_size_per_gpu": 2, "actor.log_prob_micro_batch_size_per_gpu": 2, "rollout.num_engines": 8,
        LOSS + "clip_ratio_low": 0.2, LOSS + "clip_ratio_high": 0.28, OPTIM + "lr_warmup_steps": 40,
        "algorithm.use_kl_loss": True,
        "algorithm.kl_loss_coef": 0.001, "rollout.temperature": 0.6, "rollout.top_p": 0.95, "ref.param_offload": True,
        "reward.custom_reward_function.path": "/path/to/reward_score.py", "trainer.test_freq": -1,
        "trainer.total_epochs": 30,
    },
    "grpo_7b_megatron": {
        LAYOUT + "world_size": 8, LAYOUT + "tensor_model_parallel_size": 2, LAYOUT + "pipeline_model_parallel_size": 2,
        "data.train_batch_size": 32, "actor.ppo_mini_batch_size": 16, "rollout.n": 3,
        "rollout.tensor_model_parallel_size": 2,
        "rollout.num_engines": 4, LOSS + "loss_mode": "vanilla", LOSS + "loss_agg_mode": "token-mean",
        LOSS + "clip_ratio_low": 0.2,
        LOSS + "clip_ratio_high": 0.2, LOSS + "clip_ratio_c": 3.0, OPTIM + "weight_decay": 0.01,
        OPTIM + "betas": (0.9, 0.999),
        "algorithm.kl_loss_coef": 0.001, "data.train_files": ("${train_files}",),
    },
    "gspo_3b_fsdp": {
        LAYOUT + "world_size": 8, LAYOUT + "tensor_model_parallel_size": 2, "data.train_batch_size": 512,
        "actor.ppo_max_token_len_per_gpu": 10240, OPTIM + "lr_warmup_steps": 100, LOSS + "clip_ratio_low": 3e-4,
        LOSS + "loss_agg_mode": "seq-mean-token-mean",
        "trainer.experiment_name": "gspo-epslow-0.0003-Qwen25-3B-Instruct-RL",
    },
    "arrays_30b_megatron": {
        LAYOUT + "world_size": 8, LAYOUT + "tensor_model_parallel_size": 2, LAYOUT + "expert_model_parallel_size": 4,
        LAYOUT + "expert_tensor_parallel_size": 2,  # Megatron's default is the tensor size
        LOSS + "loss_mode": "gspo", LOSS + "clip_ratio_high": 4e-4, OPTIM + "lr": 2e-6, "rollout.num_engines": 2,
        "data.train_files": ("${HOME}/data/train.parquet",),
    },
    "grpo_8b_gsm8k": {
        LAYOUT + "world_size": 8, LAYOUT + "tensor_model_parallel_size": 2, "data.train_batch_size": 1024,
        "rollout.n": 5,
        "actor.ppo_micro_batch_size_per_gpu": 32, "ref.log_prob_micro_batch_size_per_gpu": 32, "trainer.save_freq": 20,
        "actor.param_offload": False, "ref.param_offload": True, "cluster.device": "cuda",
    },
}  # fmt: skip


def imported(name: str, tmp_path: Path, given: dict[str, str] | None = None, **options):
    """(import, the configuration that its YAML reads back to)"""
    out = import_script((SCRIPTS / f"{name}.sh").read_text(), name, given or {}, **options)
    (tmp_path / "out.yaml").write_text(out.to_yaml())
    return out, load_config(tmp_path / "out.yaml")


def from_overrides(*words: str, **options):
    return import_overrides(
        ["actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B", "model_engine=megatron", *words], **options
    )


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        main(list(arguments))
        code = 0
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_every_fixture_has_its_expectations():
    assert {file.stem for file in SCRIPTS.glob("*.sh")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_what_the_script_says_is_what_ours_says(name, tmp_path):
    out, resolved = imported(name, tmp_path)
    assert {key: leaf(resolved.config, key) for key in SAYS[name]} == SAYS[name]
    assert not out.of("unsupported")


@pytest.mark.parametrize("name", SAYS)
def test_an_imported_script_validates(name, tmp_path):
    given = {"NNODES": "4"} if name == "gspo_30b_megatron" else {}
    _, resolved = imported(name, tmp_path, given)
    model, _ = planning_model_spec(resolved.config.model.path)
    assert violations(resolved, model) == []


@pytest.mark.parametrize("name", SAYS)
def test_nothing_stands_between_an_imported_script_and_training(name, tmp_path):
    given = {"NNODES": "4"} if name == "gspo_30b_megatron" else {}
    broken, _remarks = check_config(imported(name, tmp_path, given)[1])
    assert broken == []


def test_two_nodes_cannot_hold_the_layout_of_source_004(tmp_path):
    _, resolved = imported("gspo_30b_megatron", tmp_path)
    found = {v.field: v for v in violations(resolved, planning_model_spec(resolved.config.model.path)[0])}
    # TP4 x PP4 fits 16 devices; EP8 x PP4 does not, and neither does one engine of 4 x 8 workers
    assert set(found) == {"actor.layout.world_size", "cluster.n_gpus_per_node"}
    assert "32" in found["actor.layout.world_size"].rule and found["actor.layout.world_size"].allowed == (32, 64)


@pytest.mark.parametrize("name", SAYS)
def test_every_key_of_a_script_is_reported_exactly_once_or_with_its_parts(name, tmp_path):
    text = (SCRIPTS / f"{name}.sh").read_text()
    out, _ = imported(name, tmp_path)
    reported = {entry.key for kind in KINDS for entry in out.of(kind)} - {""}
    written = {
        w.lstrip("+").partition("=")[0]
        for w in text.replace("\\\n", " ").replace("(", " ").split()
        if "=" in w and "." in w.partition("=")[0]
    }
    assert {
        key
        for key in written
        if key.startswith(("data.", "actor_rollout_ref.", "algorithm.", "trainer.", "reward", "custom"))
    } <= reported


def test_gspo_with_token_mean_is_written_as_it_was_computed_and_as_written_keeps_it(tmp_path):
    out, _ = imported("gspo_30b_megatron", tmp_path, {"NNODES": "4"})
    assert any("token-mean" in w and "--as-written" in w for w in out.warnings)
    _, kept = imported("gspo_30b_megatron", tmp_path, {"NNODES": "4"}, as_written=True)
    (violation,) = violations(kept, planning_model_spec(kept.config.model.path)[0])
    assert (violation.field, violation.value) == (LOSS + "loss_agg_mode", "token-mean")


def test_a_layout_that_the_script_does_not_have_is_marked_chosen(tmp_path):
    out, _ = imported("dapo_32b_fsdp", tmp_path)
    chosen = {e.to: e for e in out.of("chosen")}
    assert {LAYOUT + "tensor_model_parallel_size", LAYOUT + "pipeline_model_parallel_size"} <= set(chosen)
    assert "qwen3-32b/a3-4x16.yaml" in chosen[LAYOUT + "tensor_model_parallel_size"].why
    assert "# chosen: the script has no Megatron layout" in out.to_yaml()
    assert not any(e.to.startswith(LAYOUT) for e in imported("grpo_7b_megatron", tmp_path)[0].of("chosen"))


def test_a_preset_can_be_named_and_must_divide_over_the_devices(tmp_path):
    preset = Path(__file__).parents[2] / "parallel_configs" / "qwen3-8b" / "h100-1x8.yaml"
    out, _ = imported("dapo_8b_custom_reward", tmp_path, preset=str(preset))
    assert out.values[LAYOUT + "tensor_model_parallel_size"] == 2
    with pytest.raises(ConfigError, match="does not divide over the script's 16 devices"):
        imported("dapo_8b_custom_reward", tmp_path, preset=str(preset.parents[1] / "qwen3-30b-a3b" / "a2-4x8.yaml"))


FSDP_14B = [
    "actor_rollout_ref.model.path=Qwen/Qwen3-14B", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.use_dynamic_bsz=True", "data.max_response_length=8192",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
]  # fmt: skip


def test_a_model_without_a_preset_is_not_given_a_layout_in_silence():
    out = import_overrides(FSDP_14B)
    assert out.lacks_layout and any("every degree is 1" in w for w in out.warnings)
    assert not any(key.startswith(LAYOUT) and key != LAYOUT + "world_size" for key in out.values)


def test_without_a_preset_the_layout_is_searched_for_and_fits(capsys, tmp_path):
    file = tmp_path / "out.yaml"
    code, out, _ = run(capsys, "import-verl", *FSDP_14B, "-o", str(file))
    assert code == 0 and "(mrl plan --search)" in out
    code, plan, _ = run(capsys, "plan", str(file), "--json")
    phases = json.loads(plan)["memory"]["phases"]
    assert code == 0 and all(phase["fits"] for phase in phases.values())
    config, model = load_config(file).config, planning_model_spec("Qwen/Qwen3-14B")[0]
    assert config.actor.override_ddp_config["overlap_grad_reduce"], "as the search counted"
    assert missing_switches(config, model) == {}


def test_what_a_searched_layout_computes_again_is_written_of_every_kind(capsys, tmp_path):
    """Where the script says nothing, and computing all of it again would be slower."""
    file = tmp_path / "out.yaml"
    words = [*FSDP_14B[:4], "data.max_response_length=30720"]
    assert run(capsys, "import-verl", *words, "--search", "-o", str(file))[0] == 0
    given = load_config(file).config.model.override_transformer_config
    assert (given["recompute_granularity"], given["recompute_modules"]) == ("selective", ["mlp"])
    own = "model.override_transformer_config.recompute_modules=[core_attn]"
    run(capsys, "import-verl", *words, "--search", "--set", own, "-o", str(file))
    kept = load_config(file).config.model.override_transformer_config
    assert kept["recompute_modules"] == ["core_attn"] and "recompute_granularity" not in kept, "the user's own stay"


def test_recomputation_that_is_given_as_a_mapping_is_the_users_own(capsys, tmp_path):
    file = tmp_path / "out.yaml"
    words = [*FSDP_14B[:4], "data.max_response_length=30720"]
    own = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    given = f"model.override_transformer_config={json.dumps(own)}"
    assert run(capsys, "import-verl", *words, "--search", "--set", given, "-o", str(file))[0] == 0
    kept = load_config(file).config.model.override_transformer_config
    assert {name: value for name, value in kept.items() if name.startswith("recompute_")} == own


def test_where_no_layout_mends_what_is_broken_a_search_tries_a_few_and_says_so(capsys, monkeypatch):
    tried = []
    with_layout = import_verl._with_layout
    monkeypatch.setattr(import_verl, "_with_layout", lambda *given: tried.append(0) or with_layout(*given))
    words = [*FSDP_14B, "actor_rollout_ref.actor.ppo_mini_batch_size=17"]  # of 256 prompts
    found = json.loads(run(capsys, "import-verl", *words, "--search", "--json")[1])
    assert any("found no layout that breaks no rule" in warning for warning in found["warnings"])
    assert len(tried) == import_verl._REFUSED


def test_search_wins_over_the_preset_where_it_is_asked_for(capsys):
    name = str(SCRIPTS / "grpo_8b_gsm8k.sh")
    by_preset = json.loads(run(capsys, "import-verl", name, "--json")[1])
    searched = json.loads(run(capsys, "import-verl", name, "--json", "--search")[1])
    assert "preset" in by_preset["chosen"][0]["why"] and "mrl plan --search" in searched["chosen"][0]["why"]
    assert by_preset["ok"] and searched["ok"]


def test_a_degree_of_the_users_own_leaves_the_layout_to_the_user(capsys):
    found = json.loads(
        run(capsys, "import-verl", *FSDP_14B, "--set", LAYOUT + "tensor_model_parallel_size=4", "--json")[1]
    )
    layout = [(e["to"], e["value"]) for e in found["chosen"] if e["to"].startswith(LAYOUT)]
    assert layout == [(LAYOUT + "tensor_model_parallel_size", 4)]


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["actor_rollout_ref.actor.tis_imp_ratio_cap=2.0"], {CORRECTION + "level": "token", CORRECTION + "high": 2.0}),
        ([CORRECTION + "rollout_is=sequence"], {CORRECTION + "level": "sequence"}),
        (
            [CORRECTION + "rollout_is=token", CORRECTION + "rollout_is_threshold='0.5_5.0'"],
            {
                CORRECTION + "low": 0.5,
                CORRECTION + "high": 5.0,
                CORRECTION + "mode": "icepop",
                CORRECTION + "weigh": None,
            },
        ),
        (
            [CORRECTION + "rollout_is=token", CORRECTION + "rollout_is_threshold=2.0", CORRECTION + "rollout_rs=null"],
            {CORRECTION + "level": "token", CORRECTION + "high": 2.0, CORRECTION + "mode": None},
        ),
        (
            [CORRECTION + "rollout_rs=seq_mean_k1", CORRECTION + "rollout_rs_threshold='0.999_1.001'"],
            {CORRECTION + "level": "geometric", CORRECTION + "mode": "mask", CORRECTION + "low": 1 / 1.001,
                CORRECTION + "high": 1 / 0.999, CORRECTION + "weigh": False},
        ),
        (
            [CORRECTION + "rollout_rs=seq_sum_k1", CORRECTION + "rollout_rs_threshold=2.0"],
            {CORRECTION + "level": "sequence", CORRECTION + "mode": "mask", CORRECTION + "low": 0.5,
                CORRECTION + "high": 2.0, CORRECTION + "weigh": False},
        ),
        (  # verl's newer names test rollout / old, its older ones old / rollout
            [CORRECTION + "rollout_rs=token_k1", CORRECTION + "rollout_rs_threshold='0.5_1.25'"],
            {CORRECTION + "level": "token", CORRECTION + "low": 0.8, CORRECTION + "high": 2.0},
        ),
        (
            [CORRECTION + "rollout_rs=token", CORRECTION + "rollout_rs_threshold=1.25",
                CORRECTION + "rollout_rs_threshold_lower=0.5"],
            {CORRECTION + "level": "token", CORRECTION + "low": 0.5, CORRECTION + "high": 1.25,
                CORRECTION + "weigh": False},
        ),
        (  # verl's preset Seq-MIS: weights that no ratio inside the band reaches the cap of
            [CORRECTION + "rollout_is=sequence", CORRECTION + "rollout_is_threshold=2.0",
                CORRECTION + "rollout_rs=seq_sum_k1", CORRECTION + "rollout_rs_threshold='0.5_2.0'"],
            {CORRECTION + "level": "sequence", CORRECTION + "mode": "mask", CORRECTION + "low": 0.5,
                CORRECTION + "high": 2.0, CORRECTION + "weigh": None},
        ),
        (  # beside the engine's log-probs as anchor verl applies no weights
            [CORRECTION + "rollout_is=token", CORRECTION + "bypass_mode=True"],
            {CORRECTION + "level": None, "algorithm.anchor": "rollout"},
        ),
        ([CORRECTION + "rollout_is_threshold=3.0"], {CORRECTION + "high": None}),
        (["algorithm.rollout_correction.bypass_mode=True"], {"algorithm.anchor": "rollout"}),
        (["actor_rollout_ref.actor.router_replay.mode=R2"], {"actor.router_replay": "R2"}),
        (["+" + ROLLOUT + "engine_kwargs.vllm.enable_expert_parallel=True", ROLLOUT + "tensor_model_parallel_size=4"],
         {"rollout.expert_parallel_size": 4}),
        (["+" + ROLLOUT + "engine_kwargs.vllm.max_num_seqs=64"], {"rollout.max_num_seqs": 64}),
        ([ROLLOUT + "response_length=300"], {"data.max_response_length": 300}),
        ([ROLLOUT + "val_kwargs.do_sample=False"], {"rollout.val_kwargs.temperature": 0.0}),
        ([ROLLOUT + "val_kwargs.do_sample=yes", ROLLOUT + "val_kwargs.temperature=0.5"],
            {"rollout.val_kwargs.temperature": 0.5}),
        (["data.max_response_length=${data.max_prompt_length}", "data.max_prompt_length=777"],  # OmegaConf's references
            {"data.max_response_length": 777}),
        (["data.train_files=['${trainer.default_local_dir}/a.parquet']", "trainer.default_local_dir=/d"],
            {"data.train_files": ["/d/a.parquet"]}),
        (["actor_rollout_ref.actor.clip_ratio=0.1"], {LOSS + "clip_ratio_low": 0.1, LOSS + "clip_ratio_high": 0.1}),
        (["data.apply_chat_template_kwargs.enable_thinking=False"], {"data.enable_thinking": False}),
        (["data.val_max_samples=-1", "data.train_max_samples=4096"],
            {"data.val_max_samples": None, "data.train_max_samples": 4096}),
        (["data.val_max_samples=200", "data.train_max_samples=-1"],
            {"data.val_max_samples": 200, "data.train_max_samples": None}),
        (["data.reward_fn_key=ability"], {"data.reward_fn_key": "ability"}),
        (["trainer.max_actor_ckpt_to_keep=3"], {"trainer.max_actor_ckpt_to_keep": 3}),
        ([ROLLOUT + "top_p=0.95", ROLLOUT + "top_k=20"], {"rollout.top_p": 0.95, "rollout.top_k": 20}),
        ([ROLLOUT + "top_k=0"], {"rollout.top_k": -1}),
        ([ROLLOUT + "val_kwargs.top_k=0"], {"rollout.val_kwargs.top_k": -1}),
        (  # a share of the decay where the script gives it (get_megatron_optimizer_param_scheduler)
            ["actor_rollout_ref.actor.optim.lr_decay_steps=50",
                "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1", "trainer.total_training_steps=100",
                "critic.optim.lr_decay_steps=50",
                "critic.optim.lr_warmup_steps_ratio=0.1", "algorithm.adv_estimator=gae"],
            {OPTIM + "lr_warmup_steps": 20, "critic.optim.lr_warmup_steps": 20},
        ),
        (  # verl-project/verl#6709
            ["reward_model.overlong_buffer.enable=False", "reward_model.overlong_buffer.len=0"],
            {"algorithm.overlong_buffer.enable": False, "algorithm.overlong_buffer.len": None},
        ),
        (["actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2", "actor_rollout_ref.actor.use_kl_loss=True"],
            {"algorithm.use_kl_loss": True}),
        ([ADAM + "use_precision_aware_optimizer=True", ADAM + "overlap_cpu_optimizer_d2h_h2d=True"],
         {OUR_ADAM + "use_precision_aware_optimizer": None, OUR_ADAM + "overlap_cpu_optimizer_d2h_h2d": None}),
        (
            [ADAM + "use_precision_aware_optimizer=True", ADAM + "optimizer_cpu_offload=True"],
            {OUR_ADAM + "use_precision_aware_optimizer": True, OUR_ADAM + "optimizer_cpu_offload": True},
        ),
        (
            [ROLLOUT + "top_p=0.95", "actor_rollout_ref.actor.tis_imp_ratio_cap=2.0"],
            {"rollout.top_p": 1.0, CORRECTION + "level": "token"},
        ),
        ([ROLLOUT + "top_p=0.95", "algorithm.rollout_correction.bypass_mode=True"],
            {"rollout.top_p": 1.0, "algorithm.anchor": "rollout"}),
        ([], {"trainer.resume_mode": "auto"}),  # verl's default
        (
            ["trainer.resume_mode=disable", "trainer.resume_from_path=/a"],
            {"trainer.resume_mode": "disable", "trainer.resume_from_path": None},
        ),
        (
            ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/a/global_step_5"],
            {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "/a/global_step_5"},
        ),
        ([ROLLOUT + "nnodes=1", "trainer.nnodes=2"],
         {"cluster.placement": "separate", "cluster.nnodes": 3, LAYOUT + "world_size": 16, "rollout.num_engines": 4}),
        (
            [MEGATRON + "override_transformer_config.num_layers_in_last_pipeline_stage=10"],
            {LAYOUT + "num_layers_in_last_pipeline_stage": 10},
        ),
        (["algorithm.filter_groups.enable=True", "data.gen_batch_size=512"], {"data.gen_batch_size": 512}),
        (["data.gen_batch_size=512"], {"data.gen_batch_size": None}),
        (
            [ROLLOUT + "nnodes=1", ROLLOUT + "n_gpus_per_node=2", "trainer.nnodes=1", "trainer.n_gpus_per_node=6"],
            {"cluster.nnodes": 1, "cluster.n_gpus_per_node": 8, LAYOUT + "world_size": 6, "rollout.num_engines": 1},
        ),
        (["algorithm.filter_groups.metric=seq_reward"], {"algorithm.filter_groups.metric": "reward"}),
        *(
            ([f"actor_rollout_ref.{key}use_remove_padding={value}"],
                {"actor.use_remove_padding": None if value == "True" else False})
            for key in ("model.", "actor.", "actor.megatron.")
            for value in ("True", "False")
        ),
    ],
)  # fmt: skip
def test_keys_whose_meaning_needs_a_second_look(words, ours):
    out = from_overrides(*words)
    assert {key: out.values.get(key) for key in ours} == ours


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("actor_rollout_ref.rollout.name=hf", "engines are vLLM's"),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "multi-turn"),
        ("reward_model.enable=True", "rewards are functions"),
        ("actor_rollout_ref.actor.optim.optimizer=muon", "only Adam"),
        ("actor_rollout_ref.rollout.dtype=float16", "bfloat16 or float32"),
        (MEGATRON + "override_transformer_config.num_layers=3", "decided by the checkpoint"),
        (MEGATRON + "override_transformer_config.no_such_field=3", "no field of TransformerConfig"),
        (MEGATRON + "override_ddp_config.use_megatron_fsdp=True", "must be false"),
        ("actor_rollout_ref.actor.no_such_key=1", "no such key"),
        ("algorithm.rollout_correction.rollout_rs=seq_max_k2", "no such correction"),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "needs rollout_rs_threshold"),
    ],
)
def test_what_is_not_there_is_named_with_the_reason(word, reason):
    (entry,) = from_overrides(word).of("unsupported")
    assert entry.key == word.partition("=")[0] and reason in entry.why


@pytest.mark.parametrize(
    ("words", "kind", "reason"),
    [
        (["enable=True"], "implied", "in every checkpoint and export"),
        (["enable_train=True", "enable=True"], "unsupported", "only where engines draft"),
        (["enable_train=True", "enable=True", "enable_rollout=True"], "renamed", "neither policy, embedding"),
        (["detach_encoder=False", "enable=True", "enable_train=True"], "unsupported", "neither policy, embedding"),
        (["detach_encoder=True", "enable=True", "enable_train=True"], "implied", "neither policy, embedding"),
        (["mtp_loss_scaling_factor=0.1", "enable=True"], "not_applicable", "enable_train"),
        (["enable_rollout=True"], "not_applicable", "mtp.enable"),
    ],
)
def test_keys_of_multi_token_prediction_say_what_is_there(words, kind, reason):
    mtp = "actor_rollout_ref.model.mtp."
    found = from_overrides(*(mtp + word for word in words)).of(kind)
    assert any(reason in entry.why for entry in found if entry.key == mtp + words[0].partition("=")[0])


@pytest.mark.parametrize(
    ("engine", "speed", "sampled"),
    [
        ("sglang", "attention_backend=triton", "quantization=fp8"),
        ("sglang", "disable_radix_cache=True", "kv_cache_dtype=fp8_e4m3"),
        ("trtllm", "moe_config.backend=TRTLLM", "kv_cache_config.dtype=fp8"),
    ],
)
def test_vllm_generates_for_engines_that_sample_alike(engine, speed, sampled):
    """The configuration is that of the same script with vLLM; settings that could change samples are losses."""
    own = f"+actor_rollout_ref.rollout.engine_kwargs.{engine}."
    name = "actor_rollout_ref.rollout.name="
    plain, other = from_overrides(name + "vllm"), from_overrides(name + engine, own + speed)
    assert other.values == plain.values and not other.losses
    assert any("vLLM generates in place of" in entry.why for entry in other.of("not_applicable"))
    (loss,) = from_overrides(name + engine, own + sampled).losses
    assert "may change what is sampled" in loss.why
    assert not from_overrides(name + "vllm", own + sampled).losses  # not read by verl's vLLM


@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_settings_of_vllm_are_not_read_where_another_engine_generates(engine):
    """verl 0.9.1 reads `engine_kwargs.sglang` alone with SGLang (sglang_rollout/async_sglang_server.py), and so on."""
    kwargs = "+actor_rollout_ref.rollout.engine_kwargs."
    of_vllm = [
        f"{kwargs}vllm.{word}"
        for word in ("quantization=fp8", "max_num_batched_tokens=8", "speculative_config={method: ngram}")
    ]
    name = f"actor_rollout_ref.rollout.name={engine}"
    plain, other = from_overrides(name), from_overrides(name, *of_vllm)
    assert other.values == plain.values and not other.losses
    assert other.keys - plain.keys == {word.removeprefix("+").partition("=")[0] for word in of_vllm[:2]} | {
        "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.method"
    }
    assert from_overrides("actor_rollout_ref.rollout.name=vllm", *of_vllm).values != plain.values


@pytest.mark.parametrize(
    ("engine", "empty"),
    [
        ("sglang", "sglang=null"),
        ("sglang", "sglang={}"),
        ("sglang", "sglang.quantization=null"),
        ("vllm", "vllm.quantization=null"),
        ("vllm", "vllm.speculative_config=null"),
        ("vllm", "vllm.speculative_config={}"),
    ],
)
def test_what_is_null_among_an_engines_settings_sets_nothing(engine, empty):
    """verl 0.9.1, vllm_rollout/vllm_async_server.py: what is null is left out before vLLM gets it."""
    name = f"actor_rollout_ref.rollout.name={engine}"
    plain, given = from_overrides(name), from_overrides(name, f"+actor_rollout_ref.rollout.engine_kwargs.{empty}")
    assert given.values == plain.values and not given.losses and len(given.entries) == len(plain.entries) + 1


@pytest.mark.parametrize(
    ("engine", "given", "tokens"),
    [
        ("vllm", "num_speculative_tokens=2", 2),
        ("vllm", "method=mtp", 1),
        ("sglang", "speculative_num_draft_tokens=4", 3),
    ],
)
def test_drafts_of_engines_are_carried(engine, given, tokens):
    """Defaults of verl 0.9.1 (workers/config/model.py): one token for vLLM, three for SGLang."""
    mtp = "actor_rollout_ref.model.mtp."
    words = [mtp + "enable=True", mtp + "enable_rollout=True", mtp + given, f"actor_rollout_ref.rollout.name={engine}"]
    for schedule in ([], ["async_training.staleness_threshold=0.5"]):
        out = from_overrides(*words, *schedule)
        assert out.values["rollout.speculation.method"] == "mtp" and out.values["rollout.speculation.tokens"] == tokens


@pytest.mark.parametrize(
    ("given", "values", "lost"),
    [
        # as in verl-project/verl pull request 5925, for a head
        (
            {"method": "eagle3", "model": "/models/head", "num_speculative_tokens": 3},
            {"method": "/models/head", "tokens": 3},
            [],
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
            {"method": "ngram", "tokens": 4, "lookup": 2},
            ["prompt_lookup_max"],
        ),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, {"method": "mtp", "tokens": 1}, []),
        # as in its pull request 6342
        ({"method": "suffix", "num_speculative_tokens": 8}, {}, ["method", "num_speculative_tokens"]),
    ],
)
def test_drafts_that_scripts_ask_of_vllm_itself_are_carried_whole_or_field_by_field(given, values, lost):
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"
    single = from_overrides(*(f"+{key}.{name}={value}" for name, value in given.items()))
    whole = from_overrides(f"+{key}={json.dumps(given)}")
    for out in (single, whole):
        found = {name: value for name, value in out.values.items() if name.startswith("rollout.speculation.")}
        assert found == {f"rollout.speculation.{name}": value for name, value in values.items()}
    unsupported = [entry.key for entry in single.of("unsupported") if entry.key.startswith(key)]
    assert unsupported == [f"{key}.{name}" for name in lost]


def test_a_layer_that_verl_trains_along_is_trained_along():
    mtp = "actor_rollout_ref.model.mtp."
    words = (
        "enable=True",
        "enable_rollout=True",
        "enable_train=True",
        "detach_encoder=True",
        "mtp_loss_scaling_factor=0.3",
    )
    out = from_overrides(*(mtp + word for word in words))
    assert out.values["actor.mtp.train"] is True and out.values["actor.mtp.loss_weight"] == 0.3


def test_a_path_that_the_script_leaves_blank_is_no_loss_where_the_user_gives_one():
    blank = [MEGATRON + "tensor_model_parallel_size=1", "actor_rollout_ref.model.path=<path_to_dsv3_config>"]
    assert [entry.key for entry in import_overrides(blank).losses] == ["actor_rollout_ref.model.path"]
    assert not import_overrides(blank, own=("model.path",)).losses


MULTI_TURN = "actor_rollout_ref.rollout.multi_turn."
FUNCTIONS = Path(__file__).with_name("verl_functions.py")


def test_tools_that_are_functions_are_carried_with_their_limits():
    words = (f"{MULTI_TURN}function_tool_path={FUNCTIONS}", f"{MULTI_TURN}max_tool_response_length=99")
    out = from_overrides(f"{MULTI_TURN}enable=True", *words, f"{MULTI_TURN}format=hermes")
    assert {key: value for key, value in out.values.items() if "turns" in key} == {
        "rollout.turns.path": str(FUNCTIONS), "rollout.turns.tools": ["add", "twice"], "rollout.turns.max_calls": 1,
        "rollout.turns.max_turns": 1000, "rollout.turns.max_answer_characters": 99,
    }  # fmt: skip
    assert not [each for each in out.of("unsupported") if "turn" in each.key]


@pytest.mark.parametrize(
    "words",
    [
        ("function_tool_path=/nowhere/tools.py",),
        ("tool_config_path=tools.yaml",),
        (f"function_tool_path={Path(__file__).with_name('replicas.py')}",),
    ],
)
def test_tools_that_are_not_at_hand_are_a_loss_and_nothing_is_half_carried(words):
    out = from_overrides(f"{MULTI_TURN}enable=True", *(f"{MULTI_TURN}{word}" for word in words))
    assert [each.key for each in out.of("unsupported") if "turn" in each.key] == [f"{MULTI_TURN}enable"]
    assert not [key for key in out.values if "turns" in key]


def test_classes_of_verls_beside_functions_are_a_loss_each():
    words = (f"function_tool_path={FUNCTIONS}", "tool_config_path=tools.yaml", "max_user_turns=3")
    out = from_overrides(f"{MULTI_TURN}enable=True", *(f"{MULTI_TURN}{word}" for word in words))
    lost = [each.key.removeprefix(MULTI_TURN) for each in out.of("unsupported") if "turn" in each.key]
    assert lost == ["tool_config_path"]


@pytest.mark.parametrize(
    ("limits", "turns"),
    [
        (["max_user_turns=3"], 4),  # verl leaves its loop after the fourth answer of the model
        (["max_user_turns=8", "max_assistant_turns=8"], 8),
        (["max_user_turns=1", "max_assistant_turns=8"], 2),
        (["max_assistant_turns=0"], 1000),  # no limit
        (["max_user_turns=null"], 1000),
    ],
)
def test_turns_of_the_model_are_the_lower_of_verls_two_limits(limits, turns):
    words = (f"function_tool_path={FUNCTIONS}", *limits)
    out = from_overrides(f"{MULTI_TURN}enable=True", *(f"{MULTI_TURN}{word}" for word in words))
    assert out.values["rollout.turns.max_turns"] == turns
    assert not [each.key for each in out.of("unsupported") if "turn" in each.key]


def test_a_discount_is_missed_where_verl_would_apply_it():
    def gamma(value, estimator):
        out = from_overrides(f"algorithm.gamma={value}", f"algorithm.adv_estimator={estimator}")
        (kind,) = [kind for kind in KINDS if any(e.key == "algorithm.gamma" for e in out.of(kind))]
        return kind

    assert gamma(0.99, "reinforce_plus_plus") == "unsupported"
    assert gamma(1.0, "reinforce_plus_plus") == "implied"
    assert gamma(0.99, "grpo") == "not_applicable"


@pytest.mark.parametrize(
    ("rejection", "aggregation", "warned"),
    [
        ("token_k1", "seq-mean-token-mean", False),
        ("seq_sum_k1", "token-mean", False),
        ("seq_sum_k1", "seq-mean-token-mean", True),
        ("geometric", "seq-mean-token-sum", True),
    ],
)
def test_a_rejection_whose_denominator_is_another_than_verls_is_warned_of(rejection, aggregation, warned):
    words = [CORRECTION + f"rollout_rs={rejection}", CORRECTION + "rollout_rs_threshold=2.0"]
    out = from_overrides(*words, f"actor_rollout_ref.actor.loss_agg_mode={aggregation}")
    assert any(rejection in w and "divides by all of the mini-batch" in w for w in out.warnings) == warned


@pytest.mark.parametrize(
    ("words", "level", "low", "high"),
    [
        (["rollout_is=sequence", "rollout_rs=seq_mean_k1", "rollout_rs_threshold='0.9_1.1'"], "geometric", 0.9, 1.1),
        # up to 2.5: capped
        (["rollout_is=token", "rollout_rs=token_k1", "rollout_rs_threshold='0.4_2'"], "token", 0.4, 2.0),
        (["rollout_is=token", "rollout_rs=geometric", "rollout_rs_threshold=1.01"], "geometric", 1.01**-1, 1 / 0.99),
    ],
)
def test_a_weight_and_a_rejection_that_are_no_single_mode_are_not_made_one(words, level, low, high):
    """tests/outside/test_outside_corrections.py compares what comes of them with verl's own numbers."""
    more = ["rollout_rs_threshold_lower=0.99"] if "rollout_rs=geometric" in words else []
    out = from_overrides(*(CORRECTION + word for word in words + more))
    assert not [entry for entry in out.of("unsupported") if entry.key.startswith(CORRECTION)]
    assert out.values.get(CORRECTION + "mode", "truncate") == "truncate"
    assert out.values[CORRECTION + "level"] == words[0].partition("=")[2]
    assert out.values[CORRECTION + "reject"] == level
    band = [out.values[CORRECTION + f"reject_{name}"] for name in ("low", "high")]
    expected = (0.99, 1.01) if more else (1 / high, 1 / low)  # k1 tests rollout / old, older names old / rollout
    assert band == pytest.approx(expected)


def test_beside_a_bypass_nothing_is_rejected():
    words = ["rollout_rs=token_k1", "rollout_rs_threshold=2", "bypass_mode=True"]
    (entry,) = from_overrides(*(CORRECTION + word for word in words)).of("unsupported")
    assert entry.key == CORRECTION + "rollout_rs" and "bypass_mode" in entry.why


def test_a_weight_of_0_that_would_take_out_whole_responses_is_not_carried():
    words = [CORRECTION + "rollout_is=token", CORRECTION + "rollout_is_threshold='0.5_5.0'"]
    out = from_overrides(*words, "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean")
    assert CORRECTION + "rollout_is_threshold" in {entry.key for entry in out.of("unsupported")}
    assert out.values.get(CORRECTION + "mode") is None


@pytest.mark.parametrize(
    "word",
    [
        "actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.rollout.multi_turn.enable=False",
        "reward_model.enable=False",
        "actor_rollout_ref.rollout.name=vllm",
    ],
)  # fmt: skip
def test_a_feature_that_is_switched_off_is_not_missed(word):
    out = from_overrides(word)
    assert not out.of("unsupported") and word.partition("=")[0] in {e.key for e in out.of("implied")}


@pytest.mark.parametrize(
    ("path", "family"),
    [
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "softmax routers"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "sparse indexer"),
        ("Qwen/Qwen2-VL-7B-Instruct", "images"),
        ("zai-org/GLM-4-9B-0414", "GLM-4"),
        ("XiaomiMiMo/MiMo-7B-RL", "MiMo"),
    ],
)
def test_a_family_that_is_not_here_is_named(path, family):
    out = import_overrides([f"actor_rollout_ref.model.path={path}", "model_engine=megatron"])
    (entry,) = out.of("unsupported")
    assert family in entry.why and "a family that is not here" in entry.why and path.split("/")[1] in entry.why
    assert len(str(entry)) < LONGEST


@pytest.mark.parametrize(
    "path",
    [
        "moonshotai/Moonlight-16B-A3B",
        "deepseek-ai/DeepSeek-V3-0324",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "Qwen/Qwen3.5-35B-A3B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "mistralai/Mixtral-8x7B-v0.1",
        "openai/gpt-oss-20b",
    ],
)
def test_other_attention_that_is_known_by_name_is_here(path):
    out = import_overrides([f"actor_rollout_ref.model.path={path}", "model_engine=megatron"])
    assert not out.of("unsupported")


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("deepseek-ai/DeepSeek-R1", "DeepSeek-V3"),
        ("Qwen/Qwen2.5-VL-32B-Instruct", "Qwen2.5-VL-7B"),  # images: of a family that is here
        ("Qwen/Qwen3-VL-235B-A22B-Instruct", "Qwen3-VL-30B-A3B"),
        ("Qwen/Qwen2-72B", "Qwen2-7B"),
        ("<path_to_dsv3_config>", "such as Qwen3-30B-A3B"),
    ],
)
def test_a_model_of_a_family_that_is_here_is_missed_by_its_name_alone(capsys, path, near):
    """Told once, with the names that are near."""
    code, _, err = run(
        capsys, "import-verl", f"actor_rollout_ref.model.path={path}", "model_engine=megatron", "trainer.nnodes=1"
    )
    told = [line for line in err.splitlines() if "not a known name" in line or "model.path =" in line]
    assert code == 2 and len(told) == 1 and near in told[0] and "--set model.path=FOLDER" in told[0]
    assert len(told[0]) <= LONGEST and err.splitlines()[-1].strip() == "refused: model.path"


@pytest.mark.parametrize(
    ("words", "chosen", "value"),
    [
        (["Qwen/Qwen3-Next-80B-A3B-Instruct"], True, False),
        (["Qwen/Qwen3.5-35B-A3B"], True, False),
        (["moonshotai/Moonlight-16B-A3B"], False, None),
        (["Qwen/Qwen3.5-35B-A3B", "actor_rollout_ref.rollout.enable_prefix_caching=True"], False, True),
    ],
)
def test_engines_of_hybrids_have_no_prefix_cache_where_the_script_says_nothing(words, chosen, value):
    """What the script says stays, for the rule to refuse."""
    path, *more = words
    out = import_overrides([f"actor_rollout_ref.model.path={path}", "model_engine=megatron", *more])
    key = "rollout.enable_prefix_caching"
    assert (key in [entry.to for entry in out.of("chosen")], out.values.get(key)) == (chosen, value)


# --- the tables -------------------------------------------------------------------------------------------------------


def test_every_row_that_goes_somewhere_goes_to_a_key_of_the_schema():
    open_ended = (
        "model.override_transformer_config.",
        "actor.optim.override_optimizer_config.",
        "rollout.engine_kwargs.vllm.",
    )
    config = RunConfig.model_validate({
        "model": {"path": "m"}, "actor": {"layout": {"world_size": 1}, "ppo_mini_batch_size": 1},
        "data": {"train_batch_size": 1},
        "reward": {"custom_reward_function": {"path": "r.py"}},
    })  # fmt: skip
    dump = config.model_dump()
    for key, row in ROWS.items():
        if row.kind == "to" and not row.to.startswith(open_ended):
            node = dump
            for part in row.to.split("."):
                assert part in node, f"{key} -> {row.to}"
                node = node[part]


def test_every_special_row_has_a_handler_and_every_handler_a_row():
    assert {key for key, row in ROWS.items() if row.kind == "special"} == set(HANDLERS)


ACTOR_OPTIM, KL_CONTROL = "actor_rollout_ref.actor.optim.", "algorithm.kl_ctrl."
TO_REWARD = ("algorithm.use_kl_in_reward=True", KL_CONTROL + "type=adaptive", KL_CONTROL + "kl_coef=0.01")
TEACHER = ("enabled=True", "teacher_model.model_path=Qwen/Qwen3-30B-A3B", "distillation_loss.use_task_rewards=False")
NEVER_READ = [
    (KL_CONTROL + "type=adaptive",),
    (KL_CONTROL + "target_kl=0.2",),
    (KL_CONTROL + "horizon=5000",),
    (TO_REWARD[0], KL_CONTROL + "type=fixed", KL_CONTROL + "target_kl=0.2", KL_CONTROL + "horizon=5000"),
    (*TO_REWARD, KL_CONTROL + "target_kl=0.2", *(f"distillation.{word}" for word in TEACHER)),
    ("actor_rollout_ref.actor.policy_loss.dro_beta=null",),
    ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null",),
    ("custom_reward_function.path=null", "custom_reward_function.name=null"),
    (ACTOR_OPTIM + "lr_warmup_init=1e-7", ACTOR_OPTIM + "lr_warmup_steps=-1", ACTOR_OPTIM + "warmup_style=null"),
    ("algorithm.adv_estimator=gae", "critic.optim.lr_warmup_init=1e-7"),
]  # fmt: skip


@pytest.mark.parametrize("words", NEVER_READ)
def test_what_verl_does_not_read_is_not_written_where_validation_refuses_it(words, tmp_path):
    layout = [f"{MEGATRON}expert_model_parallel_size=8", "algorithm.adv_estimator=grpo"]
    found = []
    for more in (words[:0], words):
        path = tmp_path / "imported.yaml"
        path.write_text(from_overrides(*layout, *more).to_yaml())
        config = load_config(str(path))
        found.append(sorted(v.field for v in violations(config, planning_model_spec("Qwen/Qwen3-30B-A3B")[0])))
    assert set(found[1]) <= set(found[0])


@pytest.mark.parametrize(("prefix", "ours"), [(ACTOR_OPTIM, OPTIM), ("critic.optim.", "critic.optim.")])
def test_both_optimizers_take_verls_older_names(prefix, ours):
    """verl's OptimizerConfig sets clip_grad = grad_clip where that is given, in whatever order a script has them."""
    given = {"grad_clip": 0.5, "clip_grad": 1.0, "min_lr_ratio": 0.1, "lr": 1e-5, "num_cycles": 3}
    for names in (list(given), list(given)[::-1]):
        words = [f"{prefix}{name}={given[name]}" for name in names]
        out = import_overrides(["algorithm.adv_estimator=gae", *words])
        assert (out.values[ours + "clip_grad"], out.values[ours + "min_lr"]) == (0.5, pytest.approx(1e-6))
        assert [entry.key for entry in out.losses] == [prefix + "num_cycles"]
    assert import_overrides([f"{prefix}clip_grad=0.3", "algorithm.adv_estimator=gae"]).values[ours + "clip_grad"] == 0.3


@pytest.mark.parametrize("given", [(), ("null",), ("0.2",)])
def test_the_weight_of_dro_that_verl_asks_for_is_said_where_the_script_has_none(given):
    actor = "actor_rollout_ref.actor.policy_loss."
    out = import_overrides([f"{actor}loss_mode=dro", *(f"{actor}dro_beta={value}" for value in given)])
    assert out.values[LOSS + "dro_beta"] == (0.2 if given == ("0.2",) else 0.05)
    assert (LOSS + "dro_beta" in {entry.to for entry in out.of("chosen")}) == (given != ("0.2",))


def test_the_longest_row_speaks():
    assert row_of("actor_rollout_ref.actor.fsdp_config.param_offload").to == "actor.param_offload"
    assert row_of("actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params").why == "FSDP only"
    assert row_of("something.else") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("5", 5), ("True", True), ("false", False), ("null", None), ("vllm", "vllm"),
        ("['a', 'b']", ["a", "b"]),
        ('["console","wandb"]', ["console", "wandb"]), ("'left'", "left"), ("/a/b:c", "/a/b:c"), ("10.", 10.0),
        ("", ""),
        ("{a: 1}", {"a": 1}),
        ("seq-mean-token-mean", "seq-mean-token-mean"), ("2_0", 20), ("['${x}/y']", ["${x}/y"]),
    ],
)  # fmt: skip
def test_values_are_read_as_hydra_reads_them(text, value):
    assert hydra_value(text) == value and type(hydra_value(text)) is type(value)


SPREAD = [
    ("actor_rollout_ref.actor.optim={lr:5e-6,weight_decay:0.0}", {OPTIM + "lr": 5e-6, OPTIM + "weight_decay": 0.0}),
    (MEGATRON[:-1] + "={tensor_model_parallel_size:2}", {LAYOUT + "tensor_model_parallel_size": 2}),
    ("data={train_batch_size: 32, max_prompt_length: 100}", {"data.train_batch_size": 32}),
    (ROLLOUT[:-1] + "={temperature:0.5,n:4}", {"rollout.temperature": 0.5, "rollout.n": 4}),
    (ROLLOUT + "val_kwargs={n:4,do_sample:True,temperature:0.7}",
        {"rollout.val_kwargs.n": 4, "rollout.val_kwargs.temperature": 0.7}),
    ("actor_rollout_ref={actor:{optim:{lr:2e-6}},rollout:{n:3}}", {OPTIM + "lr": 2e-6, "rollout.n": 3}),
    ("algorithm.filter_groups={enable:True,metric:acc}", {"algorithm.filter_groups.enable": True}),
    ("actor_rollout_ref.model.lora={rank:8}", {"actor.lora.rank": 8}),
    ("trainer={total_training_steps:11}", {"trainer.total_training_steps": 11}),
    ("data.apply_chat_template_kwargs={enable_thinking:false}", {"data.enable_thinking": False}),
    ("+" + ROLLOUT + "engine_kwargs.vllm={max_num_seqs:128}", {"rollout.max_num_seqs": 128}),
    ("+" + ROLLOUT + "engine_kwargs.vllm.hf_overrides={a.b:1}",
        {"rollout.engine_kwargs.vllm.hf_overrides": {"a.b": 1}}),
    ("+reward.reward_kwargs={overlong_buffer_cfg:{enable:True,len:5}}", {"algorithm.overlong_buffer.len": 5}),
]  # fmt: skip


@pytest.mark.parametrize(("word", "ours"), SPREAD)
def test_a_section_as_one_mapping_sets_its_keys(word, ours):
    out = from_overrides(word)
    assert {key: out.values.get(key) for key in ours} == ours
    assert word.partition("=")[0].lstrip("+") not in {entry.key for entry in out.of("not_applicable")}


def test_a_mapping_adds_to_its_section_and_the_later_value_wins():
    optim = "actor_rollout_ref.actor.optim"
    out = from_overrides(f"{optim}.lr=1e-6", f"{optim}={{lr:2e-6,weight_decay:0.2}}", f"{optim}.weight_decay=0.3")
    assert (out.values[OPTIM + "lr"], out.values[OPTIM + "weight_decay"]) == (2e-6, 0.3)


@pytest.mark.parametrize("key", ["data", "trainer", "actor_rollout_ref.actor.optim", "critic", "algorithm.kl_ctrl"])
@pytest.mark.parametrize("value", ["5", "text", "{no.such:1}", "{no_such:1}"])
def test_a_section_that_is_no_mapping_of_its_keys_is_a_loss(key, value):
    (entry,) = from_overrides(f"{key}={value}", "algorithm.adv_estimator=gae").losses
    assert entry.key.startswith(key)


def test_what_is_unknown_in_a_mapping_is_unknown_there_alone():
    out = import_script(
        "python -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B "
        '"data={train_files:$F,train_batch_size:32}"\n', "s", {},
    )  # fmt: skip
    assert [entry.key for entry in out.losses] == ["data.train_files"] and out.values["data.train_batch_size"] == 32


@pytest.mark.parametrize("value", ["{'lr':1e-6}", "{lr:1e-6", "{lr:}", "{lr=1e-6}"])
def test_a_mapping_that_hydra_does_not_read_is_a_fault(value):
    (fault,) = from_overrides(f"actor_rollout_ref.actor.optim={value}").faults
    assert "actor_rollout_ref.actor.optim" in fault and "{a:1,b:2}" in fault


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_file_that_validates(capsys, tmp_path):
    file = tmp_path / "out.yaml"
    code, out, err = run(capsys, "import-verl", str(SCRIPTS / "dapo_32b_fsdp.sh"), "-o", str(file))
    assert (code, err) == (0, "") and out.splitlines()[-1].strip() == "valid"
    assert run(capsys, "validate", str(file))[0] == 0


def test_without_a_file_the_configuration_is_printed_and_the_report_is_beside_it(capsys, tmp_path):
    code, out, err = run(capsys, "import-verl", str(SCRIPTS / "dapo_32b_fsdp.sh"))
    (tmp_path / "printed.yaml").write_text(out)
    assert code == 0 and "carried" in err and run(capsys, "validate", str(tmp_path / "printed.yaml"))[0] == 0


def test_json_has_the_lists_that_others_rely_on(capsys):
    code, out, _ = run(capsys, "import-verl", str(SCRIPTS / "gspo_30b_megatron.sh"), "--json")
    found = json.loads(out)
    assert code == 2 and not found["ok"]
    assert {"carried", "renamed", "implied", "not_applicable", "unsupported", "warnings"} <= set(found)
    assert {v["field"] for v in found["violations"]} == {"actor.layout.world_size", "cluster.n_gpus_per_node"}
    rate = next(e for e in found["carried"] if e["to"] == "actor.optim.lr")
    assert (rate["key"], rate["value"]) == ("actor_rollout_ref.actor.optim.lr", 1e-6)


def test_variables_overrides_and_our_own_keys_are_given_on_the_command_line(capsys, tmp_path):
    file = tmp_path / "out.yaml"
    arguments = ("--set", "NNODES=4", "--set", "DATA_ROOT=/data", "--set", "trainer.seed=7", "-o", str(file))
    code, _, _ = run(capsys, "import-verl", str(SCRIPTS / "gspo_30b_megatron.sh"), "trainer.total_epochs=3", *arguments)
    config = load_config(file).config
    assert code == 0
    assert (config.cluster.nnodes, config.trainer.run_dir, config.trainer.seed, config.trainer.total_epochs) == (
        4, "/data/checkpoint/GSPO-30B", 7, 3,
    )  # fmt: skip


def test_several_scripts_go_to_a_folder(capsys, tmp_path):
    files = [str(SCRIPTS / f"{name}.sh") for name in ("dapo_32b_fsdp", "grpo_7b_megatron")]
    given = ["--set", "train_files=t.parquet", "--set", "test_files=v.parquet"]
    code, out, _ = run(capsys, "import-verl", *files, "-o", str(tmp_path / "out"), *given)
    assert (
        code == 0
        and out.splitlines()[-1].startswith("2 scripts, 2 valid; ")
        and out.splitlines()[-1].endswith(" 0 unsupported (0.0%)")
    )
    assert {f.name for f in (tmp_path / "out").iterdir()} == {"dapo_32b_fsdp.yaml", "grpo_7b_megatron.yaml"}


def test_one_script_of_several_that_is_not_verls_does_not_stop_the_others(capsys, tmp_path):
    other = tmp_path / "other.sh"
    other.write_text("echo hello\n")
    code, out, _ = run(
        capsys, "import-verl", str(other), str(SCRIPTS / "dapo_32b_fsdp.sh"), "-o", str(tmp_path / "out")
    )
    assert code == 2 and "is no verl launch script" in out and out.splitlines()[-1].startswith("2 scripts, 1 valid; ")
    assert (tmp_path / "out" / "dapo_32b_fsdp.yaml").exists()


def test_overrides_alone_are_enough(capsys):
    words = [
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=8",
    ]
    code, out, _ = run(capsys, "import-verl", *words)
    assert code == 0 and "n: 8" in out


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo hello\n", "is no verl launch script: it starts nothing"),
        ("python train.py --lr 1\n", "it starts python"),
        ("model:\n  a: 1\n  b: 2\n  c: 3\n  d: 4\n", "it starts model:, a:, b:, c:, ..., and no"),
        ("python3 -m recipe.r1.main_eval data.path=x\n", "recipe.r1.main_eval, which is not verl's RL training"),
        (
            "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=x\n",
            "verl.trainer.fsdp_sft_trainer, which is not verl's RL training",
        ),
        (
            "python3 -m verl.trainer.main_ppo a.b=1\npython3 -m verl.trainer.main_ppo a.b=2\n",
            "more than once (lines 1, 2)",
        ),
        (
            "python3 -m verl.trainer.main_ppo data.train_batch_size=$(nproc)\n",
            "data.train_batch_size depends on $(nproc)",
        ),
        ("n=$(nproc)\npython3 -m verl.trainer.main_ppo data.train_batch_size=$n\n", "give --set n=..."),
        ("python3 -m verl.trainer.main_ppo 'unclosed\n", ":1: no closing '"),
    ],
)
def test_a_script_that_cannot_be_carried_over_says_why(capsys, tmp_path, text, problem):
    file = tmp_path / "s.sh"
    file.write_text(text)
    code, _, err = run(capsys, "import-verl", str(file))
    assert code == 2 and problem in err


def test_a_place_that_the_grammar_cannot_read_is_told_and_forbids_the_answer_valid(capsys, tmp_path):
    text = (SCRIPTS / "dapo_32b_fsdp.sh").read_text()
    (tmp_path / "s.sh").write_text(text + "\necho done | | cat\n")
    fault = f"mend {tmp_path / 's.sh'}:{len(text.splitlines()) + 2}: cannot be read as shell: |"
    code, out, _ = run(capsys, "import-verl", str(tmp_path / "s.sh"), "-o", str(tmp_path / "out.yaml"))
    assert code == 2 and f"warning: {fault}" in out
    assert out.splitlines()[-1].strip() == "refused: 1 place that cannot be read"
    assert f"# warning: {fault}" in (tmp_path / "out.yaml").read_text()
    found = json.loads(run(capsys, "import-verl", str(tmp_path / "s.sh"), "--json")[1])
    assert not found["ok"] and fault in found["warnings"] and not found["violations"]


LAUNCH = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B "


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            LAUNCH + "trainer.nnodes=2 $MORE",
            "give --set MORE=... (nothing behind = where it is empty): ${MORE} in line 1",
        ),
        (LAUNCH + "trainer.nnodes=2 ~critic", "remove ~critic from line 1, or give the value"),
        (LAUNCH + "trainer.nnodes=2 nonsense", "mend or remove nonsense in line 1: it is no override (key=value)"),
        (LAUNCH + "$(cat overrides)", "give what it comes to as overrides behind the script: $(cat overrides)"),
        (LAUNCH + "\u00a0trainer.nnodes=2", "replace the character U+00A0 by a plain blank in line 1"),
        ("A=(trainer.nnodes=2)\n[ $KL ] && A+=(algorithm.use_kl_in_reward=True)\n" + LAUNCH + '"${A[@]}"',
         "give --set KL=... (nothing behind = where it is empty): ${A: algorithm.use_kl_in_reward=True} in line 2"),
    ],
)  # fmt: skip
def test_a_word_that_is_not_understood_is_told_and_forbids_the_answer_valid(capsys, tmp_path, text, fault):
    (tmp_path / "s.sh").write_text(text + "\n")
    code, out, _ = run(capsys, "import-verl", str(tmp_path / "s.sh"), "-o", str(tmp_path / "out.yaml"))
    assert code == 2 and f"warning: {fault}" in out and "1 place that cannot be read" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("given", "tail"),
    [(["--set", "MORE="], "$MORE"), ([], '"$@"'), ([], "${MORE:-}"), ([], "> log 2>&1 &"), ([], "\\ ")],
)
def test_words_that_come_to_nothing_are_not_missed(capsys, tmp_path, given, tail):
    (tmp_path / "s.sh").write_text(LAUNCH + f"trainer.nnodes=2 --config-name ppo_trainer {tail}\n")
    found = json.loads(run(capsys, "import-verl", str(tmp_path / "s.sh"), "--json", *given)[1])
    assert not [w for w in found["warnings"] if "not read" in w]


def test_a_name_with_the_date_in_it_is_written_without_it():
    text = "NAME=${NAME:-qwen_$(date +%Y%m%d_%H%M)}\n" + LAUNCH + 'trainer.experiment_name="$NAME-$SEED"'
    assert import_script(text, "s", {}).values["trainer.experiment_name"] == "qwen"


def test_a_string_of_overrides_with_one_unknown_part_loses_none_of_them():
    """Keys behind the unknown part were once taken for its value, or for nothing."""
    text = 'ARGS="trainer.nnodes=2 trainer.default_local_dir=$ROOT/x trainer.save_freq=7"\n' + LAUNCH + "$ARGS"
    out = import_script(text, "s", {})
    assert (out.values["cluster.nnodes"], out.values["trainer.save_freq"], out.faults) == (2, 7, ())
    assert [(e.key, e.value) for e in out.of("unknown")] == [("trainer.default_local_dir", "${ROOT}/x")]


# --- the file that a script names -------------------------------------------------------------------------------------


def launched(arguments: str, module: str = "verl.trainer.main_ppo", name: str = "s"):
    return import_script(f"python3 -m {module} actor_rollout_ref.model.path=Qwen/Qwen3-8B {arguments}", name, {})


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        ("--config-name=gsm8k_multiturn_grpo", {"data.max_response_length": 1024, "data.train_batch_size": 256}),
        (
            "--config-name gsm8k_multiturn_grpo.yaml data.train_batch_size=64",
            {"data.max_response_length": 1024, "data.train_batch_size": 64},
        ),
        ("-cn search_multiturn_grpo --config-path=$HERE/config", {"data.shuffle": False}),
        (
            "--config-name=ppo_megatron_trainer",
            {LAYOUT + "tensor_model_parallel_size": None, "data.train_batch_size": 1024},
        ),
    ],
)
def test_verls_own_files_are_known_by_name(arguments, ours):
    out = launched(arguments)
    assert {key: out.values.get(key) for key in ours} == ours and not out.faults
    turns = [e for e in out.of("unsupported") if e.key == ROLLOUT + "multi_turn.enable"]
    assert len(turns) == ("multiturn" in arguments), "several turns are switched on in the file, and are not here"


def test_a_file_at_hand_is_read_with_those_it_builds_on(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(
        "hydra: {searchpath: [x]}\ndefaults: [base, override model_engine: megatron, _self_]\n"
        "data: {train_batch_size: 48, gen_batch_size: '${data.train_batch_size}'}\n"
    )
    (tmp_path / "conf" / "base.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 5, max_prompt_length: 77}\n"
    )
    out = launched("--config-path conf --config-name mine data.max_response_length=99", name=str(tmp_path / "s.sh"))
    assert not out.faults and not out.lacks_layout  # Megatron's degrees are the script's, which are all 1
    assert [out.values[f"data.{key}"] for key in ("train_batch_size", "max_prompt_length", "max_response_length")] == [
        48,
        77,
        99,
    ]
    assert any("the configuration mine sets" in w and "data.train_batch_size=48" in w for w in out.warnings)


@pytest.mark.parametrize("text", ["defaults: [nowhere, _self_]\n", None])
def test_a_file_that_is_not_at_hand_forbids_the_answer_valid(tmp_path, text):
    if text:
        (tmp_path / "mine.yaml").write_text(text)
    out = launched("--config-path=. --config-name=mine", name=str(tmp_path / "s.sh"))
    (fault,) = out.faults
    name = "nowhere" if text else "mine"
    assert fault.startswith(f"give --config-path FOLDER with {name}.yaml in it")
    assert f"--config-name {name}: that file is not at hand" in fault


@pytest.mark.parametrize(
    "module", ["recipe.one_step_off_policy.main_ppo", "verl.experimental.one_step_off_policy.main_ppo"]
)
def test_a_trainer_that_generates_ahead_has_its_schedule_and_engines_of_its_own(module):
    out = launched("trainer.nnodes=1 trainer.n_gpus_per_node=6 rollout.nnodes=1 rollout.n_gpus_per_node=2", module)
    assert not out.of("unsupported") and [e.to for e in out.of("renamed") if e.key == module] == ["trainer.schedule"]
    ours = {
        "trainer.schedule": "one_step_off",
        "cluster.placement": "separate",
        "cluster.n_gpus_per_node": 8,
        "algorithm.anchor": "recompute",
        "algorithm.rollout_correction.level": "token",
        LAYOUT + "world_size": 6,
    }
    assert {key: out.values[key] for key in ours} == ours
    assert any("takes the engine's log-probs" in warning for warning in out.warnings)
    # tokens of older weights are weighed, also where the script only rejects
    rejecting = f"{CORRECTION}rollout_rs=token_k1 {CORRECTION}rollout_rs_threshold='0.5_1.25'"
    out = launched(f"trainer.nnodes=1 rollout.nnodes=1 {rejecting}", module)
    ours = {CORRECTION + "mode": "mask", CORRECTION + "low": 0.8, CORRECTION + "high": 2.0}
    assert {key: out.values[key] for key in ours} == ours and CORRECTION + "weigh" not in out.values


FULLY = "verl.experimental.fully_async_policy.fully_async_main"


def test_a_fully_asynchronous_trainer_has_a_bound_in_whole_steps_and_its_limits_named():
    words = {
        "async_training.staleness_threshold": "0.5", "async_training.trigger_parameter_sync_step": "4",
        "async_training.require_batches": "2", "async_training.partial_rollout": "True", "data.train_batch_size": "0",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "32", "rollout.total_rollout_steps": "51200",
        "rollout.test_freq": "5", "data.gen_batch_size": "1", "async_training.no_such_key": "1",
    }  # fmt: skip
    out = launched(" ".join(f"{key}={value}" for key, value in words.items()), FULLY)
    ours = {
        "trainer.schedule": "bounded", "trainer.max_staleness": 1, "trainer.partial_rollouts": True,
        "data.train_batch_size": 256, "actor.ppo_mini_batch_size": 32, "trainer.total_training_steps": 200,
        "trainer.test_freq": 5, "algorithm.anchor": "recompute", "algorithm.rollout_correction.mode": "truncate",
    }  # fmt: skip
    assert {key: out.values[key] for key in ours} == ours and "data.gen_batch_size" not in out.values
    assert [e.key for e in out.losses] == ["async_training.no_such_key"]
    assert [e.kind for e in out.entries if e.key == "data.train_batch_size"] == ["implied"]
    assert set(words) <= out.keys


def test_without_staleness_the_order_is_the_synchronous_one():
    out = launched("async_training.staleness_threshold=0 actor_rollout_ref.actor.ppo_mini_batch_size=8", FULLY)
    assert (out.values["trainer.max_staleness"], out.values["trainer.partial_rollouts"]) == (0, False)
    assert (out.values["data.train_batch_size"], out.values["algorithm.anchor"]) == (32, "rollout")


@pytest.mark.parametrize(
    ("words", "anchor", "level"),
    [
        (("staleness_threshold=0",), "rollout", None),
        (("staleness_threshold=0.5",), "recompute", "token"),  # of older weights: computed anew and weighed
        (("staleness_threshold=0.5", "compute_prox_log_prob=True"), None, None),
    ],
)
def test_log_probs_of_the_engine_are_what_a_ratio_is_taken_against_as_the_asynchronous_trainer_says(
    words, anchor, level
):
    """Keys of verl's repository between 0.6.1 and 0.7.1: use_rollout_log_probs is the bypass of later releases."""
    out = from_overrides(*(f"async_training.{word}" for word in ("use_rollout_log_probs=True", *words)))
    assert not out.losses and out.values.get("algorithm.anchor") == anchor
    assert out.values.get("algorithm.rollout_correction.level") == level


def test_keys_of_the_asynchronous_trainer_are_losses_of_any_other():
    out = launched("async_training.staleness_threshold=0.5 rollout.test_freq=2")
    assert {e.key for e in out.losses} == {"async_training.staleness_threshold", "rollout.test_freq"}


@pytest.mark.parametrize(
    ("word", "verdict"),
    [
        ("trainer.balance_batch=True", "valid"),
        ("actor_rollout_ref.model.lora_rank=8", "valid"),
        (
            "actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.actor.use_kl_loss=True "
            "actor_rollout_ref.ref.fsdp_config.param_offload=True",
            "valid",
        ),
        ("actor_rollout_ref.model.mtp.enable=True", "valid"),
        (
            "actor_rollout_ref.model.mtp.enable=True actor_rollout_ref.model.mtp.enable_train=True",
            "carried with losses",
        ),
        ("actor_rollout_ref.actor.optim.lr=$RATE", "carried with losses"),
        ("trainer.experiment_name=$NAME", "valid"),
        ("data.train_files=$DATA/train.parquet", "carried with losses"),
        ("actor_rollout_ref.model.path=$MODELS/Qwen3-8B", "carried with losses"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=3", "refused"),
    ],
)
def test_what_is_lost_changes_the_answer_until_it_is_accepted(capsys, tmp_path, word, verdict):
    (tmp_path / "s.sh").write_text(LAUNCH + "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 " + word + "\n")
    for more in ([], ["--accept-losses"]):
        code, out, _ = run(capsys, "import-verl", str(tmp_path / "s.sh"), "-o", str(tmp_path / "out.yaml"), *more)
        assert out.splitlines()[-1].strip().startswith(verdict)
        assert code == (0 if verdict == "valid" or (more and verdict != "refused") else 2)
    found = json.loads(run(capsys, "import-verl", str(tmp_path / "s.sh"), "--json")[1])
    assert (found["verdict"], found["ok"]) == (verdict, verdict == "valid")


def test_a_file_on_a_variable_that_nobody_sets_is_told_once_and_found_by_a_value(capsys, tmp_path, monkeypatch):
    """HOME is every shell's; another variable is asked for, or our key in its place."""
    monkeypatch.setenv("HOME", "/home/somebody")
    (tmp_path / "s.sh").write_text(
        LAUNCH + "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 "
        "data.train_files=$DATA/t.parquet data.val_files=$HOME/v.parquet\n"
    )
    given = ["import-verl", str(tmp_path / "s.sh"), "-o", str(tmp_path / "out.yaml")]
    code, out, _ = run(capsys, *given)
    told = [line for line in out.splitlines() if "${DATA}/t.parquet" in line]
    assert code == 2 and len(told) == 1 and "--set DATA=..." in told[0]
    assert "carried with losses: data.train_files" in out.splitlines()[-1]
    assert load_config(tmp_path / "out.yaml").config.data.val_files == ("/home/somebody/v.parquet",)
    for value in ("DATA=/data", "data.train_files=/data/t.parquet"):
        code, out, _ = run(capsys, *given, "--set", value)
        assert code == 0 and out.splitlines()[-1].strip() == "valid", out
        assert load_config(tmp_path / "out.yaml").config.data.train_files == ("/data/t.parquet",)


def test_a_key_with_nothing_behind_it_is_refused_as_such_and_breaks_nothing_else(capsys):
    """As bash passes `trainer.nnodes=$NNODES` where nobody sets it."""
    words = [*LAUNCH.split()[3:], "trainer.nnodes=", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"]
    code, _, err = run(capsys, "import-verl", *words)
    assert code == 2 and "cluster.nnodes" in err and "refused: 1 violation\n" in err and "line 0" not in err


@pytest.mark.parametrize(("loss", "warned"), [("gspo", True), ("vanilla", False)])
def test_a_bypass_that_some_of_verls_trainers_take_for_another_loss_is_warned_of(loss, warned):
    out = from_overrides(f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}", CORRECTION + "bypass_mode=True")
    assert out.values[LOSS + "loss_mode"] == loss
    assert any("computes token-level PPO" in w for w in out.warnings) == warned


@pytest.mark.parametrize("loss", ["gspo", "sapo", "geo_mean"])
def test_a_loss_whose_key_verl_ignores_is_written_as_it_is_computed(loss):
    mode = f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"
    for said in ("", "actor_rollout_ref.actor.loss_agg_mode=token-mean"):
        out = from_overrides(mode, *([said] if said else []))
        assert out.values[LOSS + "loss_agg_mode"] == "seq-mean-token-mean" and any(
            loss in w for w in out.warnings
        ) == bool(said)


@pytest.mark.parametrize(
    ("script", "device"),
    [
        ("export HCCL_CONNECT_TIMEOUT=1500\n", "npu"),
        ("VLLM_ASCEND_ENABLE_NZ=0 ", "npu"),
        ("", "cuda"),
        ("export HCCL_CONNECT_TIMEOUT=1\ndevice=trainer.device=cuda\n", "cuda"),
    ],
)
def test_a_script_that_sets_what_only_npus_know_is_for_npus(script, device):
    out = import_script(
        f"{script}python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B ${{device:-}}\n", "s", {}
    )
    assert out.values["cluster.device"] == device and not out.faults


def test_mindspeeds_own_attention_means_npus():
    word = MEGATRON + "override_transformer_config.use_flash_attn=True"
    assert from_overrides("+" + word).values["cluster.device"] == "npu"
    assert from_overrides(word, "trainer.device=cuda").values["cluster.device"] == "cuda"


def test_an_entry_point_below_a_folder_of_recipes_is_found_and_all_checkpoints_are_kept_as_verl_does():
    out = launched("trainer.nnodes=3", "recipe.rl.math.main_dapo_fit")
    assert (out.values["cluster.nnodes"], out.values["trainer.max_actor_ckpt_to_keep"]) == (3, 1_000_000)


OWN_CODE = (
    "recipe.sppo.main_sppo", "recipe.spin.main_spin", "recipe.prime.main_prime", "recipe.flowrl.main_flowrl",
    "recipe.spo.spo_main_ppo", "recipe.rl.math.main_dapo_fit", "verl.trainer.main_ppo_format",
    "recipe.dapo.main_dapo_kl", "recipe.dapo.main_dapo2", "dapo.main_dapo_fit", "verl.experimental.gae.main_ppo_custom",
)  # fmt: skip


@pytest.mark.parametrize("entry", OWN_CODE)
def test_a_module_with_code_of_its_own_is_a_loss_though_all_of_its_keys_are_carried(entry):
    """SPPO's script has no key that verl.trainer.main_ppo has not: its loss (recipe/sppo/dp_actor.py of verl-recipe
    48ea0a79) stands in code. The last one is Search-R1's, with another reward.
    """
    (loss,) = launched("trainer.nnodes=1", entry).losses
    assert (loss.key, loss.value) == ("module", entry) and "loss, estimator or reward" in loss.why


@pytest.mark.parametrize(
    "entry", ["verl.trainer.main_ppo", "verl.trainer.main_ppo_sync", "recipe.entropy.main_entropy", "dapo.main_dapo"]
)
def test_a_module_that_trains_as_its_keys_say_is_no_loss(entry):
    assert not launched("trainer.nnodes=1", entry).losses


@pytest.mark.parametrize("entry", ["recipe.dapo.main_dapo", "verl_recipe.dapo.main_dapo", "dapo.main_dapo"])
def test_dapo_by_its_entry_point_has_the_reward_manager_of_its_file(entry):
    assert launched("", entry).values["reward.reward_manager"] == "dapo"


@pytest.mark.parametrize("key", ["reward_model.reward_manager", "reward_manager.name", "reward.reward_manager.name"])
@pytest.mark.parametrize("name", ["naive", "dapo"])
def test_a_reward_manager_is_carried_by_every_name_that_verl_gave_its_key(key, name):
    out = import_overrides(["actor_rollout_ref.model.path=Qwen/Qwen3-8B", f"{key}={name}"])
    assert out.values["reward.reward_manager"] == name and not out.losses


@pytest.mark.parametrize("source", ["none.sh", "not an override"])
def test_a_source_that_is_neither_file_nor_override_is_refused(capsys, source):
    code, _, err = run(capsys, "import-verl", source)
    assert code == 2 and "no such file, and no override" in err


def test_a_file_that_is_no_text_is_refused(capsys, tmp_path):
    (tmp_path / "s.sh").write_bytes(b"\xff\xfe\x00")
    code, _, err = run(capsys, "import-verl", str(tmp_path / "s.sh"))
    assert code == 2 and "cannot be read as text" in err


@pytest.mark.parametrize(
    "text",
    [
        'srun --nodes=2 bash -c "python3 -m verl.trainer.main_ppo trainer.nnodes=$N \\\n  data.train_batch_size=64"\n',
        'CMD="python3 -m verl.trainer.main_ppo trainer.nnodes=$N data.train_batch_size=64"\neval "$CMD"\n',
        'CMD="python3 -m verl.trainer.main_ppo trainer.nnodes=$N data.train_batch_size=64"\n$CMD\n',
        "env A=1 nohup python3 verl/trainer/main_ppo.py trainer.nnodes=$N data.train_batch_size=64 > log 2>&1 &\n",
    ],
)
def test_a_launch_inside_another_command_is_found(text):
    out = import_script("N=2\n" + text, "s", {})
    assert (out.values["cluster.nnodes"], out.values["data.train_batch_size"]) == (2, 64)
    assert not out.of("unsupported")


def test_importing_imports_nothing_heavy():
    program = (
        "import sys, time; start = time.process_time()\n"
        "from mrl.cli.main import main\n"
        f"main(['import-verl', {str(SCRIPTS / 'dapo_32b_fsdp.sh')!r}])\n"
        f"spent = time.process_time() - start; assert spent < {2 * times_slower()}, spent\n"
        "heavy = {'torch', 'ray', 'megatron', 'mbridge', 'vllm', 'transformers'} & "
        "set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("behind", "line", "cause"),
    [
        (" \\\n  # a remark\n", 2, "a comment inside the command"),
        (" \\ \n", 1, "a blank behind the backslash"),
        (" \\\t\n", 1, "a blank behind the backslash"),
        (" \\ # a remark\n", 1, "a comment behind the argument"),
        (" # a remark\n", 1, "a comment behind the argument"),
        ("\n", 1, "no backslash at the end of the line"),
        (" \\\n\n", 2, "an empty line inside the command"),
    ],
)
def test_where_a_continued_command_breaks_off_is_said_with_the_cause(behind, line, cause):
    """talmolab/sleap#2611 and its kin. The value of the first key behind it is set in another line."""
    head = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
    text = f"{head}{behind}  trainer.nnodes=$N \\\n  trainer.save_freq=5\n"
    out = import_script(f"N=2\n{text}", "s", {})
    assert out.values["cluster.nnodes"] == 2 and out.values["trainer.save_freq"] == 5
    (said,) = [w for w in out.warnings if "the shell ends the command there" in w]
    assert said.startswith(f"s:{line + 1}: {cause}")


ASKS = {
    "actor_rollout_ref.rollout.repetition_penalty": ("1.2", "1.0"),
    "actor_rollout_ref.rollout.use_fire_sampling": ("True", "False"),
    "data.sampler.class_path": ("/x/curriculum.py", "null"),
    "data.datagen.path": ("/x/made.py", "null"),
    "data.image_key": ("images", "null"),
    "data.mm_processor_kwargs.max_pixels": ("65536", "null"),
    "actor_rollout_ref.actor.optim.min_lr_ratio": ("0.1", "0.0"),
    "actor_rollout_ref.actor.optim.num_cycles": ("2", "0.5"),
    "actor_rollout_ref.rollout.skip.enable": ("True", "False"),
    "reward.reward_manager.source": ("importlib", "register"),
    "trainer.v1.trainer_mode": ("separate_async", "sync"),
    "trainer.v1.sampler.custom_sampler.path": ("/x/s.py", "null"),
}


@pytest.mark.parametrize("key", ASKS)
def test_a_key_that_changes_sampling_or_data_is_a_loss_unless_its_value_asks_for_nothing(key):
    """verl-project/verl#3309 and #7270."""
    asks, nothing = ASKS[key]
    assert [entry.key for entry in from_overrides(f"{key}={asks}").losses] == [key]
    assert not from_overrides(f"{key}={nothing}").losses


MISSPELT = [
    "actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.min_p", "actor_rollout_ref.rollout.stop",
    "actor_rollout_ref.rollout.val_kwargs.temprature", "data.train_bach_size", "trainer.total_training_step",
    "algorithm.norm_adv", "actor_rollout_ref.actor.optim.lrr", "actor_rollout_ref.actor.clip_ratio_hgih",
    "actor_rollout_ref.actor.megatron.tensor_parallel_size", "actor_rollout_ref.ref.log_prob_micro_bach_size",
    "actor_rollout_ref.ref.megatron.tensor_parallel_size", "critic.cliprange", "critic.optim.lrr",
    "critic.megatron.tp", "distillation.enable", "distillation.distillation_loss.temperature", "reward_model.path",
    "reward.manager", "actor_rollout_ref.rollout.multi_turn.max_turns", "actor_rollout_ref.model.lora.r",
    "actor_rollout_ref.actor.checkpoint.save", "actor_rollout_ref.actor.fsdp_config.offload",
    "actor_rollout_ref.rollout.agent.workers", "async_training.staleness", "transfer_queue.enabled",
]  # fmt: skip


@pytest.mark.parametrize("key", MISSPELT)
def test_a_key_that_no_release_of_verl_has_is_none_under_every_prefix(key):
    (entry,) = from_overrides(f"{key}=1").losses
    assert entry.key == key and "no such key here, nor in verl 0.3.0.post1 to 0.9.1" in entry.why


OPEN = [
    "actor_rollout_ref.rollout.engine_kwargs.sglang.anything", "actor_rollout_ref.rollout.engine_kwargs.trtllm.x.y",
    "ray_kwargs.ray_init.object_store_memory", "hydra.run.dir", "actor_rollout_ref.actor.checkpoint.mbridge_config.x",
    "custom_reward_function.reward_kwargs.anything",
]  # fmt: skip


@pytest.mark.parametrize("key", OPEN)
def test_below_a_free_mapping_of_verls_any_name_is_one(key):
    assert not from_overrides(f"+{key}=1").losses


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("actor_rollout_ref.rollout.over_sample_rate=0.1",), "implied"),  # vLLM's engine of verl never read it
        (("actor_rollout_ref.rollout.over_sample_rate=0.1", "actor_rollout_ref.rollout.name=sglang"), "unsupported"),
        (("actor_rollout_ref.rollout.do_sample=False",), "implied"),
        (("actor_rollout_ref.rollout.do_sample=False", "actor_rollout_ref.rollout.name=hf"), "unsupported"),
        (("actor_rollout_ref.rollout.do_sample=True", "actor_rollout_ref.rollout.name=hf"), "implied"),
        (("data.chat_template_func=f",), "not_applicable"),
        (("skip.rollout.enable=True",), "unsupported"),
        (("skip.rollout.dump_dir=/x",), "not_applicable"),
        (("actor_rollout_ref.rollout.engine_kwargs.vllm.max_model_len=4096",), "implied"),
        (("actor_rollout_ref.rollout.engine_kwargs.vllm.max_model_len=1023",), "unsupported"),
        (("actor_rollout_ref.rollout.engine_kwargs.vllm.max_model_len=-1",), "implied"),
        (("actor_rollout_ref.rollout.max_model_len=null",), "implied"),
        (("actor_rollout_ref.rollout.max_model_len=1024",), "implied"),
        (("actor_rollout_ref.rollout.max_model_len=1023",), "unsupported"),  # responses end there
        (  # padding of the layout is none of the engine's
            (
                "actor_rollout_ref.rollout.max_model_len=1025",
                "data.max_prompt_length=513",
                "actor_rollout_ref.actor.megatron.context_parallel_size=4",
            ),
            "implied",
        ),
        (("reward_model.reward_manager=prime",), "renamed"),
        (("actor_rollout_ref.model.override_config.max_position_embeddings=null",), "implied"),
        (("+actor_rollout_ref.model.override_config.model_config.max_position_embeddings=65536",), "renamed"),
        (
            (
                "actor_rollout_ref.model.override_config.max_position_embeddings=40960",
                "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
            ),
            "implied",
        ),
        (
            (
                "actor_rollout_ref.model.override_config.max_position_embeddings=40960",
                "actor_rollout_ref.model.path=deepseek-ai/DeepSeek-V3",
            ),
            "unsupported",
        ),
        (("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1",), "carried"),
        (("actor_rollout_ref.model.custom_chat_template='{{ messages }}'",), "renamed"),
        (("actor_rollout_ref.model.custom_chat_template=null",), "implied"),
        (("trainer.val_only=True",), "carried"),
        (("trainer.val_only=True", "trainer.val_before_train=False"), "implied"),  # then verl trains
        (
            (
                "actor_rollout_ref.model.override_config.max_position_embeddings=8192",
                "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
            ),
            "implied",
        ),
        (
            (
                "actor_rollout_ref.model.override_config.max_position_embeddings=1023",
                "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
            ),
            "renamed",
        ),
        (("actor_rollout_ref.model.exclude_modules='.*visual.*'", "actor_rollout_ref.model.lora_rank=8"), "implied"),
        (("actor_rollout_ref.model.exclude_modules='.*proj.*'", "actor_rollout_ref.model.lora_rank=8"), "unsupported"),
        (("actor_rollout_ref.model.exclude_modules=[q_proj]", "actor_rollout_ref.model.lora_rank=8"), "unsupported"),
        (
            ("actor_rollout_ref.model.exclude_modules='x(q'", "actor_rollout_ref.model.lora_rank=8"),
            "unsupported",
        ),
        (("actor_rollout_ref.actor.veomni.param_offload=True",), "renamed"),
        (("actor_rollout_ref.actor.veomni.moe_implementation=fused",), "not_applicable"),
        (("actor_rollout_ref.actor.torchtitan.attn_type=flex",), "not_applicable"),
        (("actor_rollout_ref.actor.fsdp_config.turbo_config.memory.recompute=True",), "not_applicable"),
        (("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1", "trainer.total_training_steps=50"), "renamed"),
        (("critic.optim.lr_warmup_steps_ratio=0.1", "algorithm.adv_estimator=gae"), "carried"),
    ],
)
def test_a_key_is_a_loss_only_where_verl_reads_it_and_nothing_here_does(words, kind):
    """Against the wheel of verl 0.9.1: what its vLLM engine, its data sets and its optimizers read."""
    key = words[0].lstrip("+").partition("=")[0]
    (entry,) = [each for each in from_overrides(*words).entries if each.key == key]
    assert entry.kind == kind


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (("trainer.n_gpus_per_node=8", "trainer.nnodes=2"), 4),
        (
            (
                "model_engine=dp",
                "trainer.n_gpus_per_node=8",
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4",
            ),
            32,
        ),
        (("trainer.n_gpus_per_node=8", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"), 16),
        (("actor_rollout_ref.actor.use_dynamic_bsz=True",), None),
        (("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",), 1),
    ],
)
def test_a_micro_batch_over_all_replicas_is_divided_by_them(words, ours):
    """verl 0.6: fsdp_workers.py by ranks over ulysses_sequence_parallel_size, megatron_workers.py by its replicas."""
    out = from_overrides("actor_rollout_ref.actor.ppo_micro_batch_size=64", *words)
    assert out.values.get("actor.ppo_micro_batch_size_per_gpu") == ours and not out.losses


def test_what_only_other_estimators_read_is_no_loss():
    assert not from_overrides("actor_rollout_ref.actor.sum_pi_squared_checkpointing=True").losses


def test_a_misspelt_key_is_answered_with_the_one_that_was_meant():
    (entry,) = from_overrides("trainer.total_training_step=7").losses
    assert entry.why.endswith("did you mean trainer.total_training_steps?")


def test_values_inside_a_field_of_the_engine_make_one_mapping():
    field = "actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config."
    out = from_overrides(f"+{field}cudagraph_mode=FULL_DECODE_ONLY", f"+{field}cudagraph_capture_sizes=[4,12]")
    wanted = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4, 12]}
    assert out.values["rollout.engine_kwargs.vllm.compilation_config"] == wanted and not out.losses


@pytest.mark.parametrize("key", ["actor_rollout_ref.model", "data", "critic.model"])
def test_code_of_a_checkpoint_is_no_loss_where_the_family_is_here(key):
    words = [f"{key}.trust_remote_code=True", "algorithm.adv_estimator=gae"]
    assert not from_overrides(*words).losses
    losses = import_overrides([*words, "actor_rollout_ref.model.path=org/Unheard-of-7B"]).losses
    assert f"{key}.trust_remote_code" in {entry.key for entry in losses}


def test_rows_of_verls_visual_data_set_are_a_loss():
    """verl reads the images of geo3k without image_key, whose default is `images`."""
    losses = from_overrides("data.train_files=/data/geo3k/train.parquet").losses
    assert [entry.key for entry in losses] == ["data.train_files"]


@pytest.mark.parametrize(
    "words",
    [
        ("data.train_files=/data/geo3k/train.parquet",),
        ("data.image_key=pictures",),
        ("actor_rollout_ref.rollout.limit_images=5",),
        ("actor_rollout_ref.actor.freeze_vision_tower=True",),
    ],
)
@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct"])
def test_a_script_that_shows_images_to_a_model_that_reads_them_trains_its_tower_as_verl_does(model, words):
    """verl 0.9.1, trainer/config/actor/actor.yaml: freeze_vision_tower is false unless a script says otherwise."""
    out = import_overrides([f"actor_rollout_ref.model.path={model}", "algorithm.adv_estimator=grpo", *words])
    assert out.values["model.vision"] == ("frozen" if "freeze" in words[0] else "trained") and not out.losses
    assert out.values.get("data.image_key") == ("pictures" if "image_key" in words[0] else None)
    assert not [warning for warning in out.warnings if "vision tower" in warning]


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("actor_rollout_ref.model.lora_rank=8", "adapters (actor.lora)"),
        ("algorithm.adv_estimator=gae", "a critic"),
        ("actor_rollout_ref.actor.megatron.override_ddp_config.overlap_grad_reduce=True", "overlap_grad_reduce"),
    ],
)
def test_beside_what_goes_with_no_trained_tower_it_stays_frozen_and_that_is_said(word, why):
    model = "actor_rollout_ref.model.path=Qwen/Qwen3-VL-30B-A3B-Instruct"
    grpo = "algorithm.adv_estimator=grpo"
    out = import_overrides([model, grpo, "actor_rollout_ref.actor.freeze_vision_tower=False", word])
    assert out.values["model.vision"] == "frozen"
    (told,) = [warning for warning in out.warnings if "vision tower" in warning]
    assert told.endswith(f"here it is not trained with {why}")


@pytest.mark.parametrize(
    ("excluded", "lost"),
    [
        ("'.*visual.*'", False),
        ("[visual,merger]", False),
        ("'.*mlp.*'", True),
        ("[q_proj]", True),
        ("'['", True),
        ("'.*layers\\.(1[0-9]|2[0-9])\\..*'", True),
        ("[model.layers.23.self_attn.q_proj,visual]", True),
        ("'.*\\.experts\\.[1-9]+\\..*'", True),
        ("'.*(visual|shared_expert).*'", True),
    ],
)
def test_modules_that_have_no_adapters_here_may_be_excluded(excluded, lost):
    """verl's own LoRA script of Qwen2.5-VL excludes the tower's, whose names all-linear would reach (verl#2182)."""
    model = "actor_rollout_ref.model."
    words = [f"{model}path=Qwen/Qwen2.5-VL-7B-Instruct", f"{model}lora_rank=64", f"{model}target_modules=all-linear"]
    out = import_overrides([*words, f"{model}exclude_modules={excluded}"])
    assert {entry.key for entry in out.losses} == ({f"{model}exclude_modules"} if lost else set())


def test_a_script_of_text_to_a_model_that_reads_images_trains_the_text_model():
    out = import_overrides(["actor_rollout_ref.model.path=Qwen/Qwen3.5-35B-A3B", "data.train_files=/data/math.parquet"])
    assert "model.vision" not in out.values


PROBES = [
    "DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}",
    'DEVICE=`python -c "import torch_npu" 2>/dev/null && echo npu || echo gpu`',
    "DEVICE=${DEVICE:-$(if command -v npu-smi >/dev/null 2>&1; then echo npu; else echo gpu; fi)}",
    "DEVICE=$(nvidia-smi >/dev/null 2>&1 && echo gpu || echo npu)",
    "if command -v npu-smi &>/dev/null; then DEVICE=npu; else DEVICE=gpu; fi",
]
CHOOSES = """
case "$DEVICE" in
    gpu) N=8 ;;
    npu) export HCCL_BUFFSIZE=200; N=16 ;;
    *) echo "Unsupported DEVICE=${DEVICE}. Expected 'gpu' or 'npu'." >&2; exit 1 ;;
esac
"""


@pytest.mark.parametrize("probe", PROBES)
def test_a_script_that_asks_the_machine_for_npus_is_read_as_on_gpus(probe):
    text = probe + CHOOSES + LAUNCH + "trainer.n_gpus_per_node=$N"
    out = import_script(text, "s", {})
    assert (out.values["cluster.n_gpus_per_node"], out.values["cluster.device"]) == (8, "cuda") and not out.faults
    npu = import_script(text, "s", {"DEVICE": "npu"}).values
    assert (npu["cluster.n_gpus_per_node"], npu["cluster.device"]) == (16, "npu")


def test_a_script_that_refuses_a_setting_is_quoted():
    text = PROBES[0] + CHOOSES + LAUNCH + "trainer.n_gpus_per_node=$N"
    with pytest.raises(ConfigError, match=r"s:5: the script ends itself \(exit 1\): Unsupported DEVICE=cuda. Expected"):
        import_script(text, "s", {"DEVICE": "cuda"})


def test_what_only_an_undecided_branch_sets_says_nothing_of_the_device():
    text = f"if [ -f /x ]; then export HCCL_BUFFSIZE=200; fi\n{LAUNCH}"
    assert import_script(text, "s", {}).values["cluster.device"] == "cuda"


def test_the_working_directory_is_known(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.sh").write_text(LAUNCH + "data.train_files=${PWD}/a.parquet data.val_files=$(pwd)/b.parquet\n")
    found = json.loads(run(capsys, "import-verl", "s.sh", "--json")[1])
    values = {entry["to"]: entry["value"] for entry in found["carried"]}
    assert values["data.train_files"] == f"{tmp_path}/a.parquet" and values["data.val_files"] == f"{tmp_path}/b.parquet"
    text = f"cd /data\nA=$PWD\ncd $SOMEWHERE\n{LAUNCH} data.train_files=$A/a data.val_files=$PWD/b"
    out = import_script(text, "s", {"PWD": "/home"})
    assert out.values["data.train_files"] == "/data/a" and [e.key for e in out.losses] == ["data.val_files"]


def test_an_empty_path_of_a_model_says_so():
    (entry,) = import_script(f"P=${{P:-}}\n{LAUNCH} actor_rollout_ref.model.path=$P", "s", {}).losses
    assert entry.key == "actor_rollout_ref.model.path" and "gives an empty path" in entry.why


@pytest.mark.parametrize(("tensor", "verdict"), [(1, "DOES NOT FIT"), (8, "fits")])
def test_the_plan_has_a_line_of_its_own_beside_the_verdict(capsys, tmp_path, tensor, verdict):
    """The verdict is about the translation: a script that fits nowhere is translated all the same."""
    (tmp_path / "s.sh").write_text(
        f"{LAUNCH} algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 model_engine=megatron "
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 {MEGATRON}tensor_model_parallel_size={tensor}\n"
    )
    code, out, _ = run(capsys, "import-verl", str(tmp_path / "s.sh"), "-o", str(tmp_path / "out.yaml"))
    *_, plan, last = out.splitlines()
    assert code == 0 and last.strip() == "valid" and plan.strip().startswith(f"plan: {verdict} h100-80g")


OF_OPTIM = "actor_rollout_ref.actor.optim."


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["eps=1e-6"], {"eps": 1e-6}),
        (["lr_warmup_init=1e-7", "lr_warmup_steps=2"], {"lr_warmup_init": 1e-7}),
        (["lr_start=1e-7", "lr_warmup_steps=2"], {"lr_warmup_init": 1e-7}),
        (["lr_min=1e-7"], {"min_lr": 1e-7}),
        (["lr=2e-6", "min_lr_ratio=0.1"], {"min_lr": 2e-7}),
        (["lr=2e-6", "min_lr_factor=0.5"], {"min_lr": 1e-6}),
        (["grad_clip=0.5"], {"clip_grad": 0.5}),
        (["weight_decay_incr_style=cosine"], {}),
        (["min_lr_ratio=null", "grad_clip=null"], {}),
    ],
)
def test_keys_of_schedules_and_optimizers_become_ours(words, ours):
    out = from_overrides(*(OF_OPTIM + word for word in words))
    assert not out.of("unsupported")
    assert {name: out.values[f"actor.optim.{name}"] for name in ours} == pytest.approx(ours)


def test_a_share_of_a_rate_that_nobody_gives_and_an_optimizer_without_shards_are_losses():
    for word, reason in (("min_lr_ratio=0.1", "not given"), ("optimizer=muon", "has no Muon")):
        (entry,) = from_overrides(OF_OPTIM + word).of("unsupported")
        assert reason in entry.why


@pytest.mark.parametrize("key", ["actor_rollout_ref.model.tokenizer_path", "actor_rollout_ref.model.hf_config_path"])
@pytest.mark.parametrize(("place", "lost"), [("Qwen/Qwen3-8B", False), ("null", False), ("some/other", True)])
def test_a_tokenizer_is_the_models(key, place, lost):
    out = from_overrides("actor_rollout_ref.model.path=Qwen/Qwen3-8B", f"{key}={place}")
    assert (key in {entry.key for entry in out.of("unsupported")}) == lost


@pytest.mark.parametrize("written", [False, True])
def test_a_violation_says_the_value_that_is_set_and_where(written, capsys, tmp_path):
    """Without an output file nothing names the folder in which the result was judged: it is gone."""
    script, file = tmp_path / "run.sh", tmp_path / "imported.yaml"
    start = "python3 -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.path="
    for words, field, value in (
        ("org/Unheard-of-7B", "model.path", "org/Unheard-of-7B"),
        ("Qwen/Qwen3-8B actor_rollout_ref.rollout.n=0", "rollout.n", 0),
        ("Qwen/Qwen3-8B actor_rollout_ref.rollout.temperature=-1", "rollout.temperature", -1),
    ):
        script.write_text(start + words)
        _, out, _ = run(capsys, "import-verl", str(script), "--json", *(("-o", str(file)) if written else ()))
        found = {row["field"]: row for row in json.loads(out)["violations"]}
        assert found[field]["value"] == value
        name, _, line = found[field]["where"].rpartition(":")
        assert name == (str(file) if written else "imported.yaml")
        assert (
            field.rpartition(".")[2]
            in (file.read_text() if written else json.loads(out)["yaml"]).splitlines()[int(line) - 1]
        )
