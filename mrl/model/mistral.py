"""Mistral, dense: Llama's layers. Models of this class that attend within a window are refused."""

from mrl.model.decoder_weights import dense_layer
from mrl.model.hf_config import LLAMA_PLAIN, HfConfig, ModelSpec, common, own_head_dim
from mrl.model.weight_map import Family

# features of other models that vLLM's file has
_PLAIN = {**LLAMA_PLAIN, "llama_4_scaling": None, "ada_rms_norm_t_cond": False}


def read(config: HfConfig) -> ModelSpec:
    return ModelSpec(
        **common(config, head_dim=own_head_dim(config), **_PLAIN),
        head_dim=own_head_dim(config),
        qkv_bias=False,
        qk_norm=False,
    )


FAMILY = Family("MistralForCausalLM", "mistral", read, dense_layer)
