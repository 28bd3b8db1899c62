"""Qwen2 and Qwen2.5, dense, also as the text model of Qwen2.5-VL: query, key and value projections with biases; small
models tie their embeddings.
"""

from collections.abc import Callable
from typing import Any

from mrl.model.decoder_weights import dense_layer
from mrl.model.hf_config import ANY, HfConfig, ModelSpec, common, derived_head_dim
from mrl.model.weight_map import Family
from mrl.model.wrapped import VISION_TOWER, inner_tensors


def read(config: HfConfig) -> ModelSpec:
    return ModelSpec(
        **common(config, sliding_window=ANY),
        head_dim=derived_head_dim(config),
        qkv_bias=True,
        qk_norm=False,
    )


def is_of_vision_tower(name: str, m: ModelSpec) -> bool:
    """Tells whether a tensor belongs to the vision tower around the text model."""
    return m.is_wrapped and name.startswith(VISION_TOWER)


def engines_inside(architecture: str) -> Callable[[ModelSpec], dict[str, Any]]:
    """Returns settings for engines of a whole: they get the text model alone, by this class (inner_texts.py)."""
    return lambda m: {"architectures": [architecture]} if m.is_wrapped else {}


FAMILY = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    read,
    dense_layer,
    is_left_out=is_of_vision_tower,
    engine_keys=engines_inside("Qwen2InsideVL"),
    wrapper="Qwen2_5_VLForConditionalGeneration",
    seeing="SeeingQwen2_5_VL",
    inside=inner_tensors,
    wrapped_type="qwen2_5_vl_text",
    wrapped_ties=True,
)
