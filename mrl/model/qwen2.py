"""Qwen2 and Qwen2.5, dense: query, key and value projections with biases; small models tie their embeddings."""

from mrl.model.decoder_weights import dense_layer
from mrl.model.hf_config import ANY, HfConfig, ModelSpec, common, head_dim_from_hidden
from mrl.model.weight_map import Family


def read(config: HfConfig) -> ModelSpec:
    return ModelSpec(
        **common(config, kv_heads=32, sliding_window=ANY),
        head_dim=head_dim_from_hidden(config),
        qkv_bias=True,
        qk_norm=False,
    )


FAMILY = Family("Qwen2ForCausalLM", "qwen2", read, dense_layer)
