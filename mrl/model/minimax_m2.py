"""MiniMax-M2: routed experts in every layer, under Mixtral's names. One norm goes over the queries of all heads
together, another over the keys; a part of each head is rotated.

Routers choose as GLM-4.5's do, by a sigmoid and constants in float32.
"""

from dataclasses import replace
from typing import Any

from mrl.model.decoder_weights import expert_layer, no_dense_layer
from mrl.model.glm4_moe import is_left_out
from mrl.model.hf_config import (
    ANY,
    HfConfig,
    ModelSpec,
    common,
    or_default,
    refuse_tied,
    refuse_unless,
    required,
)
from mrl.model.mixtral import BLOCK_SPARSE, MEGATRON_BLOCK_SPARSE
from mrl.model.weight_map import VLLM_NORMS, Family, Part, Weight

_PLAIN = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "qk_norm": ANY,
    "shared_intermediate_size": 0,
    "router_jitter_noise": 0.0,
    "attn_type_list": ANY,
}
_HEAD_DIM = 128


def read(config: HfConfig) -> ModelSpec:
    refuse_tied(config)
    layers = required(config, "num_hidden_layers")
    kinds = or_default(config, "attn_type_list", [1] * layers)
    refuse_unless("attn_type_list", kinds, [1] * layers)
    experts_per_token = required(config, "num_experts_per_tok")
    if experts_per_token == 1:
        # Megatron does not renormalise the weight of a single expert
        refuse_unless("num_experts_per_tok", 1, "2 or more")
    size = required(config, "head_dim")
    rotated = required(config, "rotary_dim")  # vLLM's class reads it, too
    if rotated not in range(2, size + 1, 2):
        refuse_unless("rotary_dim", rotated, f"an even number from 2 to head_dim = {size}")
    return ModelSpec(
        **common(config, head_dim=size, rotary_share=rotated / size, **_PLAIN),
        head_dim=size,
        qkv_bias=False,
        qk_norm=True,
        wide_qk_norm=True,
        num_experts=required(config, "num_local_experts", "num_experts"),
        num_experts_per_tok=experts_per_token,
        moe_intermediate_size=required(config, "intermediate_size"),
        moe_layers=tuple(range(layers)),
        norm_topk_prob=True,
        router_score="sigmoid",
    )


def _layer(m: ModelSpec) -> tuple[Weight, ...]:
    part = Part("block_sparse_moe.e_score_correction_bias", (m.num_experts,), matmul=False)
    constants = Weight((part,), "mlp.router.expert_bias", part.name, "copied", dtype="float32", is_constant=True)
    rows = expert_layer(m, (constants,), "float32", experts=BLOCK_SPARSE)
    return tuple(_cut_norm(row, m.num_key_value_heads) for row in rows)


def _cut_norm(weight: Weight, key_heads: int) -> Weight:
    """Returns a row with vLLM's way of cutting it: norms of queries and keys are cut as the heads are."""
    match weight.megatron:
        case "self_attention.q_layernorm.weight":
            return replace(weight, vllm_split="rows")
        case "self_attention.k_layernorm.weight":
            return replace(weight, vllm_split="key heads", groups=key_heads)
    return weight


def engine_keys(m: ModelSpec) -> dict[str, Any]:
    """Returns keys that vLLM's class needs and transformers' does not write."""
    return {"scoring_func": m.router_score, "use_routing_bias": True, "rotary_dim": m.rotated_head_dim}


FAMILY = Family(
    "MiniMaxM2ForCausalLM",
    "minimax_m2",
    read,
    no_dense_layer,
    _layer,
    megatron_order=MEGATRON_BLOCK_SPARSE,
    vllm_order=("self_attn.q_proj.", "self_attn.o_proj.", "self_attn.", "block_sparse_moe.e_score_correction_bias",
                "block_sparse_moe.experts.", "block_sparse_moe.gate.", *VLLM_NORMS),
    is_left_out=is_left_out,
    engine_keys=engine_keys,
    rounded=(".block_sparse_moe.gate.weight",),  # engines have them in float32, and files may, too
    has_code_beside=True,
)  # fmt: skip
