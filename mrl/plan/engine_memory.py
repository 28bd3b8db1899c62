"""What a vLLM worker holds: weights, and the KV cache in what its share of the memory leaves.

Sources: vLLM 0.32 model_executor/layers/linear.py (queries divided over the tensor group, key/value heads repeated where there are fewer
of them than workers), vocab_parallel_embedding.py (rows padded to 64 before they are divided), v1/worker/gpu_worker.py (the cache gets
gpu_memory_utilization of the device less weights and the peak of a profiling run).
"""

from dataclasses import dataclass

from mrl.model import ModelSpec
from mrl.model.layout import RolloutLayout

_F32 = 4
_VOCABULARY_PADDING = 64
BLOCK = 16  # tokens of a cache block
GRAPHS = 1024**3  # bytes that captured graphs take beside the share (an estimate)


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one worker, and the tokens that fit."""

    weights: int
    working_set: int  # of the largest forward pass and the sampler (an estimate)
    cache: int
    cache_tokens: int  # of the whole engine: its tensor workers share a sequence, its data-parallel ranks do not
    largest_module: int  # bytes; what a weight sync holds beside its staging buffers

    @property
    def total(self) -> int:
        return self.weights + self.working_set + self.cache


def engine_memory(
    model: ModelSpec, rollout: RolloutLayout, share: int, *, dtype_bytes: int = 2, batched_tokens: int = 8192, max_num_seqs: int = 256
) -> EngineMemory:
    """`share`: bytes of the device that the engine may use (memory x gpu_memory_utilization). A cache of no token means: does not fit."""
    weights = worker_weights(model, rollout) * dtype_bytes
    working = _working_set(model, rollout, dtype_bytes, batched_tokens, max_num_seqs)
    return _with_cache(model, rollout, dtype_bytes, weights, working, max(0, share - weights - working))


def engine_memory_with_cache(model: ModelSpec, rollout: RolloutLayout, cache: int, *, dtype_bytes: int, **passes: int) -> EngineMemory:
    """The same where the bytes of the cache are given, as on a CPU."""
    working = _working_set(model, rollout, dtype_bytes, passes["batched_tokens"], passes["max_num_seqs"])
    return _with_cache(model, rollout, dtype_bytes, worker_weights(model, rollout) * dtype_bytes, working, cache)


def _with_cache(model: ModelSpec, rollout: RolloutLayout, dtype_bytes: int, weights: int, working: int, cache: int) -> EngineMemory:
    per_token = cache_bytes_per_token(model, rollout.tensor, dtype_bytes)
    tokens = cache // per_token // BLOCK * BLOCK * rollout.data
    return EngineMemory(weights, working, cache, tokens, _largest_module(model, rollout) * dtype_bytes)


def cache_bytes_per_token(model: ModelSpec, tensor: int, dtype_bytes: int) -> int:
    """Keys and values of one token in all layers, on one of `tensor` workers."""
    return model.num_layers * 2 * max(1, model.num_key_value_heads // tensor) * model.head_dim * dtype_bytes


def worker_weights(model: ModelSpec, rollout: RolloutLayout) -> int:
    """Elements of one worker's weights."""
    h, t = model.hidden_size, rollout.tensor
    moe = len(model.moe_layers)
    dense = model.num_layers - moe
    per_layer = _attention(model, t) + 2 * h
    total = model.num_layers * per_layer + dense * 3 * h * model.intermediate_size // t + h
    if moe:
        shared = model.shared_expert_intermediate_size
        total += moe * (_experts(model, rollout) + model.num_experts * h + 3 * h * shared // t + h * bool(shared))
    return total + (1 if model.tie_word_embeddings else 2) * _vocabulary_rows(model, t) * h


def _attention(m: ModelSpec, tensor: int) -> int:
    queries, groups = m.num_attention_heads // tensor, max(1, m.num_key_value_heads // tensor)
    rows = (queries + 2 * groups) * m.head_dim
    return rows * m.hidden_size + m.hidden_size * queries * m.head_dim + rows * m.qkv_bias + 2 * m.head_dim * m.qk_norm


def _experts(m: ModelSpec, rollout: RolloutLayout) -> int:
    """Of one layer: whole experts under expert parallelism, else a slice of each."""
    return 3 * m.hidden_size * m.moe_intermediate_size * m.num_experts // rollout.workers_per_engine


def _vocabulary_rows(m: ModelSpec, tensor: int) -> int:
    padded = -(-m.vocab_size // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
    return -(-padded // tensor)


def _largest_module(m: ModelSpec, rollout: RolloutLayout) -> int:
    sizes = [_vocabulary_rows(m, rollout.tensor) * m.hidden_size, _attention(m, rollout.tensor)]
    return max([*sizes, _experts(m, rollout) if m.is_moe else 0])


def _working_set(m: ModelSpec, rollout: RolloutLayout, dtype_bytes: int, batched_tokens: int, max_num_seqs: int) -> int:
    """Estimate: residual stream, projections and one MLP of the largest pass; logits of every sequence in float32, twice, for sampling."""
    inner = m.num_experts_per_tok * 2 * m.moe_intermediate_size // rollout.expert_tensor if m.is_moe else 2 * m.intermediate_size
    per_token = 4 * m.hidden_size + (m.num_attention_heads + 2 * m.num_key_value_heads) * m.head_dim // rollout.tensor + inner
    return batched_tokens * per_token * dtype_bytes + 2 * max_num_seqs * m.vocab_size * _F32
