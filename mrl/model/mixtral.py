"""Mixtral: Mistral's attention, and routed experts in every layer under names of their own."""

from mrl.model.decoder_weights import Experts, expert_layer, no_dense_layer
from mrl.model.hf_config import HfConfig, ModelSpec, common, own_head_dim, required
from mrl.model.weight_map import MEGATRON_ORDER, VLLM_ATTENTION, VLLM_NORMS, Family

# the names of experts, which MiniMax-M2 has, too
BLOCK_SPARSE = Experts("block_sparse_moe.", gate="w1", up="w3", down="w2")
_EXPERTS_LAST = ("block_sparse_moe.gate.", "block_sparse_moe.")
MEGATRON_BLOCK_SPARSE = (*MEGATRON_ORDER, *_EXPERTS_LAST)


def read(config: HfConfig) -> ModelSpec:
    layers = required(config, "num_hidden_layers")
    return ModelSpec(
        # transformers' training mode alone would add noise to routers
        **common(config, head_dim=own_head_dim(config), router_jitter_noise=0.0),
        head_dim=own_head_dim(config),
        qkv_bias=False,
        qk_norm=False,
        num_experts=required(config, "num_local_experts", "num_experts"),
        num_experts_per_tok=required(config, "num_experts_per_tok"),
        moe_intermediate_size=required(config, "intermediate_size"),
        moe_layers=tuple(range(layers)),
        norm_topk_prob=True,
    )


FAMILY = Family(
    "MixtralForCausalLM",
    "mixtral",
    read,
    no_dense_layer,
    lambda m: expert_layer(m, experts=BLOCK_SPARSE),
    megatron_order=MEGATRON_BLOCK_SPARSE,
    vllm_order=(*VLLM_ATTENTION, *_EXPERTS_LAST, *VLLM_NORMS),
)
