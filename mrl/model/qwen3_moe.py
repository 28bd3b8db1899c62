"""Qwen3-MoE, also as the text model of Qwen3-VL: routed experts, no shared expert; norms on queries and keys."""

from mrl.model.decoder_weights import dense_layer, expert_layer
from mrl.model.hf_config import ANY, HfConfig, ModelSpec, common, experts, head_dim_from_hidden
from mrl.model.qwen2 import engines_inside, is_of_vision_tower
from mrl.model.weight_map import Family
from mrl.model.wrapped import inner_tensors


def read(config: HfConfig) -> ModelSpec:
    return ModelSpec(
        # vLLM would add a shared expert
        **common(config, sliding_window=ANY, shared_expert_intermediate_size=0),
        **experts(config),
        head_dim=head_dim_from_hidden(config),
        qkv_bias=False,
        qk_norm=True,
    )


FAMILY = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    read,
    dense_layer,
    expert_layer,
    is_left_out=is_of_vision_tower,
    engine_keys=engines_inside("Qwen3MoeInsideVL"),
    wrapper="Qwen3VLMoeForConditionalGeneration",
    seeing="SeeingQwen3VLMoe",
    inside=inner_tensors,
    wrapped_type="qwen3_vl_moe_text",
    wrapped_always={"norm_topk_prob": True},
)
