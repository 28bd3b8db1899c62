"""GLM-4.5 MoE: dense layers first, then routed experts beside ungated shared ones.

Routers score experts by a sigmoid. They choose by that score plus a float32 constant of each expert
(`e_score_correction_bias`). Pretraining has tuned it, and it never changes. A checkpoint's layers for multi-token
prediction come last. transformers, vLLM's model and training leave them out.
"""

import re

from mrl.model.decoder_weights import dense_layer, expert_layer, gated_mlp
from mrl.model.hf_config import (
    ANY,
    MTP_KEYS,
    HfConfig,
    ModelSpec,
    common,
    head_dim_from_hidden,
    refuse_tied,
    refuse_unless,
    required,
)
from mrl.model.weight_map import DEEPSEEK_NAMES, VLLM_ATTENTION, VLLM_NORMS, Family, Part, Weight

_PLAIN = {
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,  # Megatron's sigmoid router always does it, but never for one expert
    "attention_bias": ANY,  # here of queries, keys and values alone: qkv_bias
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
COPIES = (".embed_tokens.weight", ".shared_head.head.weight")  # of embedding and output layer, in predicting layers


def read(config: HfConfig) -> ModelSpec:
    refuse_tied(config)
    # mbridge builds biases whatever it says
    refuse_unless("attention_bias", bool(config.get("attention_bias", False)), True)
    experts_per_token = required(config, "num_experts_per_tok")
    if experts_per_token == 1:
        refuse_unless("num_experts_per_tok", 1, "2 or more")
    layers = required(config, "num_hidden_layers")
    size = required(config, "moe_intermediate_size")
    return ModelSpec(
        **common(config, rotary_share=0.5, **_PLAIN),
        head_dim=head_dim_from_hidden(config),
        qkv_bias=True,
        qk_norm=bool(required(config, "use_qk_norm")),
        num_experts=required(config, "n_routed_experts", "num_local_experts"),
        num_experts_per_tok=experts_per_token,
        moe_intermediate_size=size,
        moe_layers=tuple(range(required(config, "first_k_dense_replace"), layers)),
        shared_expert_intermediate_size=size * required(config, "n_shared_experts"),
        norm_topk_prob=True,
        router_score="sigmoid",
        routed_scaling_factor=float(required(config, "routed_scaling_factor")),
        left_out_layers=left_out_layers(config),
    )


def left_out_layers(config: HfConfig) -> int:
    """Returns the number of layers for multi-token prediction, under any of their names."""
    return next((required(config, key) for key in MTP_KEYS if key in config), 0)


def with_shared_experts(m: ModelSpec, router_in_vllm: str | None = "float32") -> tuple[Weight, ...]:
    """Returns a layer with routed experts, the constants for their choice, and the shared experts.

    `router_in_vllm`: vLLM's dtype of the router, if it is not the engine's.
    """
    shared = gated_mlp(m, m.shared_expert_intermediate_size, "mlp.shared_experts.", "mlp.shared_experts.")
    return expert_layer(m, (_correction(m), *shared), router_in_vllm)


def _correction(m: ModelSpec) -> Weight:
    part = Part("mlp.gate.e_score_correction_bias", (m.num_experts,), matmul=False)
    return Weight((part,), "mlp.router.expert_bias", part.name, "copied", dtype="float32", is_constant=True)


def is_left_out(name: str, m: ModelSpec) -> bool:
    """Tells whether a tensor belongs to layers for multi-token prediction that ranks do not hold, or is a copy of the
    embedding or output layer in one.
    """
    layer = _LAYER.match(name)
    if layer is None or int(layer[1]) < m.num_layers:
        return False
    return int(layer[1]) >= m.all_layers or name.endswith(COPIES)


FAMILY = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    read,
    dense_layer,
    with_shared_experts,
    vllm_order=(*VLLM_ATTENTION, "mlp.gate.", "mlp.shared_experts.", "mlp.", *VLLM_NORMS),
    predicting=DEEPSEEK_NAMES,
    is_left_out=is_left_out,
)
