"""Qwen3, dense: norms on queries and keys instead of biases, and a head size of its own."""

from mrl.model.fields import HfConfig, common
from mrl.model.spec import ModelSpec

ARCHITECTURE = "Qwen3ForCausalLM"
_HEAD_DIM = 128  # what a configuration without the key means


def read(config: HfConfig) -> ModelSpec:
    return ModelSpec(**common(config), head_dim=config.get("head_dim") or _HEAD_DIM, qkv_bias=False, qk_norm=True)
