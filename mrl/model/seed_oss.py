"""Seed-OSS: Llama's layers with biases on queries, keys and values.

vLLM has no class of it; that of Llama has these layers, and reads the size of a head and the biases.
"""

from typing import Any

from mrl.model.decoder_weights import dense_layer
from mrl.model.hf_config import ANY, LLAMA_PLAIN, HfConfig, ModelSpec, common, required
from mrl.model.weight_map import Family

_ENGINE = "LlamaForCausalLM"


def read(config: HfConfig) -> ModelSpec:
    size = required(config, "head_dim")
    return ModelSpec(
        **common(config, head_dim=size, attention_bias=ANY, attention_out_bias=False, **LLAMA_PLAIN),
        head_dim=size,
        qkv_bias=bool(required(config, "attention_bias")),
        qk_norm=False,
    )


def engine_keys(m: ModelSpec) -> dict[str, Any]:
    """Returns the class that engines use, and its names of the biases: `attention_bias` alone would add one more."""
    return {"architectures": [_ENGINE], "attention_bias": False, "qkv_bias": m.qkv_bias}


FAMILY = Family(
    "SeedOssForCausalLM",
    "seed_oss",
    read,
    dense_layer,
    engine_keys=engine_keys,
    engine_architecture=_ENGINE,
)
