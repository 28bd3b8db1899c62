"""Qwen1.5-MoE and Qwen2-MoE: routed experts beside one shared expert whose output a scalar gate weighs."""

from mrl.model.fields import HfConfig, common, experts, head_dim_from_hidden, required
from mrl.model.spec import ModelSpec

ARCHITECTURE = "Qwen2MoeForCausalLM"


def read(config: HfConfig) -> ModelSpec:
    return ModelSpec(
        **common(config),
        **experts(config),
        head_dim=head_dim_from_hidden(config),
        qkv_bias=bool(config.get("qkv_bias", True)),
        qk_norm=False,
        shared_expert_intermediate_size=required(config, "shared_expert_intermediate_size"),
    )
