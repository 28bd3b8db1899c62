"""The memory of a vLLM worker: weights, and the KV cache in the rest of its share.

Weights are those of the weight map (mrl/model/vllm_parameters.py). The cache gets gpu_memory_utilization of the device,
less weights and the peak of a profiling run (vLLM 0.32 v1/worker/gpu_worker.py).
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from mrl.model import ModelSpec
from mrl.model.layout import RolloutLayout
from mrl.model.quantised import blocks, is_quantised
from mrl.model.registry import weight_map
from mrl.model.vllm_parameters import fullest_numel, worker_slice
from mrl.model.weight_map import Weight
from mrl.plan.devices import Device
from mrl.plan.model_state import key_value_heads
from mrl.platforms.hosting import get_hosting
from mrl.units import GIB

_F32 = 4
BLOCK = 16  # tokens of a cache block
GRAPHS = GIB  # bytes of captured graphs (an estimate)


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one worker, and the tokens that fit."""

    weights: int
    working_set: int  # largest forward pass and sampler (an estimate)
    cache: int
    cache_tokens: int  # of the whole engine: its tensor workers share a sequence, its data-parallel ranks do not
    largest_module: int  # a weight sync holds it beside its staging buffers
    buffers: int  # stay when the engine sleeps: the table of rotary factors, which layers share
    draft: int = 0  # weights of the predicting layer, or of the head, in engines that draft with one
    tower: int = 0  # weights of the vision tower, for engines that see images
    states: int = 0  # of the cache: gated delta states of all sequences together
    token: int = 0  # of the cache: keys and values of one token, with those of what drafts

    @property
    def total(self) -> int:
        """Bytes that weights, passes and cache take; graphs and the context come on top."""
        return self.weights + self.draft + self.tower + self.working_set + self.cache


@dataclass(frozen=True)
class Drafter:
    """What drafts in an engine: bytes on one worker, and the tokens that it drafts at most."""

    weights: int = 0  # of a predicting layer or a head; look-ups have none
    cache_per_token: int = 0  # keys and values of its own layers
    tokens: int = 0


NO_DRAFTER = Drafter()


def captured_graphs(device: Device, enforce_eager: bool | None) -> int:
    """Returns the bytes of an engine worker's graphs, which stay while it sleeps."""
    if enforce_eager or device.platform == "cpu":
        return 0
    return GRAPHS


def graphs_in_share(device: Device, enforce_eager: bool | None) -> int:
    """Returns the bytes of graphs that an engine takes from its share of the memory.

    vLLM does (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS), and graphs of vllm-ascend come on top.
    """
    if not get_hosting(device.platform).counts_graphs:
        return 0
    return captured_graphs(device, enforce_eager)


def engine_share(device: Device, utilization: float, enforce_eager: bool | None = False) -> int:
    """Returns the bytes of a worker for weights, passes and cache: gpu_memory_utilization of its device, less graphs
    that vLLM takes from it.
    """
    return round(device.memory * utilization) - graphs_in_share(device, enforce_eager)


def engine_memory(
    model: ModelSpec,
    rollout: RolloutLayout,
    share: int,
    *,
    dtype_bytes: int = 2,
    batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    fp8_block: int = 0,
    drafter: Drafter = NO_DRAFTER,
    tower: int = 0,
    sequences: int | None = None,
) -> EngineMemory:
    """Computes the memory of a worker with `share` bytes of the device (memory x gpu_memory_utilization).

    `fp8_block`: rows and columns with one scale, in engines that hold FP8 values; 0: there are none. `tower`: bytes of
    a vision tower. `sequences`: those of a step that a data-parallel rank is given; None: as many as max_num_seqs. An
    engine that does not fit has a cache of no token.
    """
    weights = worker_weight_bytes(model, rollout, dtype_bytes, fp8_block)
    working = _working_set(model, rollout, dtype_bytes, batched_tokens, max_num_seqs)
    cache = max(0, share - weights - drafter.weights - tower - working)
    found = _with_cache(
        model, rollout, dtype_bytes, weights, working, cache, _together(max_num_seqs, sequences), fp8_block, drafter
    )
    return replace(found, tower=tower)


def engine_memory_with_cache(
    model: ModelSpec,
    rollout: RolloutLayout,
    cache: int,
    *,
    dtype_bytes: int,
    fp8_block: int = 0,
    drafter: Drafter = NO_DRAFTER,
    tower: int = 0,
    sequences: int | None = None,
    **passes: int,
) -> EngineMemory:
    """Computes the memory of a worker whose cache has a given number of bytes, as on a CPU."""
    working = _working_set(model, rollout, dtype_bytes, passes["batched_tokens"], passes["max_num_seqs"])
    weights = worker_weight_bytes(model, rollout, dtype_bytes, fp8_block)
    most = _together(passes["max_num_seqs"], sequences)
    found = _with_cache(model, rollout, dtype_bytes, weights, working, cache, most, fp8_block, drafter)
    return replace(found, tower=tower)


def _together(max_num_seqs: int, sequences: int | None) -> int:
    """Returns the sequences of which a data-parallel rank keeps states at once: vLLM takes their pages as they come."""
    return max_num_seqs if sequences is None else min(max_num_seqs, sequences)


def _with_cache(
    model: ModelSpec,
    rollout: RolloutLayout,
    dtype_bytes: int,
    weights: int,
    working: int,
    cache: int,
    together: int,
    fp8_block: int,
    drafter: Drafter,
) -> EngineMemory:
    per_token = cache_bytes_per_token(model, rollout.tensor, dtype_bytes) + drafter.cache_per_token
    # vLLM keeps the states behind each drafted token, since the next ones may be rejected (MambaSpec)
    states = together * (1 + drafter.tokens) * state_bytes_per_sequence(model, rollout.tensor, dtype_bytes)
    tokens = max(0, cache - states) // per_token // BLOCK * BLOCK * rollout.data
    rows = model.rotation.rows(model.max_position_embeddings)
    buffers = rows * model.rotated_head_dim * dtype_bytes
    largest = _largest_module(model, rollout, dtype_bytes, fp8_block)
    return EngineMemory(
        weights, working, cache, tokens, largest, buffers, drafter.weights, states=states, token=per_token
    )


def cache_bytes_per_token(model: ModelSpec, tensor: int, dtype_bytes: int) -> int:
    """Returns the bytes of one token's keys and values in all layers that have them, on one of `tensor` workers.

    With latent attention these are the latent and the rotated part of the key, which every worker has whole.
    """
    if model.is_latent:
        return model.num_layers * (model.kv_lora_rank + model.qk_rope_head_dim) * dtype_bytes
    return model.attending_layers * 2 * key_value_heads(model, tensor) * model.head_dim * dtype_bytes


def state_bytes_per_sequence(model: ModelSpec, tensor: int, dtype_bytes: int) -> int:
    """Returns the bytes that all gated delta layers keep of one sequence of any length, on one of `tensor` workers.

    Each value head has a state, which some models keep in its own dtype. The convolution keeps the tokens that it
    reaches back to.
    """
    state_bytes = dtype_bytes
    if model.linear_state_dtype == "float32":
        state_bytes = _F32
    state = model.linear_num_value_heads * model.linear_key_head_dim * model.linear_value_head_dim
    reached = model.linear_channels * max(0, model.linear_conv_kernel_dim - 1)
    return len(model.linear_layers) * (state * state_bytes + reached * dtype_bytes) // tensor


@cache
def worker_weights(model: ModelSpec, rollout: RolloutLayout) -> int:
    """Returns the elements of the weights on the worker with most, copies for decoding included."""
    counted = ((weight, fullest_numel(model, rollout, weight) * n) for weight, n in weight_map(model).counted)
    return sum(numel * (2 if weight.vllm.endswith(".kv_b_proj.weight") else 1) for weight, numel in counted)


@cache
def worker_weight_bytes(model: ModelSpec, rollout: RolloutLayout, dtype_bytes: int, fp8_block: int = 0) -> int:
    """Returns the bytes of those weights. Quantised ones have a byte an element, and scales."""
    nbytes = worker_weights(model, rollout) * dtype_bytes
    for weight, layers in weight_map(model).counted if fp8_block else ():
        if is_quantised(weight):
            plain = fullest_numel(model, rollout, weight) * dtype_bytes
            nbytes -= layers * (plain - _bytes(model, rollout, weight, dtype_bytes, fp8_block))
    return nbytes


@cache
def draft_weight_bytes(model: ModelSpec, rollout: RolloutLayout, dtype_bytes: int, fp8_block: int = 0) -> int:
    """Returns the bytes of one predicting layer on the worker with most: a layer of the model's last kind with
    attention, the product that joins token and state (DeepSeek-V3, arXiv 2412.19437, equation 21), and its norms.

    Embedding and output layer are the model's own. Of what FP8 engines hold as words, the product is none.
    """
    last = max(set(range(model.num_layers)) - set(model.linear_layers))
    layer = sum(_bytes(model, rollout, weight, dtype_bytes, fp8_block) for weight in weight_map(model).layer(last).hf)
    joined = 2 * model.hidden_size * model.hidden_size
    return layer + (joined + 3 * model.hidden_size) * dtype_bytes


def _bytes(model: ModelSpec, rollout: RolloutLayout, weight: Weight, dtype_bytes: int, fp8_block: int) -> int:
    """Returns the bytes of one layer's parameter, with scales where it is quantised, on the worker with most of it."""
    numel = fullest_numel(model, rollout, weight)
    if not fp8_block or not is_quantised(weight):
        return numel * dtype_bytes
    workers = rollout.expert_tensor if weight.is_expert else rollout.tensor
    local = worker_slice(weight, workers, 0)
    return numel + numel // local.numel * prod(blocks(local.shape, fp8_block)) * _F32


@cache
def _largest_module(model: ModelSpec, rollout: RolloutLayout, dtype_bytes: int, fp8_block: int) -> int:
    """Returns the bytes of the largest unit of vLLM's layerwise reload: parameters whose names differ only in the last
    part.
    """
    weights = weight_map(model)
    # layers of different kinds have modules of equal names
    layers = [kind.hf for kind, _ in weights.layers]
    sizes = []
    for together in (*layers, (weights.embedding, *weights.ends)):
        modules: Counter[str] = Counter()
        for weight in together:
            modules[weight.vllm.rpartition(".")[0]] += _bytes(model, rollout, weight, dtype_bytes, fp8_block)
        sizes += modules.values()
    return max(sizes)


def _working_set(m: ModelSpec, rollout: RolloutLayout, dtype_bytes: int, batched_tokens: int, max_num_seqs: int) -> int:
    """Estimates the residual stream, projections and one MLP of the largest pass, and the logits for sampling.

    Logits are those of every sequence in float32, twice.
    """
    inner = 2 * m.intermediate_size
    if m.is_moe:
        inner = m.num_experts_per_tok * 2 * m.moe_intermediate_size // rollout.expert_tensor
    projected = m.num_attention_heads * m.head_dim + m.num_key_value_heads * (m.head_dim + m.value_head_dim)
    per_token = 4 * m.hidden_size + projected // rollout.tensor + inner
    return batched_tokens * per_token * dtype_bytes + 2 * max_num_seqs * m.vocab_size * _F32
