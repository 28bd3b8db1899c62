"""Rows of the weight map for multi-head latent attention (MLA, arXiv:2405.04434).

A token's keys and values are made from one latent vector, and its queries may be, too. Down projections make the
latents and are replicated on every tensor rank. Up projections and the output projection are split by heads. If queries
have a latent, vLLM stacks both down projections in one parameter.

    checkpoint                     Megatron                          vLLM
    q_a_proj                       linear_q_down_proj                fused_qkv_a_proj, first rows
    kv_a_proj_with_mqa             linear_kv_down_proj               fused_qkv_a_proj, the other rows
    q_a_layernorm, q_b_proj        linear_q_up_proj (with norm)      q_a_layernorm, q_b_proj
    kv_a_layernorm, kv_b_proj      linear_kv_up_proj (with norm)     kv_a_layernorm, kv_b_proj

If queries have no latent, the first and third row are `q_proj`, `linear_q_proj` and `q_proj`. Then vLLM's down
projection has the checkpoint's name.
"""

from mrl.model.hf_config import ModelSpec
from mrl.model.weight_map import Part, Weight, copied

# the order in which vLLM registers the modules of this attention
VLLM_LATENT_ATTENTION = (
    "self_attn.q_a_proj.",
    "self_attn.kv_a_proj_with_mqa.",
    "self_attn.q_a_layernorm.",
    "self_attn.q_b_proj.",
    "self_attn.q_proj.",
    "self_attn.kv_a_layernorm.",
    "self_attn.kv_b_proj.",
    "self_attn.o_proj.",
)


def latent_attention(m: ModelSpec) -> tuple[Weight, ...]:
    """Returns the down and up projections of a layer with their norms, and the output projection."""
    heads = m.num_attention_heads
    latent = m.kv_lora_rank
    down = Part("self_attn.kv_a_proj_with_mqa.weight", (latent + m.qk_rope_head_dim, m.hidden_size))
    norm = copied("self_attn.kv_a_layernorm.weight", (latent,), "self_attention.linear_kv_up_proj.layer_norm_weight")
    up = Part("self_attn.kv_b_proj.weight", (heads * (m.qk_nope_head_dim + m.v_head_dim), latent))
    out = Part("self_attn.o_proj.weight", (m.hidden_size, heads * m.v_head_dim))
    return (
        *_queries(m),
        Weight((down,), "self_attention.linear_kv_down_proj.weight", _down_in_vllm(m, down), "copied"),
        norm,
        Weight((up,), "self_attention.linear_kv_up_proj.weight", up.name, "rows"),
        Weight((out,), "self_attention.linear_proj.weight", out.name, "columns"),
    )


def _queries(m: ModelSpec) -> tuple[Weight, ...]:
    rows = m.num_attention_heads * m.head_dim
    if not m.q_lora_rank:
        whole = Part("self_attn.q_proj.weight", (rows, m.hidden_size))
        return (Weight((whole,), "self_attention.linear_q_proj.weight", whole.name, "rows"),)
    down = Part("self_attn.q_a_proj.weight", (m.q_lora_rank, m.hidden_size))
    up = Part("self_attn.q_b_proj.weight", (rows, m.q_lora_rank))
    norm = "self_attention.linear_q_up_proj.layer_norm_weight"
    return (
        Weight((down,), "self_attention.linear_q_down_proj.weight", _down_in_vllm(m, down), "copied"),
        copied("self_attn.q_a_layernorm.weight", (m.q_lora_rank,), norm),
        Weight((up,), "self_attention.linear_q_up_proj.weight", up.name, "rows"),
    )


def _down_in_vllm(m: ModelSpec, down: Part) -> str:
    if m.q_lora_rank:
        return "self_attn.fused_qkv_a_proj.weight"
    return down.name
