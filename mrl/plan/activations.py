"""Bytes that autograd keeps from a forward pass for its backward pass, by term, on one rank.

Every term is a tensor that the named operation saves, as read from the modules of megatron-core 0.16.1. Tests compare
the terms with torch's storages on real ranks (tests/real/test_memory_truth.py). There are two sets of kernels. `torch`
are the layers of mrl/rank/torch_spec.py, for runs without Transformer Engine. The fused norms, SwiGLU and attention
of `transformer_engine` save less (Transformer Engine 2.x module/layernorm_linear.py, Megatron's
fusions/fused_bias_swiglu.py). Flash attention has no score matrix (arXiv 2205.05198), only a float32 a head and token.

Notation: s tokens of a rank (its share under context parallelism), `sharded` those under sequence parallelism, h hidden
size, b bytes.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from mrl.model import ModelSpec
from mrl.model.adapters import Lora
from mrl.model.computed_sizes import (
    ATTENTION_LENGTHS,
    DELTA_CHUNK,
    LOGIT_CHUNK,
    SINK_COLUMNS,
    delta_float32,
    delta_of_fla,
)
from mrl.model.hf_config import LayerKind
from mrl.model.layout import TrainLayout, padded_vocab_size
from mrl.model.registry import weight_map
from mrl.plan.adapter_activations import AdapterActivations
from mrl.plan.model_state import chunk_kinds, key_value_heads

Kernels = Literal["torch", "transformer_engine"]
_F32 = 4
_INT64 = 8
# bytes: indices, targets, temperatures, sums over the vocabulary, the loss's ratios and masks
_PER_PREDICTED_TOKEN = 78
# bytes of a value head: steps that compute its rate, decay and step, and the divisors of norms and lengths
_OF_A_RATE = 10 * _F32

# Terms below that a module of Megatron's recompute_modules drops. Of a norm the input stays then, as large as its
# output. A norm that belongs to a projection is no module of its own for "layernorm".
_DROPPED = {
    "core_attn": ("attention internals",),
    "moe_act": ("expert activation",),
    "layernorm": ("input norm", "mlp norm"),
    "mlp": ("projection norm", "mlp", "mlp adapters"),
    "moe": (
        "router",
        "dispatch",
        "expert input",
        "expert projection",
        "expert probabilities",
        "expert activation",
        "expert adapters",
        "shared experts",
        "shared adapters",
    ),
    "shared_experts": ("shared experts", "shared adapters"),
}


@dataclass(frozen=True)
class Recompute:
    """Megatron's activation recomputation, under its own names."""

    granularity: Literal["selective", "full"] | None = None
    method: Literal["uniform", "block"] = "uniform"
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of Megatron's transformer config that differ from their defaults."""
        match self.granularity:
            case None:
                return {}
            case "full":
                how = {"recompute_method": self.method, "recompute_num_layers": self.num_layers}
                return {"recompute_granularity": "full"} | how
        return {"recompute_granularity": "selective", "recompute_modules": list(self.modules)}

    def __str__(self) -> str:
        match self.granularity:
            case None:
                return "none"
            case "full":
                return f"full ({self.method}, {self.num_layers})"
        return f"selective ({', '.join(self.modules)})"


@dataclass(frozen=True)
class MicroBatchShape:
    """The shape of a micro-batch, over all context-parallel ranks."""

    rows: int
    length: int  # tokens of a row, prompt and response and padding
    response: int  # positions of a row whose log-probabilities are computed
    packed: bool = True  # sequences lie end to end (use_remove_padding), each with its own rotary factors

    @property
    def tokens(self) -> int:
        """Tokens with padding, over all context-parallel ranks."""
        return self.rows * self.length


@dataclass(frozen=True)
class Activations:
    """Bytes that the forward pass of one micro-batch keeps on a rank, and the largest temporaries beside them."""

    model: ModelSpec
    layout: TrainLayout
    micro: MicroBatchShape
    bytes: int = 2  # per element
    kernels: Kernels = "transformer_engine"
    recompute: Recompute = field(default_factory=Recompute)
    expert_load: float = 1.0  # tokens of the busiest expert rank, divided by the mean
    gradient_bytes: int = 4  # per element of the gradient buffers
    gated_delta: str = "torch"  # model.gated_delta
    lora: Lora | None = None  # trained adapters
    dropout: bool = False  # the adapters' inputs have dropout
    predicting: int = 0  # layers that the last stage trains behind the output layer

    def beside(self, others: dict[tuple, "Activations"]) -> "Activations":
        """Takes over the sizes of layers from a layout among `others` whose ranks compute the same layers.

        It differs in its pipeline and in data parallelism alone. Everything else must be the same for all of `others`.
        """
        grid = self.layout
        shape = (grid.tensor, grid.context, grid.sequence_parallel, grid.expert, grid.expert_tensor)
        known = others.setdefault((*shape, self.recompute, self.expert_load, self.micro), self)
        vars(self).update(_layers=known._layers, _chunks=known._chunks, _largest=known._largest)
        return self

    # ---------------------------------------------------------------- sizes

    @cached_property
    def tokens(self) -> int:
        """Tokens of one rank, before sequence parallelism."""
        return -(-self.micro.tokens // self.layout.context)

    @cached_property
    def attended(self) -> int:
        """Tokens of one rank in its attention. Plain attention pads the short sequences of a pack."""
        is_plain = self.kernels == "torch" or self.model.attention_sinks
        if not is_plain or not self.micro.packed or self.layout.context > 1:
            return self.tokens
        padded = next((length for length in ATTENTION_LENGTHS if self.micro.length <= length), self.micro.length)
        return self.micro.rows * padded

    @cached_property
    def sharded(self) -> int:
        """Tokens that one rank keeps between tensor-parallel layers."""
        if self.layout.sequence_parallel:
            return -(-self.tokens // self.layout.tensor)
        return self.tokens

    @cached_property
    def expert_tokens(self) -> float:
        """Rows that a rank's experts compute: each token goes to its top-k experts, and to every slice of them."""
        return self.sharded * self.model.num_experts_per_tok * self.layout.expert_tensor * self.expert_load

    @cached_property
    def _heads(self) -> tuple[int, int]:
        """Query heads and key/value heads of one rank."""
        tensor = self.layout.tensor
        return self.model.num_attention_heads // tensor, key_value_heads(self.model, tensor)

    @cached_property
    def vocabulary(self) -> int:
        """Columns of the logits of one rank."""
        return padded_vocab_size(self.model.vocab_size, self.layout.tensor) // self.layout.tensor

    @cached_property
    def predicted(self) -> int:
        """Positions whose log-probability a rank computes."""
        return -(-self.micro.rows * self.micro.response // self.layout.context)

    # ---------------------------------------------------------------- one layer

    def _norm(self) -> int:
        """Returns the bytes that a norm keeps: its input and the reciprocal of its scale.

        torch also keeps the normalised input, for the weight's gradient, and both in float32.
        """
        per_element = self.bytes
        if self.kernels == "torch":
            per_element = _F32 + _F32 * (self.lora is None)
        return self.sharded * (self.model.hidden_size * per_element + _F32)

    def _hidden(self) -> int:
        """Returns the bytes of a tensor of the residual stream's shape."""
        return self.sharded * self.model.hidden_size * self.bytes

    def _attention(self) -> dict[str, int]:
        if self.model.is_latent:
            return self._latent_attention()
        m = self.model
        s = self.tokens
        queries, groups = self._heads
        rows = (m.num_attention_heads * (1 + m.attn_output_gate) + 2 * m.num_key_value_heads) * m.head_dim
        # with fewer key/value heads than ranks, each rank gathers the whole projection
        if m.num_key_value_heads >= self.layout.tensor:
            rows //= self.layout.tensor
        rotary = 4 * (s if self.micro.packed else self.micro.length // self.layout.context) * m.head_dim
        return {
            "attention norm": self._norm() + self._hidden(),
            "query, key, value": s * rows * self.bytes * self._keeps_projection
            + self._qk_norms(queries, groups)
            + rotary * self.bytes,
            # queries, keys and output
            "core attention": (self.attended * (queries + groups) + s * queries) * m.head_dim * self.bytes,
            "attention internals": self.attended * queries * _F32
            + (self._plain_attention(queries, groups) if self.kernels == "torch" else 0),
        } | (self._output_gate(queries) | self._sinks(queries, groups))

    def _sinks(self, queries: int, groups: int) -> dict[str, int]:
        """Returns what attention with sinks keeps more, on every device: queries, keys, values and outputs with further
        columns, and within windows keys and values twice.
        """
        m = self.model
        if not m.attention_sinks:
            return {}
        width = m.head_dim + SINK_COLUMNS
        twice = 1 + len(m.window_layers) / m.num_layers
        held = self.attended * (2 * queries + 2 * twice * groups) * width
        counted = self.attended * (queries + groups) * m.head_dim
        return {"sinks": round(held - counted) * self.bytes}

    def _output_gate(self, queries: int) -> dict[str, int]:
        """Returns the gate's sigmoid and the gated output."""
        if not self.model.attn_output_gate:
            return {}
        return {"output gate": self.tokens * queries * self.model.head_dim * (_F32 + self.bytes)}

    def _linear_attention(self) -> dict[str, int]:
        """Returns the terms of gated delta attention, plain torch or flash-linear-attention's kernel
        (mrl/rank/gated_delta.py). The latter's are read from its sources, and not measured.

        The convolution keeps its input once a position of its kernel, and its output before silu. Queries, keys, gates
        and outputs are float32. So are the results of chunks, to which each sequence is padded.
        """
        m = self.model
        heads = m.linear_num_value_heads // self.layout.tensor
        channels = m.linear_channels // self.layout.tensor
        convolution = self.tokens * (m.linear_conv_kernel_dim + 1) * channels * self.bytes
        of_head = 2 * m.linear_key_head_dim * _F32 + m.linear_value_head_dim * 3 * (_F32 + self.bytes)
        chunks = -(-self.micro.length // DELTA_CHUNK)
        chunked = self.micro.rows * chunks * DELTA_CHUNK
        states = chunked * delta_float32(m) * _F32
        if self.gated_delta == "fla":
            # queries, keys and values as they came, in 16 bits; no state is kept
            of_head -= m.linear_value_head_dim * _F32 + 2 * m.linear_key_head_dim * (_F32 - self.bytes)
            states = self.tokens * delta_of_fla(m) * self.bytes
        return {
            "input norm": self._norm(),
            "attention input": self._hidden(),
            "convolution": convolution,
            "linear heads": self.tokens * heads * (of_head + _OF_A_RATE),
            "linear states": states // self.layout.tensor,
        }

    def _latent_attention(self) -> dict[str, int]:
        """Returns the terms of latent attention. Up projections are copied into queries, keys and values, and not kept.

        Plain attention has values and outputs as wide as keys. Its norms take float32 inputs as they are.
        """
        m = self.model
        s = self.tokens
        queries, _ = self._heads
        plain = self.kernels == "torch"
        normed = m.q_lora_rank + m.kv_lora_rank
        of_norms = self.bytes + plain * _F32 * (1 + (self.bytes < _F32))
        latents = self.sharded * (normed * (self.bytes + of_norms) + m.qk_rope_head_dim * self.bytes)
        value_dim = m.head_dim if plain else m.v_head_dim
        keys_and_values = self.attended * queries * (m.head_dim + value_dim)
        rotary = 4 * (s if self.micro.packed else self.micro.length // self.layout.context) * m.qk_rope_head_dim
        core = self.attended * queries * m.head_dim + keys_and_values + s * queries * m.v_head_dim
        return {
            "input norm": self._norm(),
            "attention input": self._hidden(),
            "query, key, value": latents + rotary * self.bytes,
            "core attention": core * self.bytes,
            "attention internals": self.attended * queries * _F32 + (self._plain_latent(queries) if plain else 0),
        }

    def _plain_latent(self, queries: int) -> int:
        """Returns what plain attention keeps beside padded values: outputs of their width, and more between ranks."""
        wide = self.attended * queries * self.model.head_dim * self.bytes
        if self.layout.context == 1:
            return wide
        return self._plain_attention(queries, queries) - wide  # values are counted already

    @property
    def _keeps_projection(self) -> bool:
        """Returns whether a saved tensor is a view of the fused projection, such as the input of a float32 norm.

        Values are one where attention is recomputed, or where plain attention takes them unpacked, on one context rank.
        """
        if self.kernels != "torch" or (self.model.qk_norm and self.bytes == _F32):
            return True
        computed_again = self.recompute.granularity == "selective" and "core_attn" in self.recompute.modules
        return computed_again or (self.layout.context == 1 and not self.micro.packed)

    def _plain_attention(self, queries: int, groups: int) -> int:
        """Returns what mrl/rank/attention.py keeps beside flash attention's tensors.

        A pack keeps the outputs of its calls, before they are in its order, and a copy of the values. Context
        parallelism keeps keys and values of all ranks instead of rotated keys, and masks.
        """
        s = self.tokens
        context = self.layout.context
        outputs = self.attended * queries * self.model.head_dim * self.micro.packed
        values = self.attended * groups * self.model.head_dim
        if context == 1:
            return (outputs + values * self.micro.packed) * self.bytes
        gathered = (2 * context - 1) * values
        mask = self.micro.length**2 // context
        return (outputs + gathered + mask) * self.bytes + 2 * s * context * _INT64  # the last is the gathered order

    def _qk_norms(self, queries: int, groups: int) -> int:
        if not self.model.qk_norm:
            return 0
        s = self.tokens
        d = self.model.head_dim
        scales = s * (queries + groups) * _F32
        if self.kernels == "transformer_engine":
            return scales + s * (queries + groups) * d * self.bytes
        # float32 inputs are views of the projection
        copied = queries + groups if self.bytes < _F32 else queries * (groups > 1)
        normalised = (queries + groups) * (self.lora is None)  # for the gradient of the norm's weight
        return scales + s * (copied + normalised) * d * _F32

    def _gated(self, tokens: float, intermediate: int, extra_copies: int) -> int:
        """Returns output of the gate-and-up projection, input of the down projection, and copies of unfused SwiGLU
        between them.
        """
        copies = 3 + (extra_copies if self.kernels == "torch" else 0)
        return round(tokens * intermediate * copies * self.bytes)

    def _mlp(self) -> dict[str, int]:
        return {
            "projection norm": self._norm(),
            "mlp input": self._hidden(),
            "mlp": self._gated(self.tokens, self.model.intermediate_size // self.layout.tensor, 2),
        }

    def _moe(self) -> dict[str, int]:
        m = self.model
        s = self.sharded
        k = self.model.num_experts_per_tok
        probabilities = k if m.norm_topk_prob else m.num_experts  # softmax over the chosen experts, or over all
        if m.router_score == "sigmoid":
            probabilities = m.num_experts + 2 * k  # all experts; the chosen ones, before and after normalisation
        inner = m.moe_intermediate_size // self.layout.expert_tensor
        projection = round(self.expert_tokens * inner * 2 * self.bytes)
        return {
            "mlp norm": self._norm(),
            "mlp input": self._hidden(),
            "router": s * (k * _INT64 + probabilities * _F32),
            # routing map, probabilities, order of rows
            "dispatch": s * (m.num_experts * (1 + _F32) + k * _INT64),
            "expert input": round(self.expert_tokens * m.hidden_size * self.bytes),
            # gate and up, from which the activation is recomputed
            "expert projection": projection,
            "expert probabilities": round(self.expert_tokens * _F32),
            "expert activation": self._gated(self.expert_tokens, inner, 3) - projection,
            "shared experts": self._shared(),
        }

    def _shared(self) -> int:
        if not self.model.shared_expert_intermediate_size:
            return 0
        gathered = 0
        if self.layout.sequence_parallel:
            gathered = self.tokens * self.model.hidden_size * self.bytes
        inner = self._gated(self.tokens, self.model.shared_expert_intermediate_size // self.layout.tensor, 1)
        if weight_map(self.model).has("mlp.shared_experts.gate_weight"):  # the gate keeps its score and its input
            return gathered + inner + self._hidden() + self.sharded * self.bytes
        return gathered + inner

    def layer(self, kind: LayerKind) -> dict[str, int]:
        """Returns the bytes of one layer without recomputation, by term."""
        if kind not in self._layers:
            attending = self._linear_attention() if kind.is_linear else self._attention()
            rest = self._moe() if kind.has_experts else self._mlp()
            self._layers[kind] = attending | rest | self._adapters(kind)
        return self._layers[kind]

    def _adapters(self, kind: LayerKind) -> dict[str, int]:
        if self.lora is None:
            return {}
        kept = AdapterActivations(
            self.lora,
            self.dropout,
            self.model,
            self.layout,
            self.bytes,
            self.kernels == "torch",
            self.tokens,
            self.sharded,
            round(self.expert_tokens),
        )
        return kept.terms(kind)

    @cached_property
    def _layers(self) -> dict[LayerKind, dict[str, int]]:
        return {}

    # ---------------------------------------------------------------- a chunk of layers

    def chunk(self, kinds: tuple[LayerKind, ...]) -> tuple[int, int]:
        """Returns the bytes that one micro-batch keeps in layers of these kinds, and those that recomputation brings
        back.
        """
        if kinds not in self._chunks:
            self._chunks[kinds] = self._chunk(kinds)
        return self._chunks[kinds]

    @cached_property
    def _chunks(self) -> dict[tuple[LayerKind, ...], tuple[int, int]]:
        return {}

    def _chunk(self, kinds: tuple[LayerKind, ...]) -> tuple[int, int]:
        layers = Counter(kinds)
        sizes = {kind: sum(self.layer(kind).values()) for kind in layers}
        match self.recompute.granularity:
            case None:
                return sum(sizes[kind] * count for kind, count in layers.items()), 0
            case "selective":
                dropped = {kind: self._dropped(self.layer(kind)) for kind in layers}
                kept = sum((sizes[kind] - dropped[kind]) * count for kind, count in layers.items())
                return kept, max(dropped.values(), default=0)
        return self._fully_recomputed([sizes[kind] for kind in kinds])

    def _fully_recomputed(self, full: list[int]) -> tuple[int, int]:
        n = self.recompute.num_layers
        if self.recompute.method == "block":
            return sum(full[n:]) + len(full[:n]) * self._hidden(), max(full[:n], default=0)
        groups = [sum(full[i : i + n]) for i in range(0, len(full), n)]
        return len(groups) * self._hidden(), max(groups, default=0)

    def _dropped(self, terms: dict[str, int]) -> int:
        names = {name for module in self.recompute.modules for name in _DROPPED.get(module, ())}
        return sum(size for name, size in terms.items() if name in names)

    # ---------------------------------------------------------------- the ends

    def embedding(self) -> int:
        """Returns the bytes of token ids and, with a divided vocabulary, of the mask of this rank's ids."""
        return self.tokens * (_INT64 + (self.layout.tensor > 1))

    def head(self) -> int:
        """Returns the bytes of the final norm and the predicted hidden states. Backward makes logits again
        (rank/logprob.py).
        """
        return self._norm() + self.predicted * (self.model.hidden_size * self.bytes + _PER_PREDICTED_TOKEN)

    def predicting_layer(self) -> int:
        """Returns the bytes of a layer that is trained behind the model, with its two inputs, their join and its head.

        They go before the next micro-batch, so nothing of it is recomputed.
        """
        layer = self.layer(self.model.layer_kind(self.model.num_layers - 1))
        return sum(layer.values()) + 2 * self._norm() + 4 * self._hidden() + self.head()

    # ---------------------------------------------------------------- temporaries

    def head_temporaries(self) -> int:
        """Returns the bytes that the backward pass of the log-probabilities takes.

        These are chunks of logits, hidden states of all tokens with their gradient, and the weight's gradient. With
        16-bit buffers the last is first summed in float32.
        """
        weight = self.vocabulary * self.model.hidden_size
        gradient = 0
        if self.bytes < _F32 and self.lora is None:  # with adapters the weight has no gradient
            gradient = weight * self.bytes
        total = 0
        if self.gradient_bytes < _F32 and self.lora is None:
            total = weight * _F32
        states = (2 * self.tokens + self.predicted) * self.model.hidden_size * self.bytes
        return self._logit_chunks() + states + gradient + total

    def _logit_chunks(self) -> int:
        """Returns two blocks of float32 logits and one in the weight's format, each for the tokens of a chunk."""
        rows = min(self.predicted, max(1, LOGIT_CHUNK // (_F32 * self.vocabulary)))
        return rows * self.vocabulary * (2 * _F32 + self.bytes)

    def layer_temporaries(self) -> int:
        """Estimates the temporaries of a layer's backward pass."""
        if "layer" not in self._largest:
            self._largest["layer"] = self._layer_temporaries()
        return self._largest["layer"]

    @cached_property
    def _largest(self) -> dict[str, int]:
        return {}

    def _layer_temporaries(self) -> int:
        """Estimates the gradient and a gathered copy of the largest tensor of a layer. Adapters add their outputs for
        it.
        """
        m = self.model
        s = self.tokens
        sizes = [s * m.hidden_size]
        if m.is_moe:
            inner = 2 * m.moe_intermediate_size // self.layout.expert_tensor
            sizes.append(round(self.expert_tokens * max(m.hidden_size, inner)))
        if len(m.moe_layers) < m.num_layers:
            sizes.append(s * 2 * m.intermediate_size // self.layout.tensor)
        if m.is_hybrid:
            of_head = (m.linear_key_head_dim + m.linear_value_head_dim) * _F32 // self.bytes
            sizes.append(s * m.linear_num_value_heads // self.layout.tensor * of_head)
        copies = 2
        if self.lora is not None:
            copies = 4
        return copies * max(sizes) * self.bytes

    # ---------------------------------------------------------------- a pipeline stage

    def stage_saved(self, pp: int, micro_batches: int) -> int:
        """Returns the peak of a stage's saved tensors in Megatron's 1F1B schedule (interleaved with virtual stages)."""
        kinds = chunk_kinds(self.model, self.layout, pp)
        unlike = {id(of_chunk): of_chunk for of_chunk in kinds}  # equal ones of many layers take long to compare
        sizes = {key: self.chunk(of_chunk) for key, of_chunk in unlike.items()}
        if len(sizes) == 1:
            kept = _passes(self.layout, pp, micro_batches) * sizes[id(kinds[0])][0]
        else:
            counts = in_flight(self.layout, pp, micro_batches)
            kept = sum(count * sizes[id(of_chunk)][0] for count, of_chunk in zip(counts, kinds, strict=True))
        if pp == 0:
            kept += self.embedding() * min(micro_batches, self.layout.pipeline)
        head = 0
        if pp == self.layout.pipeline - 1:
            head = self.head() + self.predicting_layer() * bool(self.predicting)
        return kept + max(head, max(again for _, again in sizes.values()))

    def stage_temporaries(self, pp: int) -> int:
        """Returns the largest temporaries of a stage's backward pass."""
        return max(self.layer_temporaries(), self.head_temporaries() if pp == self.layout.pipeline - 1 else 0)

    def forward_only(self, pp: int) -> int:
        """Returns the peak of a pass without backward: one layer at work, or the log-probabilities."""
        layer = self.layer_temporaries() + 2 * self._hidden()
        if pp != self.layout.pipeline - 1:
            return layer
        return max(layer, self._logit_chunks() + (self.tokens + self.predicted) * self.model.hidden_size * self.bytes)


def in_flight(layout: TrainLayout, pp: int, micro_batches: int) -> list[int]:
    """Returns how many micro-batches of each chunk stage `pp` has sent forward before its first backward.

    megatron-core 0.16.1, get_schedule_table: `pipeline` micro-batches of each chunk in turn.
    """
    v = layout.virtual_pipeline
    size = layout.pipeline
    passes = _passes(layout, pp, micro_batches)
    if v == 1:
        return [passes]
    rounds, rest = divmod(passes, size * v)
    return [rounds * size + min(size, max(0, rest - vp * size)) for vp in range(v)]


def _passes(layout: TrainLayout, pp: int, micro_batches: int) -> int:
    """Returns the passes of chunks of stage `pp` before its first backward.

    megatron-core 0.16.1, get_pp_rank_microbatches: a warm-up of pipeline - 1 - pp micro-batches, and one more. With v
    virtual stages: 2 (pipeline - 1 - pp) + (v - 1) pipeline + 1 chunk passes.
    """
    v = layout.virtual_pipeline
    behind = layout.pipeline - pp - 1
    warm_up = behind if v == 1 else 2 * behind + (v - 1) * layout.pipeline
    return min(warm_up + 1, micro_batches * v)
