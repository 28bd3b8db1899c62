"""Qwen2 and Qwen2.5, dense: biased query, key and value projections; small sizes tie their embeddings."""

from mrl.model.fields import HfConfig, common, head_dim_from_hidden
from mrl.model.spec import ModelSpec

ARCHITECTURE = "Qwen2ForCausalLM"


def read(config: HfConfig) -> ModelSpec:
    return ModelSpec(**common(config), head_dim=head_dim_from_hidden(config), qkv_bias=True, qk_norm=False)
