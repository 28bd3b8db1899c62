"""Sizes of config.json that Megatron refuses, or of which vLLM makes another model, are refused at reading."""

import pytest
from test_models import TINY, TINY_EXPERTS, TINY_MINIMAX, TINY_WIDE

from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.errors import ConfigError
from mrl.model import known_spec, model_spec
from mrl.model.registry import FAMILIES, family_of, known_hf_config
from mrl.tools.family.drawn import APART, drawn_configs

_SHARED = {**TINY_EXPERTS, "shared_expert_intermediate_size": 24}
_ROUTED = {
    "MixtralForCausalLM": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {**TINY_EXPERTS, "norm_topk_prob": True},
    "Qwen2MoeForCausalLM": {**_SHARED, "norm_topk_prob": True},
    "OlmoeForCausalLM": {**TINY_WIDE, "rms_norm_eps": 1e-5, "num_key_value_heads": 4, "pad_token_id": 3},
    "MiniMaxM2ForCausalLM": TINY_MINIMAX,
}


def _config(architecture: str, **changes) -> dict:
    return {**TINY, "architectures": [architecture], "model_type": FAMILIES[architecture].model_type, **changes}


@pytest.mark.parametrize("architecture, keys", [("Qwen2ForCausalLM", {}), ("Qwen2MoeForCausalLM", _SHARED)])
def test_heads_of_another_size_are_refused_where_vllms_class_does_not_read_it(architecture, keys):
    assert model_spec(_config(architecture, **keys, head_dim=8)) == model_spec(_config(architecture, **keys))
    with pytest.raises(ConfigError, match=r"head_dim = 16 must be hidden_size / num_attention_heads = 32 / 4 = 8, or"):
        model_spec(_config(architecture, **keys, head_dim=16))


@pytest.mark.parametrize("architecture", _ROUTED)
def test_more_experts_per_token_than_experts_are_refused(architecture):
    keys = _ROUTED[architecture]
    assert model_spec(_config(architecture, **{**keys, "num_experts_per_tok": 6})).num_experts_per_tok == 6
    with pytest.raises(ConfigError, match=r"num_experts_per_tok = 7 must be at most 6, the number of experts"):
        model_spec(_config(architecture, **{**keys, "num_experts_per_tok": 7}))


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM"])
def test_one_expert_whose_weight_is_always_one_is_refused(architecture):
    one = {**_ROUTED[architecture], "num_experts_per_tok": 1}
    with pytest.raises(ConfigError, match=r"num_experts_per_tok = 1 must be 2 or more, .* Megatron refuses"):
        model_spec(_config(architecture, **one))
    if architecture != "MixtralForCausalLM":
        assert model_spec(_config(architecture, **{**one, "norm_topk_prob": False})).num_experts_per_tok == 1
    olmoe = {**_ROUTED["OlmoeForCausalLM"], "num_experts_per_tok": 1}
    assert model_spec(_config("OlmoeForCausalLM", **olmoe)).num_experts_per_tok == 1


@pytest.mark.parametrize("architecture", ["OlmoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM"])
def test_megatron_takes_a_router_that_chooses_one_expert_by_its_share_of_all(architecture):
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mrl.rank.mapped_bridge import _experts

    one = {**_ROUTED[architecture], "num_experts_per_tok": 1, "norm_topk_prob": False}
    config = _experts(model_spec(_config(architecture, **one)))
    made = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, add_bias_linear=False, **config)
    assert made.moe_router_topk == 1 and made.moe_router_pre_softmax


@pytest.mark.parametrize("name", ["Seed-OSS-36B", "Hy3"])
def test_keys_that_mrl_gives_engines_are_not_replaced(name):
    overrides = 'rollout.engine_kwargs.vllm={"hf_overrides": {"rope_theta": 1.0}, "attention_backend": "HPC_ATTN"}'
    config = load_config("parallel_configs/tiny-moe/cpu.yaml", overrides=[overrides])
    fields = {violation.field.rpartition(".")[2] for violation in violations(config, known_spec(name))}
    assert "hf_overrides" in fields and ("attention_backend" in fields) == (name == "Hy3")


def test_engines_of_seed_oss_get_its_biases_by_the_names_of_llamas_class():
    for has_biases in (True, False):
        model = model_spec(_config("SeedOssForCausalLM", head_dim=12, attention_bias=has_biases))
        assert family_of(model).engine_keys(model) == {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "qkv_bias": has_biases,
        }


@pytest.mark.parametrize("name, is_drawn", [("Seed-OSS-36B", True), ("Qwen3-0.6B", True), ("Qwen2.5-0.5B", False)])
def test_a_family_is_tried_with_heads_of_another_size_unless_they_are_refused(name, is_drawn):
    drawn = drawn_configs(known_hf_config(name))
    assert (APART in drawn) == is_drawn
    if is_drawn:
        assert drawn[APART]["head_dim"] != drawn[APART]["hidden_size"] // drawn[APART]["num_attention_heads"]
    if name == "Seed-OSS-36B":
        assert "attention_bias = False" in drawn
