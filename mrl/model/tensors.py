"""ModelSpec -> the tensors of its Hugging Face checkpoint: names and shapes, in the order of the layers."""

from collections.abc import Iterator
from functools import cache

from mrl.model.spec import Kind, ModelSpec, TensorSpec

_Named = tuple[str, tuple[int, ...], Kind]


@cache
def tensor_specs(model: ModelSpec) -> tuple[TensorSpec, ...]:
    """All tensors. Tied embeddings are one tensor (`model.embed_tokens.weight`), as in the checkpoint files."""
    embedding = (model.vocab_size, model.hidden_size)
    specs = [TensorSpec("model.embed_tokens.weight", embedding, model.dtype, "embedding")]
    for layer in range(model.num_layers):
        specs += _layer(model, layer)
    specs.append(TensorSpec("model.norm.weight", (model.hidden_size,), model.dtype, "norm"))
    if not model.tie_word_embeddings:
        specs.append(TensorSpec("lm_head.weight", embedding, model.dtype, "lm_head"))
    return tuple(specs)


def _layer(model: ModelSpec, layer: int) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{layer}."
    dense = [*_norms(model), *_attention(model), *(_moe_block(model) if layer in model.moe_layers else _mlp(model))]
    for name, shape, kind in dense:
        yield TensorSpec(prefix + name, shape, model.dtype, kind, layer)
    for expert in range(model.num_experts if layer in model.moe_layers else 0):
        for name, shape, kind in _expert(model, expert):
            yield TensorSpec(prefix + name, shape, model.dtype, kind, layer, expert)


def _norms(m: ModelSpec) -> Iterator[_Named]:
    yield "input_layernorm.weight", (m.hidden_size,), "norm"
    yield "post_attention_layernorm.weight", (m.hidden_size,), "norm"


def _attention(m: ModelSpec) -> Iterator[_Named]:
    q, kv = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
    yield "self_attn.q_proj.weight", (q, m.hidden_size), "q_weight"
    yield "self_attn.k_proj.weight", (kv, m.hidden_size), "k_weight"
    yield "self_attn.v_proj.weight", (kv, m.hidden_size), "v_weight"
    if m.qkv_bias:
        yield "self_attn.q_proj.bias", (q,), "q_bias"
        yield "self_attn.k_proj.bias", (kv,), "k_bias"
        yield "self_attn.v_proj.bias", (kv,), "v_bias"
    if m.qk_norm:
        yield "self_attn.q_norm.weight", (m.head_dim,), "qk_norm"
        yield "self_attn.k_norm.weight", (m.head_dim,), "qk_norm"
    yield "self_attn.o_proj.weight", (m.hidden_size, q), "attention_out"


def _mlp(m: ModelSpec) -> Iterator[_Named]:
    yield "mlp.gate_proj.weight", (m.intermediate_size, m.hidden_size), "mlp_gate"
    yield "mlp.up_proj.weight", (m.intermediate_size, m.hidden_size), "mlp_up"
    yield "mlp.down_proj.weight", (m.hidden_size, m.intermediate_size), "mlp_down"


def _moe_block(m: ModelSpec) -> Iterator[_Named]:
    yield "mlp.gate.weight", (m.num_experts, m.hidden_size), "router"
    if shared := m.shared_expert_intermediate_size:
        yield "mlp.shared_expert.gate_proj.weight", (shared, m.hidden_size), "shared_gate"
        yield "mlp.shared_expert.up_proj.weight", (shared, m.hidden_size), "shared_up"
        yield "mlp.shared_expert.down_proj.weight", (m.hidden_size, shared), "shared_down"
        yield "mlp.shared_expert_gate.weight", (1, m.hidden_size), "shared_router"


def _expert(m: ModelSpec, expert: int) -> Iterator[_Named]:
    prefix = f"mlp.experts.{expert}."
    yield prefix + "gate_proj.weight", (m.moe_intermediate_size, m.hidden_size), "expert_gate"
    yield prefix + "up_proj.weight", (m.moe_intermediate_size, m.hidden_size), "expert_up"
    yield prefix + "down_proj.weight", (m.hidden_size, m.moe_intermediate_size), "expert_down"
