"""Qwen3, dense, also as the text model of Qwen3-VL: norms on queries and keys instead of biases, and an explicit head
size.
"""

from mrl.model.decoder_weights import dense_layer
from mrl.model.hf_config import ANY, HfConfig, ModelSpec, common, required
from mrl.model.qwen2 import engines_inside, is_of_vision_tower
from mrl.model.weight_map import Family
from mrl.model.wrapped import inner_tensors


def read(config: HfConfig) -> ModelSpec:
    return ModelSpec(
        **common(config, sliding_window=ANY),
        head_dim=required(config, "head_dim"),
        qkv_bias=False,
        qk_norm=True,
    )


FAMILY = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    read,
    dense_layer,
    is_left_out=is_of_vision_tower,
    engine_keys=engines_inside("Qwen3InsideVL"),
    wrapper="Qwen3VLForConditionalGeneration",
    seeing="SeeingQwen3VL",
    inside=inner_tensors,
    wrapped_type="qwen3_vl_text",
)
