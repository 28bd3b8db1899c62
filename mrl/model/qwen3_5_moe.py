"""Qwen3.5-MoE and Qwen3.6-MoE as text models: Qwen3-Next's layers, with separate projections of delta attention."""

from typing import Any

from mrl.model.decoder_weights import dense_layer
from mrl.model.hf_config import HfConfig, ModelSpec, experts, refuse_unless, required
from mrl.model.qwen2_moe import shared_size, with_shared_expert
from mrl.model.qwen3_5 import PRECISE, engines_of, is_left_out, of_kinds
from mrl.model.qwen3_next import FAMILY as QWEN3_NEXT
from mrl.model.qwen3_next import PREDICTING_NAMES
from mrl.model.weight_map import Family
from mrl.model.wrapped import inner_tensors

_ARCHITECTURE = "Qwen3_5MoeForCausalLM"


def read(config: HfConfig) -> ModelSpec:
    # transformers always makes them sum to one, vLLM reads the key
    refuse_unless("norm_topk_prob", config.get("norm_topk_prob", True), True)
    # no layer is dense
    of_experts: dict[str, Any] = {
        "norm_topk_prob": True,
        "intermediate_size": required(config, "moe_intermediate_size"),
    }
    config = {**of_experts, **config}
    return ModelSpec(
        **of_kinds(config, FAMILY.model_type),
        **experts(config),
        shared_expert_intermediate_size=shared_size(config),
    )


FAMILY = Family(
    _ARCHITECTURE,
    "qwen3_5_moe_text",
    read,
    dense_layer,
    with_shared_expert,
    lambda m: with_shared_expert(m, is_linear=True),
    megatron_order=QWEN3_NEXT.megatron_order,
    vllm_order=QWEN3_NEXT.vllm_order,
    predicting=PREDICTING_NAMES,
    is_left_out=is_left_out,
    engine_keys=engines_of(_ARCHITECTURE),
    wrapper="Qwen3_5MoeForConditionalGeneration",
    seeing="SeeingQwen3_5Moe",
    inside=inner_tensors,
    rounded=PRECISE,
)
