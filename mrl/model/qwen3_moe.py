"""Qwen3-MoE: routed experts, no shared one; norms on queries and keys."""

from mrl.model.fields import HfConfig, common, experts, head_dim_from_hidden
from mrl.model.spec import ModelSpec

ARCHITECTURE = "Qwen3MoeForCausalLM"


def read(config: HfConfig) -> ModelSpec:
    return ModelSpec(**common(config), **experts(config), head_dim=head_dim_from_hidden(config), qkv_bias=False, qk_norm=True)
