"""Rows of the weight map that families share: norms, grouped-query attention, gated MLPs, routed experts.

Checkpoint names are those of transformers' Qwen models. Megatron's are those of megatron-core 0.16.1 GPT models with
Transformer Engine's module names, which mbridge 0.15.1 maps. The norm before a fused linear layer belongs to that layer
(`linear_qkv.layer_norm_weight`). vLLM's are those of its 0.32 models.
"""

from dataclasses import dataclass, replace

from mrl.model.delta_attention import delta_attention
from mrl.model.hf_config import ModelSpec
from mrl.model.latent_attention import latent_attention
from mrl.model.weight_map import Part, Weight, copied


@dataclass(frozen=True)
class Experts:
    """Names of a layer's experts in the checkpoint. `module` is that of router and experts, here and in vLLM."""

    module: str = "mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


PLAIN_EXPERTS = Experts()


def no_dense_layer(m: ModelSpec) -> tuple[Weight, ...]:
    """Returns nothing, for families whose layers all have experts."""
    return ()


def dense_layer(m: ModelSpec, is_linear: bool = False) -> tuple[Weight, ...]:
    """Returns a layer with one MLP; with gated delta attention if `is_linear`."""
    norms = layer_norms(m, "mlp.linear_fc1.layer_norm_weight", is_linear)
    return (*norms, *_attending(m, is_linear), *gated_mlp(m, m.intermediate_size))


def expert_layer(
    m: ModelSpec,
    shared: tuple[Weight, ...] = (),
    router_in_vllm: str | None = None,
    is_linear: bool = False,
    experts: Experts = PLAIN_EXPERTS,
) -> tuple[Weight, ...]:
    """Returns a layer with a router and routed experts.

    `shared`: weights of experts that every token uses. `router_in_vllm`: vLLM's dtype of the router, if it is not the
    engine's. `is_linear`: with gated delta attention. `experts`: names of router and experts.
    """
    gate = replace(router(m, experts), vllm_dtype=router_in_vllm)
    norms = layer_norms(m, "pre_mlp_layernorm.weight", is_linear)
    return (*norms, *_attending(m, is_linear), gate, *shared, *routed_experts(m, experts))


def _attending(m: ModelSpec, is_linear: bool) -> tuple[Weight, ...]:
    if is_linear:
        return delta_attention(m)
    return attention(m)


def layer_norms(m: ModelSpec, megatron_mlp_norm: str, is_linear: bool = False) -> tuple[Weight, ...]:
    """Returns the norms before attention and before the MLP.

    Latent and gated delta attention begin with two projections, so their norm belongs to neither.
    """
    before_attention = "self_attention.linear_qkv.layer_norm_weight"
    if m.is_latent or is_linear:
        before_attention = "input_layernorm.weight"
    return (
        copied("input_layernorm.weight", (m.hidden_size,), before_attention),
        copied("post_attention_layernorm.weight", (m.hidden_size,), megatron_mlp_norm),
    )


def attention(m: ModelSpec) -> tuple[Weight, ...]:
    """Returns query, key and value projections and the output projection.

    They may have biases, gates of the output, or norms on queries and keys.
    """
    if m.is_latent:
        return latent_attention(m)
    queries = m.num_attention_heads * m.head_dim
    out = Part("self_attn.o_proj.weight", (m.hidden_size, queries))
    return (
        _qkv(m, "weight", (m.hidden_size,)),
        *([_qkv(m, "bias", ())] if m.qkv_bias else []),
        *(_head_norms(m) if m.qk_norm else ()),
        Weight((out,), "self_attention.linear_proj.weight", "self_attn.o_proj.weight", "columns"),
    )


def _head_norms(m: ModelSpec) -> tuple[Weight, ...]:
    """Returns the norms of queries and keys: each for one head, or one for all heads together."""
    sizes = {"q": m.head_dim, "k": m.head_dim}
    if m.wide_qk_norm:
        sizes = {"q": m.num_attention_heads * m.head_dim, "k": m.num_key_value_heads * m.head_dim}
    return tuple(
        copied(f"self_attn.{x}_norm.weight", (size,), f"self_attention.{x}_layernorm.weight")
        for x, size in sizes.items()
    )


def _qkv(m: ModelSpec, leaf: str, columns: tuple[int, ...]) -> Weight:
    queries = m.num_attention_heads * (1 + m.attn_output_gate)
    heads = {"q": queries, "k": m.num_key_value_heads, "v": m.num_key_value_heads}
    parts = tuple(
        Part(f"self_attn.{x}_proj.{leaf}", (n * m.head_dim, *columns), leaf == "weight") for x, n in heads.items()
    )
    megatron = f"self_attention.linear_qkv.{leaf}"
    vllm = f"self_attn.qkv_proj.{leaf}"
    return Weight(parts, megatron, vllm, "heads", groups=m.num_key_value_heads, is_gated=m.attn_output_gate)


def gated_mlp(m: ModelSpec, size: int, hf: str = "mlp.", megatron: str = "mlp.") -> tuple[Weight, ...]:
    """Returns the fused gate and up projection to `size`, and the down projection. vLLM uses the checkpoint's name."""
    gate_up, down = _gated_parts(m, size, hf)
    return (
        Weight(gate_up, f"{megatron}linear_fc1.weight", f"{hf}gate_up_proj.weight", "rows"),
        Weight(down, f"{megatron}linear_fc2.weight", f"{hf}down_proj.weight", "columns"),
    )


def routed_experts(m: ModelSpec, names: Experts = PLAIN_EXPERTS) -> tuple[Weight, ...]:
    """Returns the gated MLPs of all experts."""
    size = m.moe_intermediate_size
    prefix = f"{names.module}experts.{{expert}}."
    gate_up = tuple(Part(f"{prefix}{x}.weight", (size, m.hidden_size)) for x in (names.gate, names.up))
    down = (Part(f"{prefix}{names.down}.weight", (m.hidden_size, size)),)
    megatron = "mlp.experts.linear_"
    vllm = f"{names.module}experts.routed_experts."
    return (
        Weight(gate_up, f"{megatron}fc1.weight{{expert}}", f"{vllm}w13_weight", "rows", is_expert=True),
        Weight(down, f"{megatron}fc2.weight{{expert}}", f"{vllm}w2_weight", "columns", is_expert=True),
    )


def _gated_parts(m: ModelSpec, size: int, hf: str) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Returns (gate and up, down)."""
    gate_up = tuple(Part(f"{hf}{x}_proj.weight", (size, m.hidden_size)) for x in ("gate", "up"))
    return gate_up, (Part(f"{hf}down_proj.weight", (m.hidden_size, size)),)


def router(m: ModelSpec, names: Experts = PLAIN_EXPERTS) -> Weight:
    """Returns the weight that scores all experts."""
    return copied(f"{names.module}gate.weight", (m.num_experts, m.hidden_size), "mlp.router.weight", matmul=True)
