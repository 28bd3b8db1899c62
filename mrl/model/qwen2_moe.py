"""Qwen1.5-MoE and Qwen2-MoE: routed experts, and one shared expert with a scalar gate on its output."""

from mrl.model.decoder_weights import dense_layer, expert_layer, gated_mlp
from mrl.model.hf_config import ANY, HfConfig, ModelSpec, common, derived_head_dim, experts, refuse_unless, required
from mrl.model.weight_map import VLLM_ATTENTION, VLLM_NORMS, Family, Weight, copied


def read(config: HfConfig) -> ModelSpec:
    return ModelSpec(
        # vLLM's class has the biases whatever the key says
        **common(config, sliding_window=ANY, qkv_bias=True),
        **experts(config),
        head_dim=derived_head_dim(config),
        qkv_bias=True,
        qk_norm=False,
        shared_expert_intermediate_size=shared_size(config),
    )


def shared_size(config: HfConfig) -> int:
    """Returns the size of the shared expert. Raises ConfigError for 0: vLLM's class would keep its gate."""
    size = required(config, "shared_expert_intermediate_size")
    if size == 0:
        refuse_unless("shared_expert_intermediate_size", size, "1 or more")
    return size


def with_shared_expert(m: ModelSpec, is_linear: bool = False) -> tuple[Weight, ...]:
    """Returns a layer with routed experts, the shared expert and its gate. `is_linear`: with gated delta attention."""
    if not m.shared_expert_intermediate_size:
        return expert_layer(m, is_linear=is_linear)
    shared = gated_mlp(m, m.shared_expert_intermediate_size, "mlp.shared_expert.", "mlp.shared_experts.")
    gate = copied("mlp.shared_expert_gate.weight", (1, m.hidden_size), "mlp.shared_experts.gate_weight", matmul=True)
    return expert_layer(m, (*shared, gate), is_linear=is_linear)


FAMILY = Family(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    read,
    dense_layer,
    with_shared_expert,
    vllm_order=(*VLLM_ATTENTION, "mlp.gate.", "mlp.shared_expert_gate.", "mlp.", *VLLM_NORMS),
)
