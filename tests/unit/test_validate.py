"""`mrl validate`: mistakes that people made and lost cluster time over, each refused on a laptop under its own keys,
all in one answer.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from machine import times_slower
from small_model import SIZES, write_model

from mrl.cli.main import main
from mrl.config.load import TIS, load_config
from mrl.config.rules import notes, violations
from mrl.errors import ConfigError
from mrl.model import known_spec

PRESETS = Path(__file__).parents[2] / "parallel_configs"
# 48 layers, 4 key-value heads, 128 experts; TP1 EP8 on 32 devices, engines of 8 data-parallel ranks
BASE = PRESETS / "qwen3-30b-a3b" / "h100-4x8.yaml"
MODEL = known_spec("Qwen3-30B-A3B")
LAYOUT, TRANSFORMER, VLLM = "actor.layout.", "model.override_transformer_config.", "rollout.engine_kwargs.vllm."
FULL = [
    TRANSFORMER + text
    for text in ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1",
                 "recompute_modules=null")
]  # fmt: skip
TP2 = [LAYOUT + "tensor_model_parallel_size=2"]  # with sequence parallelism
CORRECTION, AGGREGATION = "algorithm.rollout_correction.level=token", "algorithm.policy_loss.loss_agg_mode"
OLD_VLLM = "cluster.versions={vllm: 0.11.0}"

# (where it was reported, what somebody wrote, the keys that must be named)
MISTAKES = [
    ("NVIDIA/Megatron-LM#1778", [LAYOUT + "num_layers_in_last_pipeline_stage=20"],
        {LAYOUT + "num_layers_in_last_pipeline_stage"}),
    ("modelscope/ms-swift#5530", [LAYOUT + "expert_model_parallel_size=6"],
        {LAYOUT + "expert_model_parallel_size", LAYOUT + "world_size"}),
    ("verl-project/verl#3360", [LAYOUT + "pipeline_model_parallel_size=8"], {LAYOUT + "world_size"}),
    ("verl-project/verl#5607", ["rollout.expert_parallel_size=2"], {"rollout.expert_parallel_size"}),
    ("verl-project/verl#6609", [TRANSFORMER + "calculate_per_token_loss=true"],
        {TRANSFORMER + "calculate_per_token_loss"}),
    ("verl-project/verl#7321", [AGGREGATION + "=token-mean"], {AGGREGATION}),
    ("verl-project/verl#3597", ["rollout.calculate_log_probs=false", CORRECTION], {"rollout.calculate_log_probs"}),
    ("verl-project/verl#6280", ["rollout.top_p=0.95", CORRECTION], {"rollout.top_p"}),
    ("verl-project/verl#5421", ["actor.ppo_mini_batch_size=4", "rollout.n=2"], {"actor.ppo_mini_batch_size"}),
    ("verl-project/verl#5586", ["actor.router_replay=R3", OLD_VLLM], {"actor.router_replay", "cluster.versions.vllm"}),
    ("NVIDIA/Megatron-LM#4168", ["actor.router_replay=R2", TRANSFORMER + "moe_router_fusion=true"],
        {TRANSFORMER + "moe_router_fusion"}),
    ("NovaSky-AI/SkyRL#411", ["cluster.nnodes=2"], {"cluster.n_gpus_per_node"}),
    ("NovaSky-AI/SkyRL#1680", ["rollout.engine_kwargs={vllm: {quantization: fp8}}"], {VLLM + "quantization"}),
    ("NVIDIA-NeMo/RL#2783", ["trainer.test_freq=5"], {"data.val_files"}),
    ("THUDM/slime#641", [TRANSFORMER + "rotary_base=10000"], {TRANSFORMER + "rotary_base"}),
    ("verl-project/verl#4028", ["data.max_response_length=9632"], {"actor.ppo_max_token_len_per_gpu"}),
    ("verl-project/verl#1332", [*TP2, LAYOUT + "context_parallel_size=4", TRANSFORMER + "cp_comm_type=a2a"],
        {TRANSFORMER + "cp_comm_type"}),
]  # fmt: skip


def found(overrides: list[str], base: Path = BASE, model=MODEL) -> dict:
    return {v.field: v for v in violations(load_config(base, overrides=overrides), model)}


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        main(list(arguments))
        code = 0
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def given(overrides: list[str]) -> list[str]:
    return [part for text in overrides for part in ("--set", text)]


# --- typical mistakes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("issue", "overrides", "fields"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_refused_under_its_own_keys(issue, overrides, fields):
    named = found(overrides)
    assert set(named) == fields
    assert all(v.rule and v.why and v.where for v in named.values())


def test_all_of_them_come_in_one_answer(capsys):
    """Those that change what another one is about are left to the test above."""
    apart = {"verl-project/verl#1332", "modelscope/ms-swift#5530", "verl-project/verl#3360", "NVIDIA/Megatron-LM#4168"}
    rows = [row for row in MISTAKES if row[0] not in apart]
    wrong = [text for _, overrides, _ in rows for text in overrides]
    code, out, err = run(capsys, "validate", str(BASE), "--json", *given(wrong))
    named = {v["field"]: v for v in json.loads(out)["violations"]}
    assert (code, err) == (2, "") and len(rows) >= 12
    assert set().union(*(fields for _, _, fields in rows)) <= set(named)
    assert named["rollout.top_p"] == {
        "field": "rollout.top_p", "where": "--set", "value": 0.95, "rule": named["rollout.top_p"]["rule"],
        "why": named["rollout.top_p"]["why"], "allowed": [1.0],
    }  # fmt: skip
    assert "every rule" not in out and all(v["why"] or v["allowed"] or v["rule"] for v in named.values())


def test_a_violation_in_a_base_file_is_told_with_that_file_and_line():
    wrong = found(["data.train_batch_size=100"])["actor.ppo_mini_batch_size"]
    line = next(
        n
        for n, text in enumerate((PRESETS / "base/model/qwen3-30b-a3b.yaml").read_text().splitlines(), 1)
        if "ppo_mini_batch" in text
    )
    assert wrong.where.endswith(f"base/model/qwen3-30b-a3b.yaml:{line}")


def test_tp8_with_four_kv_heads_is_told_apart_by_the_version_of_megatron():
    wide = [LAYOUT + "tensor_model_parallel_size=8"]
    assert found(wide) == {}
    old = found([*wide, "cluster.versions={megatron-core: 0.12.1}"])
    assert set(old) == {LAYOUT + "tensor_model_parallel_size"} and old[
        LAYOUT + "tensor_model_parallel_size"
    ].allowed == (1, 2, 4)
    assert found([LAYOUT + "tensor_model_parallel_size=4", "cluster.versions={megatron-core: 0.12.1}"]) == {}


# --- budgets, offload, recompute, experts -----------------------------------------------------------------------------


BOUNDARIES = [
    # 2,048 + 8,192 = 10,240 tokens; over CP4 they are padded to a multiple of 8, which they are: 2,560 a device
    (["actor.ppo_max_token_len_per_gpu=10239"], "actor.ppo_max_token_len_per_gpu", (10240, 20480)),
    ([LAYOUT + "context_parallel_size=4", "actor.ppo_max_token_len_per_gpu=2559"], "actor.ppo_max_token_len_per_gpu",
        (2560, 5120)),
    # 10,230 tokens are padded to 10,240 = 640 x 16: over CP4 with SP2 to a multiple of 16
    (
        [*TP2, LAYOUT + "context_parallel_size=4", "data.max_response_length=8182",
         "actor.ppo_max_token_len_per_gpu=2558"],
        "actor.ppo_max_token_len_per_gpu", (2560, 5120),
    ),
    (["actor.ppo_max_token_len_per_gpu=null"], "actor.ppo_max_token_len_per_gpu", (10240,)),
    (["actor.use_dynamic_bsz=false"], "actor.ppo_max_token_len_per_gpu", (None,)),
    (["ref.log_prob_max_token_len_per_gpu=4096"], "ref.log_prob_max_token_len_per_gpu", (10240, 20480)),
    (["actor.optim.override_optimizer_config={optimizer_offload_fraction: 0.5}"],
     "actor.optim.override_optimizer_config.optimizer_offload_fraction", ()),
    (["actor.optim.override_optimizer_config={optimizer_cpu_offload: true, optimizer_offload_fraction: 1.5}"],
     "actor.optim.override_optimizer_config.optimizer_offload_fraction", (0.0, 1.0)),
    (["actor.optim.override_optimizer_config={optimizer_cpu_offload: true}", "model.dtype=float32"],
     "actor.optim.override_optimizer_config.optimizer_cpu_offload", (False,)),
    (["actor.optim.override_optimizer_config={optimizer_cpu_offload: true, decoupled_weight_decay: false}"],
     "actor.optim.override_optimizer_config.decoupled_weight_decay", (True,)),
    (["actor.optim.override_optimizer_config="
      "{optimizer_cpu_offload: true, use_precision_aware_optimizer: true, exp_avg_dtype: bfloat16}"],
     "actor.optim.override_optimizer_config.exp_avg_dtype", ("float32",)),
    (["actor.optim.override_optimizer_config={use_precision_aware_optimizer: true}"],
     "actor.optim.override_optimizer_config.use_precision_aware_optimizer", (False,)),
    (["actor.param_offload=true", TRANSFORMER + "enable_cuda_graph=true"], TRANSFORMER + "enable_cuda_graph", (False,)),
    (["actor.grad_offload=true", TRANSFORMER + "cuda_graph_impl=local"], TRANSFORMER + "cuda_graph_impl", ("none",)),
    (["actor.param_offload=true", "actor.override_ddp_config={nccl_ub: true}"], "actor.override_ddp_config.nccl_ub",
        (False,)),
    (["actor.optim.override_optimizer_config={exp_avg_dtype: bfloat16}"],
     "actor.optim.override_optimizer_config.exp_avg_dtype", ("float32",)),
    ([*FULL, TRANSFORMER + "recompute_granularity=half"], TRANSFORMER + "recompute_granularity",
        ("full", "selective", None)),
    ([*FULL, TRANSFORMER + "recompute_method=all"], TRANSFORMER + "recompute_method", ("uniform", "block")),
    ([*FULL, TRANSFORMER + "recompute_num_layers=0"], TRANSFORMER + "recompute_num_layers", (1,)),
    ([*FULL, TRANSFORMER + "recompute_num_layers=5"], TRANSFORMER + "recompute_num_layers", (1, 2, 3, 4)),
    ([*FULL, TRANSFORMER + "recompute_modules=[mlp]"], TRANSFORMER + "recompute_modules", (None,)),
    ([*TP2, TRANSFORMER + "distribute_saved_activations=true"], TRANSFORMER + "distribute_saved_activations", (False,)),
    ([TRANSFORMER + "moe_enable_deepep=true"], TRANSFORMER + "moe_enable_deepep", (False,)),
    ([TRANSFORMER + "moe_token_dispatcher_type=alltoal"], TRANSFORMER + "moe_token_dispatcher_type",
        ("alltoall", "flex")),
    ([TRANSFORMER + "moe_token_dispatcher_type=allgather"], TRANSFORMER + "moe_token_dispatcher_type",
        ("alltoall", "flex")),
    ([TRANSFORMER + "cp_comm_type=a2a+p2p"], TRANSFORMER + "cp_comm_type", ("p2p", "all_gather", "a2a")),
    ([TRANSFORMER + "overlap_p2p_comm=true", LAYOUT + "pipeline_model_parallel_size=2"],
        TRANSFORMER + "overlap_p2p_comm", (False,)),
    (["model.override_transformer_config={overlap_p2p_comm: true, batch_p2p_comm: true}"],
        TRANSFORMER + "batch_p2p_comm", (False,)),
    ([TRANSFORMER + "use_te_activation_func=true"], TRANSFORMER + "use_te_activation_func", (False,)),
    ([TRANSFORMER + "moe_shared_expert_overlap=true"], TRANSFORMER + "moe_shared_expert_overlap", (False,)),
    (
        [TRANSFORMER + "moe_router_load_balancing_type=sinkhorn"], TRANSFORMER + "moe_router_load_balancing_type",
        ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    ),
    ([TRANSFORMER + "moe_expert_capacity_factor=1.0"], TRANSFORMER + "moe_expert_capacity_factor", (None,)),
    ([TRANSFORMER + "use_flash_attn=true"], TRANSFORMER + "use_flash_attn", ()),
    (["actor.router_replay=R3", "rollout.engine_kwargs={vllm: {async_scheduling: true}}",
            "cluster.versions={vllm: 0.23.0}"],
     VLLM + "async_scheduling", (False,)),
    (["actor.router_replay=R3", "rollout.enable_prefix_caching=false"], "rollout.enable_prefix_caching", (True,)),
    (["rollout.engine_kwargs={vllm: {enable_return_routed_experts: true}}"], VLLM + "enable_return_routed_experts", ()),
    (["rollout.max_num_seqs=20000"], "rollout.max_num_seqs", (10240,)),
    (["rollout.enable_chunked_prefill=false", "rollout.max_num_batched_tokens=4096"], "rollout.max_num_batched_tokens",
        (10240,)),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "field", "allowed"), BOUNDARIES)
def test_each_rule_has_its_boundary(overrides, field, allowed):
    named = found(overrides)
    assert list(named) == [field] and named[field].allowed == allowed and named[field].why


def test_on_the_other_side_of_the_boundary_nothing_is_said():
    assert found([LAYOUT + "context_parallel_size=4", "actor.ppo_max_token_len_per_gpu=2560"]) == {}
    selective = [
        TRANSFORMER + f"recompute_{name}"
        for name in ("granularity=selective", "method=null", "num_layers=null", "modules=[moe]")
    ]
    assert found(selective) == {}
    both = TRANSFORMER + "moe_router_load_balancing_type=[aux_loss,seq_aux_loss]"
    assert found([both, TRANSFORMER + "moe_aux_loss_coeff=[0.01,0.02]"]) == {}
    for given in ([both], [TRANSFORMER + "moe_aux_loss_coeff=[0.01]"], [both, TRANSFORMER + "moe_aux_loss_coeff=0.01"]):
        (violation,) = found(given).values()
        assert "with a list of them" in violation.rule, "Megatron fails where they do not match"
        (allowed,) = violation.allowed
        types = given[:1] if given[0] == both else []
        assert found([*types, f"{TRANSFORMER}moe_aux_loss_coeff={allowed}"]) == {}
    assert found([TRANSFORMER + "moe_enable_deepep=true", TRANSFORMER + "moe_token_dispatcher_type=flex"]) == {}
    assert found(["actor.router_replay=R3", "rollout.engine_kwargs={vllm: {async_scheduling: true}}"]) == {}
    assert (
        found(["actor.router_replay=R3", "rollout.enable_prefix_caching=false", "cluster.versions={vllm: 0.23.0}"])
        == {}
    )


def test_shared_experts_are_recomputed_or_overlap_an_exchange():
    """Megatron's configuration raises for both."""
    base, model = PRESETS / "deepseek-v3" / "h200-32x8.yaml", known_spec("DeepSeek-V3")
    both = [
        f"{TRANSFORMER}{setting}"
        for setting in (
            "moe_shared_expert_overlap=true", "recompute_granularity=selective", "recompute_method=null",
            "recompute_num_layers=null", "recompute_modules=[shared_experts]",
        )
    ]  # fmt: skip
    assert set(found(both, base, model)) == {TRANSFORMER + "moe_shared_expert_overlap"}
    assert found(both[1:], base, model) == {}
    (of_up_projections,) = found([*both[1:4], f"{TRANSFORMER}recompute_modules=[mla_up_proj]"], base, model).values()
    assert "never measured" in of_up_projections.why and "mla_up_proj" not in of_up_projections.allowed


def test_norms_and_activations_are_not_computed_again_in_fp8_that_is_scaled_late():
    """Megatron's configuration raises for both; a recipe that scales at once has no such limit."""
    modules = TRANSFORMER + "recompute_modules"
    given = [TRANSFORMER + "recompute_granularity=selective", modules + "=[layernorm, moe_act]"]
    given += [TRANSFORMER + "recompute_method=null", TRANSFORMER + "recompute_num_layers=null"]
    in_fp8 = [*given, TRANSFORMER + "fp8=e4m3"]
    assert modules not in found(given)
    assert found(in_fp8)[modules].allowed == ("core_attn", "mlp", "moe", "shared_experts")
    assert modules not in found([*in_fp8, TRANSFORMER + "fp8_recipe=blockwise"])


@pytest.mark.parametrize(
    "argument",
    [
        "pipeline_parallel_size: 2", "prefill_context_parallel_size: 2", "decode_context_parallel_size: 2",
    ],
)  # fmt: skip
def test_engines_that_record_routes_see_those_of_all_layers_and_tokens(argument):
    key = "rollout.engine_kwargs.vllm." + argument.partition(":")[0]
    given = f"rollout.engine_kwargs={{vllm: {{{argument}}}}}"

    def rules(overrides: list[str]) -> list[str]:
        config = load_config(BASE, overrides=overrides)
        return [each.rule for each in violations(config, MODEL) if each.field == key]

    assert any("with actor.router_replay R3" in rule for rule in rules(["actor.router_replay=R3", given]))
    assert not any("R3" in rule for rule in rules([given]))


def test_a_dense_model_has_no_experts_to_configure():
    base, model = PRESETS / "qwen3-8b" / "h100-1x8.yaml", known_spec("Qwen3-8B")
    assert set(found([TRANSFORMER + "moe_router_dtype=fp32"], base, model)) == {TRANSFORMER + "moe_router_dtype"}
    assert set(found(["actor.router_replay=R2"], base, model)) == {"actor.router_replay"}
    selective = [TRANSFORMER + "recompute_granularity=selective"]
    modules = TRANSFORMER + "recompute_modules"
    assert set(found([*selective, modules + "=[moe_act, mlp]"], base, model)) == {modules}
    assert found([*selective, modules + "=[mlp]"], base, model) == {}


def test_the_reference_model_has_no_layout_of_its_own():
    with pytest.raises(ConfigError, match=r"ref\.layout \(--set\): unknown key; did you mean actor\.layout\?"):
        load_config(BASE, overrides=["ref.layout={world_size: 32}"])


# --- placement, versions, devices -------------------------------------------------------------------------------------


def test_engines_stand_on_whole_nodes_or_inside_one():
    # 16 + 3 x 4 of 32 devices: the actor fills two nodes, three engines stand in the other two
    base = PRESETS / "qwen3-30b-a3b" / "h100-4x8-separate.yaml"
    tensor = ["rollout.data_parallel_size=1", "rollout.expert_parallel_size=1"]
    assert found([*tensor, "rollout.tensor_model_parallel_size=4", "rollout.num_engines=3"], base) == {}
    # an actor of 12 leaves 4 of a node's 8 devices: engines of 8 find room on the last two nodes only, a third does not
    actor = [LAYOUT + "world_size=12", LAYOUT + "tensor_model_parallel_size=2", LAYOUT + "expert_model_parallel_size=4"]
    sizes = [
        *tensor,
        "actor.ppo_mini_batch_size=3",
        "data.train_batch_size=3",
        "rollout.n=4",
        "rollout.tensor_model_parallel_size=8",
        "cluster.nnodes=4",
    ]
    assert found([*actor, *sizes, "rollout.num_engines=2"], base) == {}
    squeezed = ["cluster.nnodes=3", "cluster.n_gpus_per_node=12", "rollout.num_engines=3"]
    assert set(found([*actor, *sizes, *squeezed], base)) == {"rollout.num_engines"}


def test_a_cluster_smaller_than_the_preset_is_told_with_what_is_missing():
    wrong = found(["cluster.nnodes=1"])["cluster.n_gpus_per_node"]
    assert "at least 32" in wrong.rule and "1 x 8 = 8 are there" in wrong.why and wrong.allowed == (32,)


@pytest.mark.parametrize(
    ("versions", "field"),
    [
        ("{vllm: 0.40.0}", "cluster.versions.vllm"),
        ("{vlm: 0.32.0}", "cluster.versions"),
        ("{megatron-core: newest}", "cluster.versions.megatron-core"),
    ],
)
def test_versions_are_compared_with_what_is_supported(versions, field):
    assert set(found([f"cluster.versions={versions}"])) == {field}


def test_ascend_versions_go_in_pairs():
    base = PRESETS / "qwen3-30b-a3b" / "a2-4x8.yaml"
    assert found([], base) == {}
    assert set(found(["cluster.versions={vllm: 0.32.0}"], base)) == {"cluster.versions.vllm"}
    assert set(found(["cluster.versions={CANN: 8.2.RC1}"], base)) == {"cluster.versions.torch-npu"}
    assert any(
        "never run" in note for note in notes(load_config(base, overrides=["cluster.versions={CANN: 9.0.0}"]), MODEL)
    )


def test_an_unknown_device_lists_those_that_are_known(capsys):
    code, out, _ = run(capsys, "validate", str(BASE), "--json", "--set", "cluster.accelerator=b300")
    (row,) = json.loads(out)["violations"]
    assert (
        code == 2
        and row["field"] == "cluster.accelerator"
        and "h100-80g" in row["allowed"]
        and "ascend-a3-64g" not in row["allowed"]
    )
    code, out, _ = run(capsys, "validate", str(BASE), "--set", "cluster.accelerator=ascend-a3-64g")
    assert code == 2 and "is no cuda device that is known" in out


# --- the answer -------------------------------------------------------------------------------------------------------


def test_a_legal_preset_shows_its_batch(capsys):
    code, out, _ = run(capsys, "validate", str(BASE))
    # 256 x 16; four mini-batches of 64 x 16; world 32 of TP1 = DP32
    assert code == 0 and out.splitlines()[-1] == "ok"
    assert "batch: 256 prompts x 16 = 4096 samples a step, 4 updates of 1024 samples, DP 32: 32 samples a rank" in out
    assert "cannot do this yet" not in out
    assert "the published configuration of Qwen3-30B-A3B is used instead" in out


def test_it_answers_in_under_a_second_and_imports_nothing_heavy():
    program = (
        "import sys, time; start = time.process_time()\n"
        "from mrl.cli.main import main\n"
        f"main(['validate', {str(PRESETS / 'qwen3-235b-a22b' / 'h100-16x8.yaml')!r}])\n"
        f"spent = time.process_time() - start; assert spent < {times_slower()}, spent\n"
        "heavy = {'torch', 'ray', 'megatron', 'mbridge', 'vllm', 'transformers'} & "
        "set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_settings_that_do_nothing_are_mentioned():
    def said(*overrides: str, base: Path = BASE) -> str:
        return " ".join(notes(load_config(base, overrides=overrides), MODEL))

    assert "so this only costs time" in said(
        "actor.param_offload=true", base=PRESETS / "qwen3-30b-a3b" / "h100-4x8-separate.yaml"
    )
    assert "no reference model is loaded" in said("ref.param_offload=true")
    hybrid = ("optimizer_cpu_offload: true", "optimizer_offload_fraction: 1.0", "use_precision_aware_optimizer: true")
    for keys, note in enumerate(
        ("moves nothing", "leaves float32 weights on the device", "adds nothing to optimizer_cpu_offload"), start=1
    ):
        assert note in said(
            f"actor.optim.override_optimizer_config={{{', '.join(hybrid[:keys])}}}", "actor.optimizer_offload=true"
        )
    assert "holds what is moved twice" in said("actor.grad_offload=true", base=PRESETS / "tiny-moe" / "cpu.yaml")
    assert "auxiliary router loss" in said(TRANSFORMER + "moe_aux_loss_coeff=0.01")
    assert "below fp32" in said(TRANSFORMER + "moe_router_dtype=null")
    assert "prefix caching on cpu" in said("actor.router_replay=R3", "cluster.device=cpu")
    assert "prefix caching" not in said("actor.router_replay=R3", "cluster.device=npu")
    assert said() == ""


# --- bad input --------------------------------------------------------------------------------------------------------


def test_presets_that_extend_each_other_are_refused_with_the_way(capsys, tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    code, _, err = run(capsys, "validate", str(tmp_path / "a.yaml"))
    assert code == 2 and "in a circle" in err and "b.yaml" in err


# nine times the mapping before, eight times over: 9 ** 8 values
BOMB = "x0: &x0 [1, 2]\n" + "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 9))


@pytest.mark.parametrize(
    ("text", "problem"),
    [("model: !!python/object/apply:os.system [id]\n", "the tag"), (BOMB, "more than 20000 values once aliases")],
)
def test_yaml_that_is_more_than_data_is_refused(capsys, tmp_path, text, problem):
    (tmp_path / "a.yaml").write_text(text)
    code, _, err = run(capsys, "validate", str(tmp_path / "a.yaml"))
    assert code == 2 and problem in err


def test_a_checkpoint_folder_speaks_for_itself(capsys, tmp_path):
    folder = tmp_path / "Qwen3-30B-A3B"
    folder.mkdir()
    code, _, err = run(capsys, "validate", str(BASE), "--set", f"model.path={folder}")
    assert code == 4 and "config.json does not exist" in err
    (folder / "config.json").write_text(json.dumps(SIZES | {"auto_map": {"AutoModel": "x.Y"}}))
    code, _, err = run(capsys, "validate", str(BASE), "--set", f"model.path={folder}")
    assert code == 2 and "auto_map" in err
    small = tmp_path / "small"
    write_model(small)
    code, out, _ = run(capsys, "validate", str(BASE), "--set", f"model.path={small}")
    assert code == 2 and "num_experts = 4" in out  # the small model's, not those of the name


def test_the_resolved_configuration_can_be_printed_and_read_again(capsys, tmp_path):
    main(["validate", str(BASE), "--resolved", "--set", "actor.optim.lr=3e-7"])
    out, err = capsys.readouterr()
    (file := tmp_path / "whole.yaml").write_text(out)
    again = load_config(file, overrides=["rollout.quantization=fp8"]).config
    assert (
        again.algorithm.rollout_correction.level == TIS.level and "step_timeout_s" not in again.cluster.model_fields_set
    )
    assert load_config(file).config == load_config(BASE, overrides=["actor.optim.lr=3e-7"]).config
    assert "lr: 3.0e-07  # --set" in out and err.rstrip().endswith("ok")


def test_a_resolved_configuration_that_breaks_a_rule_is_printed_and_told(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["validate", str(BASE), "--resolved", "--set", LAYOUT + "expert_model_parallel_size=6"])
    out, err = capsys.readouterr()
    assert "expert_model_parallel_size: 6" in out and LAYOUT + "expert_model_parallel_size" in err


def test_one_kind_of_output_is_printed(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["validate", str(BASE), "--resolved", "--json"])
    assert "give one of them" in capsys.readouterr().err


def test_a_logger_that_is_not_installed_is_refused_with_the_paths(monkeypatch, tmp_path, capsys):
    """Found before only by the run: wandb offline needs the package too (verl-project/verl#494)."""
    from mrl.cli import validate
    from mrl.driver.first_look import Looked
    from mrl.errors import ConfigError
    from mrl.record import sinks

    monkeypatch.setattr("mrl.driver.first_look.look", lambda config: Looked())
    monkeypatch.setattr(validate, "_look_at_weights", lambda *given: [])
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    resolved = load_config(BASE, overrides=["trainer.logger=[console,wandb]"])
    assert validate.look_at_files(resolved, [], check_paths=False)[0] == []
    with pytest.raises(ConfigError, match=r"trainer\.logger: wandb needs the package wandb; pip install"):
        validate.look_at_files(resolved, [], check_paths=True)
