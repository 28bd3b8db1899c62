"""OLMoE: routed experts in every layer. One norm goes over the queries of all heads together, another over the keys."""

from mrl.model.decoder_weights import expert_layer, no_dense_layer
from mrl.model.hf_config import (
    HfConfig,
    ModelSpec,
    common,
    own_head_dim,
    refuse_tied,
    refuse_uneven_heads,
    refuse_unless,
    required,
)
from mrl.model.weight_map import VLLM_NORMS, Family

_EPSILON = 1e-5  # of all norms of vLLM's class, whatever the configuration says


def read(config: HfConfig) -> ModelSpec:
    refuse_tied(config)
    refuse_uneven_heads(config)
    heads = required(config, "num_attention_heads")
    size = required(config, "hidden_size") // heads
    refuse_unless("head_dim beside hidden_size and num_attention_heads", own_head_dim(config), size)
    refuse_unless("rms_norm_eps", required(config, "rms_norm_eps"), _EPSILON)
    # vLLM's class never makes them sum to one
    refuse_unless("norm_topk_prob", required(config, "norm_topk_prob"), False)
    return ModelSpec(
        **common(config, head_dim=size, clip_qkv=None),
        head_dim=size,
        qkv_bias=False,
        qk_norm=True,
        wide_qk_norm=True,
        num_experts=required(config, "num_experts", "num_local_experts"),
        num_experts_per_tok=required(config, "num_experts_per_tok"),
        moe_intermediate_size=required(config, "intermediate_size"),
        moe_layers=tuple(range(required(config, "num_hidden_layers"))),
        norm_topk_prob=False,
    )


FAMILY = Family(
    "OlmoeForCausalLM",
    "olmoe",
    read,
    no_dense_layer,
    expert_layer,
    vllm_order=("self_attn.q_proj.", "self_attn.q_norm.", "self_attn.k_norm.", "self_attn.o_proj.", "self_attn.",
                "mlp.gate.", "mlp.", *VLLM_NORMS),
)  # fmt: skip
