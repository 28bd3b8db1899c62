"""DeepSeek-V3 and its relatives (DeepSeek-R1, Moonlight, Kimi-K2): latent attention, dense layers first, then routed
experts beside shared ones. Kimi-K2 has its own model type but is the same model.

Routers choose as GLM-4.5's do, by a sigmoid and constants. They may choose only from the best groups of experts, those
whose two best experts have the highest sum. A checkpoint's layers for multi-token prediction come last, and training
leaves them out.

Norms of latents use `rms_norm_eps`, as in Megatron and vLLM. transformers always uses 1e-6, which differs for
Moonlight: its config.json says 1e-5.
"""

from typing import Any

from mrl.errors import ConfigError
from mrl.model.decoder_weights import dense_layer
from mrl.model.glm4_moe import is_left_out, left_out_layers, with_shared_experts
from mrl.model.hf_config import (
    HfConfig,
    ModelSpec,
    common,
    refuse_tied,
    refuse_unless,
    required,
)
from mrl.model.latent_attention import VLLM_LATENT_ATTENTION
from mrl.model.weight_map import DEEPSEEK_NAMES, VLLM_NORMS, Family

VLLM_ORDER = (*VLLM_LATENT_ATTENTION, "mlp.gate.", "mlp.shared_experts.", "mlp.", *VLLM_NORMS)
_PLAIN = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "moe_router_dtype": None,  # vLLM would route in it
    "llama_4_scaling": None,
    "rswa_window": None,
    "compress_ratios": None,
}
_GROUP_BEST = 2  # experts by which a group is judged


def read(config: HfConfig) -> ModelSpec:
    if "index_topk" in config:
        raise ConfigError(
            "config.json has index_topk: attention through a sparse indexer (DeepSeek-V3.2, GLM-5) is not supported; "
            "without its indexer it would be another model"
        )
    refuse_tied(config)
    experts_per_token, groups, chosen = _routing(config)
    size = required(config, "moe_intermediate_size")
    rotated = required(config, "qk_rope_head_dim")
    read_alike = common(config, head_dim=rotated, is_latent=True, **_PLAIN)
    heads = read_alike["num_attention_heads"]
    if read_alike["num_key_value_heads"] != heads:
        refuse_unless("num_key_value_heads", read_alike["num_key_value_heads"], f"num_attention_heads, {heads}")
    _refuse_other_head_dim(config, rotated)
    return ModelSpec(
        **read_alike | {"family": "deepseek_v3" if config["model_type"] == "kimi_k2" else config["model_type"]},
        head_dim=required(config, "qk_nope_head_dim") + rotated,
        qkv_bias=False,
        qk_norm=False,
        num_experts=required(config, "n_routed_experts", "num_local_experts"),
        num_experts_per_tok=experts_per_token,
        moe_intermediate_size=size,
        moe_layers=_moe_layers(config),
        shared_expert_intermediate_size=size * (config.get("n_shared_experts") or 0),
        norm_topk_prob=True,
        router_score="sigmoid",
        routed_scaling_factor=float(required(config, "routed_scaling_factor")),
        left_out_layers=left_out_layers(config),
        kv_lora_rank=required(config, "kv_lora_rank"),
        q_lora_rank=_query_latent(config),
        qk_rope_head_dim=rotated,
        v_head_dim=required(config, "v_head_dim"),
        expert_groups=groups,
        chosen_expert_groups=chosen,
    )


def _query_latent(config: HfConfig) -> int:
    """Returns the size of the queries' latent; 0 for null. Without the key, transformers takes another model's size."""
    if "q_lora_rank" not in config:
        return required(config, "q_lora_rank")
    return config["q_lora_rank"] or 0


def _refuse_other_head_dim(config: HfConfig, rotated: int) -> None:
    """Raises ConfigError for a head_dim that replaces the rotated part of a head, qk_rope_head_dim, in transformers.

    vLLM mends it where it equals the other part.
    """
    head_dim = config.get("head_dim", rotated)
    if head_dim not in (rotated, config.get("qk_nope_head_dim")):
        refuse_unless("head_dim", head_dim, f"qk_rope_head_dim, {rotated}")
    whole = rotated + required(config, "qk_nope_head_dim")
    refuse_unless("qk_head_dim beside qk_nope_head_dim", config.get("qk_head_dim", whole), whole)


def _routing(config: HfConfig) -> tuple[int, int, int]:
    """Returns (experts of a token, groups, chosen groups). Raises ConfigError for a router that Megatron lacks."""
    experts = required(config, "num_experts_per_tok")
    if experts == 1:
        # Megatron does not renormalise the weight of a single expert
        refuse_unless("num_experts_per_tok", 1, "2 or more")
    if not config.get("n_shared_experts"):
        refuse_unless("n_shared_experts", config.get("n_shared_experts"), "1 or more")
    groups = required(config, "n_group")
    chosen = required(config, "topk_group")  # engines take another number than 1 where there is none
    if groups == 1:
        refuse_unless("topk_group", chosen, 1)
        return experts, 1, 1
    if experts // chosen != _GROUP_BEST:  # Megatron judges a group by this number of its experts
        refuse_unless("topk_group", chosen, f"half of num_experts_per_tok = {experts}")
    if chosen > groups:
        refuse_unless("topk_group", chosen, f"at most n_group = {groups}")
    routed = required(config, "n_routed_experts", "num_local_experts")
    if routed % groups or routed // groups * chosen < experts:
        least = -(-experts // chosen)  # of a group's experts, so that the chosen groups have enough
        refuse_unless("n_group", groups, f"a divisor of n_routed_experts = {routed} with {least} or more in a group")
    return experts, groups, chosen


def _moe_layers(config: HfConfig) -> tuple[int, ...]:
    """Returns the numbers of layers with experts. transformers lists the kinds of GLM-4.7-Flash's layers."""
    layers = required(config, "num_hidden_layers")
    kinds = config.get("mlp_layer_types")
    if kinds and config.get("first_k_dense_replace") is None:
        first = kinds.count("dense")
    else:
        first = required(config, "first_k_dense_replace")
    if kinds:
        refuse_unless("mlp_layer_types", kinds, ["dense"] * first + ["sparse"] * (layers - first))
    # a model without experts might be split over tensor ranks without sequence parallelism; none is known
    if first >= layers:
        refuse_unless("first_k_dense_replace", first, f"less than num_hidden_layers = {layers}")
    return tuple(range(first, layers))


def engine_keys(m: ModelSpec) -> dict[str, Any]:
    """Returns keys without which vLLM would use a softmax, routers without constants, or no experts."""
    return {
        "scoring_func": m.router_score,
        "topk_method": "noaux_tc",
        "first_k_dense_replace": m.moe_layers[0],
        "moe_layer_freq": 1,
    }


FAMILY = Family(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    read,
    dense_layer,
    lambda m: with_shared_experts(m, router_in_vllm=None),
    vllm_order=VLLM_ORDER,
    predicting=DEEPSEEK_NAMES,
    is_left_out=is_left_out,
    engine_keys=engine_keys,
    has_code_beside=True,
)
