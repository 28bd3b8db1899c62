"""The table of Megatron's fields: all of them are there, what it calls the model's own is what the actor is built with,
and what it takes of public scripts is what it took before.
"""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from mrl.config.load import load_config
from mrl.config.override_fields import DDP, OPTIMIZER, TRANSFORMER, Effect
from mrl.config.override_rules import override_faults
from mrl.config.rules import notes, violations
from mrl.config.schema import ActorConfig, ModelConfig
from mrl.model import known_spec, model_spec
from mrl.model.layout import TrainLayout
from mrl.platforms.npu_mindspeed import MINDSPEED_FIELDS

ROOT = Path(__file__).parents[2]
H100 = ROOT / "parallel_configs" / "qwen3-30b-a3b" / "h100-4x8.yaml"
MODEL, ADAM, BUFFERS = (
    "model.override_transformer_config", "actor.optim.override_optimizer_config", "actor.override_ddp_config",
)  # fmt: skip
TABLES = {
    "TransformerConfig": (MODEL, TRANSFORMER),
    "OptimizerConfig": (ADAM, OPTIMIZER),
    "DistributedDataParallelConfig": (BUFFERS, DDP),
}
QWEN, GLM, DENSE = known_spec("Qwen3-30B-A3B"), known_spec("GLM-4.5-Air"), known_spec("Qwen3-8B")
SIZES = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 16,
    "intermediate_size": 12, "max_position_embeddings": 32, "rope_theta": 1e4, "rms_norm_eps": 3e-6,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.25},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 4},
    "qwen2_moe": EXPERTS
    | {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4, "shared_expert_intermediate_size": 8},
    "qwen3_moe": EXPERTS
    | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "head_dim": 4, "norm_topk_prob": True},
    "glm4_moe": EXPERTS | {
        "architectures": ["Glm4MoeForCausalLM"], "head_dim": 4, "n_routed_experts": 4, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "attention_bias": True, "routed_scaling_factor": 2.5, "use_qk_norm": True,
    },
}  # fmt: skip


def faults(key: str, model=QWEN, device: str = "cuda", **given) -> dict[str, str]:
    """Field -> the rule that it breaks."""
    return {v.field.rpartition(".")[2]: v.rule for v in override_faults(key, given, device, model)}


@pytest.mark.parametrize("upstream", [TransformerConfig, OptimizerConfig, DistributedDataParallelConfig])
def test_every_field_of_the_table_is_one_of_the_tested_release_and_any_other_is_refused(upstream):
    key, listed_fields = TABLES[upstream.__name__]
    more = MINDSPEED_FIELDS if upstream is TransformerConfig else frozenset()
    theirs = {field.name: field.default for field in fields(upstream)}
    assert set(listed_fields) <= theirs.keys() | more
    others = {name: value for name, value in theirs.items() if name not in listed_fields}
    found = faults(key, **others)
    assert found.keys() == others.keys() and len(others) > 1
    assert all(rule.startswith("is no field of ") and " that may be set; " in rule for rule in found.values())


@pytest.mark.parametrize("name", TABLES)
def test_what_is_not_free_says_why_and_passes_with_what_goes_without_saying(name):
    key, table = TABLES[name]
    told = {field: known for field, known in table.items() if known.effect in (Effect.FUNCTION, Effect.BARRED)}
    assert all(known.why and known.values for known in told.values())
    for model in (QWEN, GLM):
        for field, known in told.items():
            assert all(faults(key, model, **{field: value}) == {} for value in known.usual(model)), field


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A function from a family to the config that Megatron builds the actor of it with, and its ModelSpec."""
    from mbridge.core.parallel_states import ParallelStates

    from mrl.rank.bridge import MBridge

    monkeypatch.setattr(ParallelStates, "get_parallel_state", classmethod(lambda cls: cls()))

    def build(family: str, **overrides):
        hf_config = SIZES | FAMILIES[family] | {"model_type": family, "torch_dtype": "bfloat16"}
        (tmp_path / "config.json").write_text(json.dumps(hf_config))
        model, given = model_spec(hf_config), ModelConfig(path=str(tmp_path), override_transformer_config=overrides)
        actor = ActorConfig(layout={"world_size": 1}, ppo_mini_batch_size=1)
        bridge = MBridge(given, actor, model, TrainLayout.build({"world_size": 1}, model))
        return bridge._bridge.config, model

    return build


# Megatron itself makes something else of what goes without saying
MADE_OTHERWISE = {
    "cuda_graph_scope", "autocast_dtype", "microbatch_group_size_per_vp_stage", "init_method",
    "output_layer_init_method", "embedding_init_method",
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_own_values_are_those_that_the_actor_is_built_with(family, built):
    config, model = built(family)
    own = {n: f.usual(model) for n, f in TRANSFORMER.items() if f.effect in (Effect.FUNCTION, Effect.BARRED)}
    of_the_model = {n: v for n, v in own.items() if n not in MADE_OTHERWISE and (model.is_moe or n[:4] != "moe_")}
    differing = {n: (getattr(config, n), v) for n, v in of_the_model.items() if getattr(config, n) not in v}
    assert differing == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_values_that_round_as_usual_are_those_that_the_actor_is_built_with(family, built):
    config, model = built(family)
    usual = {n: f.usual(model) for n, f in TRANSFORMER.items() if f.effect is Effect.ROUNDING}
    assert all(getattr(config, n) in v for n, v in usual.items() if model.is_moe or n != "moe_router_dtype")


@pytest.mark.parametrize("family", ["glm4_moe", "qwen2_moe"])
def test_shared_experts_overlap_no_exchange_where_megatron_refuses_it(family, built):
    """Bridges switch it on, and Megatron's own configuration raises then."""
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]}
    assert not built(family, moe_token_dispatcher_type="flex")[0].moe_shared_expert_overlap
    assert not built(family, **recomputed)[0].moe_shared_expert_overlap
    assert built(family)[0].moe_shared_expert_overlap
    with pytest.raises(ValueError, match="overlap"):
        built(family, moe_shared_expert_overlap=True, **recomputed)


# The first three measured against transformers on the tiny model: 1.5, 0.75 and 0.39 nats.
ANOTHER_MODEL = {
    "hidden_dropout": 0.1, "moe_router_topk_scaling_factor": 2.5, "moe_router_score_function": "sigmoid",
    "layernorm_zero_centered_gamma": True, "attention_dropout": 0.1, "rotary_interleaved": True, "softmax_scale": 0.5,
    "window_size": [128, 0], "moe_router_force_load_balancing": True, "moe_router_num_groups": 4,
    "moe_router_group_topk": 2, "moe_input_jitter_eps": 0.1, "moe_apply_probs_on_input": True,
    "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.1,
    "apply_residual_connection_post_layernorm": True, "activation_func_clamp_value": 1.0, "glu_linear_offset": 1.0,
    "no_rope_freq": 2, "qk_l2_norm": True, "normalization": "LayerNorm", "layernorm_epsilon": 1e-5,
    "attention_output_gate": True, "qk_clip": True, "moe_token_dropping": True,
}  # fmt: skip
DIES_LATE = {
    "mtp_num_layers": 1, "moe_pad_expert_input_to_capacity": True, "fp4": "e2m1", "cpu_offloading": True,
    "fp8_param": True, "moe_grouped_gemm": False, "fp32_residual_connection": True, "enable_autocast": True,
    "tp_comm_overlap": True, "moe_layer_recompute": True, "multi_latent_attention": True,
    "variable_seq_lengths": False,
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), (ANOTHER_MODEL | DIES_LATE).items())
def test_another_model_than_the_engines_and_what_cannot_run_is_refused_by_validate(field, value):
    resolved = load_config(H100, None, [f"{MODEL}={json.dumps({field: value})}"])
    (found,) = violations(resolved, QWEN)
    assert found.field == f"{MODEL}.{field}" and found.rule.startswith("must be ") and found.why
    assert len(found.allowed) == 1 and found.allowed[0] != value
    assert ("as the model has it" in found.rule) == (field in ANOTHER_MODEL)


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [(ADAM, "muon_momentum", 0.9), (ADAM, "hysteresis", 3), (BUFFERS, "fp8_param_gather", True),
     (BUFFERS, "outer_dp_sharding_strategy", "optim")],
)  # fmt: skip
def test_so_are_fields_of_the_optimizer_and_the_buffers(key, field, value):
    assert list(faults(key, **{field: value})) == [field]


def test_the_refusal_names_the_models_own_value():
    wanted = {
        "moe_router_topk_scaling_factor": ("null, or left out", "1.0"),
        "moe_router_score_function": ("softmax", "sigmoid"),
        "moe_router_enable_expert_bias": ("false", "true"),
        "layernorm_epsilon": ("1e-06", "1e-05"),
        "add_qkv_bias": ("false", "true"),
        "qk_layernorm": ("true", "false"),
    }
    scaled = known_spec("GLM-4.5-Air").__class__(**{**vars(GLM), "routed_scaling_factor": 2.5})
    for field, (qwen, glm) in wanted.items():
        glm = "2.5" if field == "moe_router_topk_scaling_factor" else glm
        for model, own in ((QWEN, qwen), (scaled, glm)):
            assert faults(MODEL, model, **{field: "another"}) == {field: f"must be {own}, as the model has it"}


def test_a_value_of_a_model_that_is_not_known_is_left_to_who_knows_it():
    given = {"moe_router_topk_scaling_factor": 2.5, "layernorm_epsilon": 1.0}
    assert faults(MODEL, None, **given) == {}
    assert list(faults(MODEL, None, **given, hidden_dropout=0.1)) == ["hidden_dropout"]
    unreadable = [f"{MODEL}={json.dumps(given | {'hidden_dropout': 0.1})}", "model.path=/nowhere/at-all"]
    from mrl.config.rules import _UnknownModel

    found = violations(load_config(H100, None, unreadable), _UnknownModel())
    assert [v.field for v in found if v.field.startswith(MODEL)] == [f"{MODEL}.hidden_dropout"]


def test_of_experts_in_a_dense_model_one_rule_speaks():
    found = violations(load_config(H100, None, [f"{MODEL}.moe_input_jitter_eps=0.1"]), DENSE)
    ours = [v.rule for v in found if v.field == f"{MODEL}.moe_input_jitter_eps"]
    assert ours == ["is for mixtures of experts, and the model is dense"]


def test_what_rounds_otherwise_is_taken_and_noted_once_a_reason():
    def said(*overrides: str) -> list[str]:
        resolved = load_config(H100, None, overrides)
        assert violations(resolved, QWEN) == []
        before = notes(load_config(H100), QWEN)
        return [note for note in notes(resolved, QWEN) if note not in before]

    (eight_bit,) = said(f"{MODEL}={{fp8: hybrid, fp8_recipe: blockwise}}")
    assert eight_bit.startswith(f"{MODEL}.fp8, fp8_recipe: ")
    (router,) = said(f"{MODEL}.moe_router_dtype=null")
    assert "below fp32" in router and said(f"{MODEL}.moe_router_dtype=fp64") == []
    (sums,) = said(f"{BUFFERS}.grad_reduce_in_fp32=false")
    assert "summed in the weights' own format" in sums and said(f"{BUFFERS}.grad_reduce_in_fp32=true") == []
    (loss,) = said(f"{MODEL}={{moe_aux_loss_coeff: 0.01, moe_z_loss_coeff: 0.001}}")
    assert "auxiliary router loss" in loss and said(f"{MODEL}.moe_aux_loss_coeff=0") == []
    assert said(f"{MODEL}.apply_rope_fusion=true", f"{ADAM}.decoupled_weight_decay=false") == []


def test_names_of_number_formats_reach_megatron_as_torch_has_them():
    import torch
    from megatron.core.optimizer import OptimizerConfig

    from mrl.rank.bridge import checked_overrides

    names = {"main_grads_dtype": "float32", "exp_avg_dtype": "fp32", "fp8_recipe": "float32"}
    given = checked_overrides(ADAM, names, OptimizerConfig)
    assert given == {"main_grads_dtype": torch.float32, "exp_avg_dtype": torch.float32, "fp8_recipe": "float32"}
    assert OptimizerConfig(**given).exp_avg_dtype is torch.float32


# ---------------------------------------------------------------- public scripts

SCRIPTS = yaml.safe_load(Path(__file__).with_name("verl_overrides.yaml").read_text())
VERL = {
    "megatron.override_transformer_config.": MODEL,
    "optim.override_optimizer_config.": ADAM,
    "megatron.override_ddp_config.": BUFFERS,
}
# of what scripts say, refused before there was a table: keys of mrl's, and no field of Megatron's
NEVER_TAKEN = {
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "context_parallel_size",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "use_arbitrary_attention_mask",
    # fields of the layout, one that the family decides, and two of no field of Megatron's
    "tensor_model_parallel_size", "sequence_parallel", "multi_latent_attention", "swiglu", "use_distributed_optimizer",
}  # fmt: skip


def listed(verdict: str) -> list[tuple[str, str, str]]:
    return [(key, *pair.split("=", 1)) for key, pairs in SCRIPTS[verdict].items() for pair in pairs]


def passed_by_scripts() -> set[tuple[str, str, str]]:
    """(key, field, value) of what bash passes from the stored scripts."""
    lines = Path(__file__).with_name("verl_passed.jsonl").read_text().splitlines()
    words = [word.lstrip("+") for line in lines for word in json.loads(line)["words"]]
    return {
        (key, *word.partition(start)[2].split("=", 1)) for word in words for start, key in VERL.items() if start in word
    }


def judged(key: str, field: str, text: str) -> dict[str, str]:
    device = "npu" if field in MINDSPEED_FIELDS else "cuda"
    return faults(key, QWEN, device, **{field: yaml.safe_load(text)})


@pytest.mark.parametrize(("key", "field", "text"), listed("taken"))
def test_what_public_scripts_say_that_leaves_the_model_alone_is_taken(key, field, text):
    assert judged(key, field, text) == {}


@pytest.mark.parametrize(("key", "field", "text"), listed("refused"))
def test_what_public_scripts_say_that_mrl_decides_or_cannot_do_is_refused(key, field, text):
    assert list(judged(key, field, text)) == [field]


def test_of_the_stored_scripts_nothing_that_was_taken_is_refused():
    """43 fields in 60 forms, counted by grep; these of them are refused."""
    pairs = passed_by_scripts()
    refused = {field for key, field, text in pairs if judged(key, field, text)}
    assert refused == NEVER_TAKEN
    assert (len(pairs), len({(key, field) for key, field, _ in pairs})) == (60, 43)
