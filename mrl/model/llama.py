"""Llama 2 and 3: neither biases nor norms of heads. Later ones stretch their rotation (mrl/model/rotation.py)."""

from mrl.model.decoder_weights import dense_layer
from mrl.model.hf_config import LLAMA_PLAIN, HfConfig, ModelSpec, common, own_head_dim, refuse_uneven_heads
from mrl.model.weight_map import Family


def read(config: HfConfig) -> ModelSpec:
    refuse_uneven_heads(config)
    return ModelSpec(
        **common(config, head_dim=own_head_dim(config), **LLAMA_PLAIN),
        head_dim=own_head_dim(config),
        qkv_bias=False,
        qk_norm=False,
    )


FAMILY = Family("LlamaForCausalLM", "llama", read, dense_layer)
