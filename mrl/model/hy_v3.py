"""Hy3 (Hunyuan 3): norms on queries and keys, routers with constants beside a sigmoid, and shared experts.

Its first layers are dense. vLLM reads four keys that transformers' class neither reads nor writes.
"""

from dataclasses import replace
from typing import Any

from mrl.model.decoder_weights import dense_layer, expert_layer, gated_mlp
from mrl.model.glm4_moe import is_left_out, left_out_layers
from mrl.model.hf_config import HfConfig, ModelSpec, common, refuse_unless, required
from mrl.model.weight_map import MEGATRON_ORDER, VLLM_ATTENTION, VLLM_NORMS, Family, Part, Weight

_PLAIN = {
    "mlp_bias": False,
    "qk_norm": True,
    "route_norm": True,
    "moe_router_use_sigmoid": True,
    "moe_router_enable_expert_bias": True,
}


def read(config: HfConfig) -> ModelSpec:
    experts_per_token = required(config, "num_experts_per_tok")
    if experts_per_token == 1:
        # Megatron does not renormalise the weight of a single expert
        refuse_unless("num_experts_per_tok", 1, "2 or more")
    shared = required(config, "num_shared_experts")
    if shared == 0:
        refuse_unless("num_shared_experts", 0, "1 or more")
    layers = required(config, "num_hidden_layers")
    size = required(config, "moe_intermediate_size")
    refuse_unless("expert_hidden_dim", config.get("expert_hidden_dim", size), size)  # vLLM's name of the same size
    dense = _dense_layers(config, layers)
    return ModelSpec(
        **common(config, head_dim=required(config, "head_dim"), **_PLAIN),
        head_dim=required(config, "head_dim"),
        qkv_bias=False,
        qk_norm=True,
        num_experts=required(config, "num_experts", "num_local_experts"),
        num_experts_per_tok=experts_per_token,
        moe_intermediate_size=size,
        moe_layers=tuple(range(dense, layers)),
        shared_expert_intermediate_size=size * shared,
        norm_topk_prob=True,
        router_score="sigmoid",
        routed_scaling_factor=float(required(config, "router_scaling_factor")),
        left_out_layers=left_out_layers(config),
    )


def _dense_layers(config: HfConfig, layers: int) -> int:
    """Returns the number of dense layers, which are the first ones. transformers reads a list, vLLM a number."""
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    dense = kinds.count("dense")
    refuse_unless("mlp_layer_types", kinds, ["dense"] * dense + ["sparse"] * (layers - dense))
    refuse_unless("first_k_dense_replace", config.get("first_k_dense_replace", dense), dense)
    if dense >= layers:
        refuse_unless("mlp_layer_types", kinds, "one sparse layer or more")
    return dense


def _expert_layer(m: ModelSpec) -> tuple[Weight, ...]:
    shared = gated_mlp(m, m.shared_expert_intermediate_size, "mlp.shared_mlp.", "mlp.shared_experts.")
    constants = Part("mlp.expert_bias", (m.num_experts,), matmul=False)
    correction = Weight(
        (constants,), "mlp.router.expert_bias", constants.name, "copied", dtype="float32", is_constant=True
    )
    rows = expert_layer(m, (correction, *shared), router_in_vllm="float32")
    return tuple(_renamed(row) for row in rows)


def _renamed(row: Weight) -> Weight:
    """Gives the router its name in the checkpoint."""
    if row.megatron != "mlp.router.weight":
        return row
    return replace(row, parts=(replace(row.parts[0], name="mlp.router.gate.weight"),))


def engine_keys(m: ModelSpec) -> dict[str, Any]:
    """Returns the keys that vLLM's class reads and transformers' has under other names, or not at all."""
    return {
        "qk_norm": True,
        "route_norm": True,
        "expert_hidden_dim": m.moe_intermediate_size,
        "first_k_dense_replace": m.moe_layers[0],
    }


FAMILY = Family(
    "HYV3ForCausalLM",
    "hy_v3",
    read,
    dense_layer,
    _expert_layer,
    megatron_order=(*MEGATRON_ORDER[:3], "mlp.router.", "mlp.expert_bias", "mlp.experts.", "mlp."),
    vllm_order=(*VLLM_ATTENTION, *VLLM_NORMS, "mlp.expert_bias", "mlp.router.", "mlp.shared_mlp.", "mlp."),
    is_left_out=is_left_out,
    engine_keys=engine_keys,
)
