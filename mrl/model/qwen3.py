"""Qwen3, dense: norms on queries and keys instead of biases, and an explicit head size."""

from mrl.model.decoder_weights import dense_layer
from mrl.model.hf_config import HfConfig, ModelSpec, common
from mrl.model.weight_map import Family

_HEAD_DIM = 128  # the default of a configuration without the key


def read(config: HfConfig) -> ModelSpec:
    return ModelSpec(**common(config), head_dim=config.get("head_dim") or _HEAD_DIM, qkv_bias=False, qk_norm=True)


FAMILY = Family("Qwen3ForCausalLM", "qwen3", read, dense_layer)
