"""Parameter and FLOP counts of a model, from its tensor list."""

from mrl.model.spec import Kind, ModelSpec, TensorSpec
from mrl.model.tensors import tensor_specs

# read by index or multiplied elementwise, not by a matrix product
_NO_MATMUL: frozenset[Kind] = frozenset({"embedding", "norm", "qk_norm", "q_bias", "k_bias", "v_bias"})


def parameter_count(model: ModelSpec) -> int:
    """All parameters; tied embeddings count once."""
    return sum(t.numel for t in tensor_specs(model))


def active_parameter_count(model: ModelSpec) -> int:
    """Parameters that one token uses: all but the experts that it is not routed to (embeddings included, as model cards count)."""
    return sum(_active_numel(model, t) for t in tensor_specs(model))


def forward_flops_per_token(model: ModelSpec, context: float) -> float:
    """Floating-point operations (a multiply-add is two) of one token's forward pass.

    `context`: mean number of positions that a token attends to, itself included: (length + 1) / 2 for a causal sequence, not the
    whole length, since the masked half need not be computed. Counted are matrix products and attention; a backward pass costs twice
    as much.
    """
    matmul = sum(_active_numel(model, t) for t in tensor_specs(model) if t.kind not in _NO_MATMUL)
    if model.tie_word_embeddings:
        matmul += model.vocab_size * model.hidden_size
    scores_and_values = 2 * model.num_attention_heads * model.head_dim * context * model.num_layers
    return 2.0 * (matmul + scores_and_values)


def _active_numel(model: ModelSpec, tensor: TensorSpec) -> int:
    if tensor.expert is None:
        return tensor.numel
    # which expert is active is not known, only how many: count the first ones
    return tensor.numel if tensor.expert < model.num_experts_per_tok else 0
