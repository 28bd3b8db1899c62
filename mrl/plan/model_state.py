"""What a rank holds of the model between micro-batches: parameters, gradients, optimizer.

Sources: megatron-core 0.16.1 distributed/param_and_grad_buffer.py (one buffer for dense and one for expert parameters; parameters begin
at multiples of 64 elements, a buffer ends at a multiple of lcm(shards, 128)) and optimizer/distrib_optimizer.py (each of the ranks that
share a buffer keeps one shard of Adam's moments, and of float32 master weights where the parameters have 16 bits); with
optimizer_cpu_offload optimizer/cpu_offloading/hybrid_optimizer.py. Dense buffers are shared by dp x cp ranks, those of experts by the
expert grid's own data-parallel ranks.
"""

from dataclasses import dataclass
from functools import cache
from math import lcm, prod

from mrl.model import ModelSpec
from mrl.model.layout import TrainLayout, padded_vocab_size

_FLOAT32 = 4
_PARAMETER_START, _BUFFER_END = 64, 128  # elements


@dataclass(frozen=True)
class Precision:
    """Bytes per element of what training keeps."""

    parameters: int = 2
    gradients: int = _FLOAT32  # Megatron's grad_reduce_in_fp32, which mrl switches on
    moments: int = 2 * _FLOAT32
    host_share: float = 0.0  # of Adam, that Megatron's hybrid optimizer has on the host for good
    masters_stay: bool = True  # the device keeps float32 weights beside those on the host: without use_precision_aware_optimizer

    @property
    def master(self) -> int:
        """A second copy of the weights, where their own format is too coarse for small updates."""
        return 0 if self.parameters == _FLOAT32 else _FLOAT32

    @property
    def adam(self) -> float:
        """Of master weights and moments, on the device."""
        staying = self.master if self.masters_stay else 0.0
        return (self.master + self.moments) * (1 - self.host_share) + staying * self.host_share

    @property
    def adam_on_host(self) -> float:
        """Of the hybrid optimizer: weights, their gradients and moments, all in float32."""
        return (2 * _FLOAT32 + self.moments) * self.host_share


BF16, FLOAT32 = Precision(), Precision(parameters=_FLOAT32)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    optimizer: int
    optimizer_host: int = 0  # in host memory for good


@dataclass(frozen=True)
class _Numel:
    """Elements of one rank's parameters: as they are, and with each start aligned."""

    plain: int = 0
    aligned: int = 0

    @classmethod
    def of(cls, *shapes: tuple[int, ...]) -> "_Numel":
        sizes = [prod(shape) for shape in shapes]
        return cls(sum(sizes), sum(_up(size, _PARAMETER_START) for size in sizes))

    def __add__(self, other: "_Numel") -> "_Numel":
        return _Numel(self.plain + other.plain, self.aligned + other.aligned)

    def __mul__(self, times: int) -> "_Numel":
        return _Numel(self.plain * times, self.aligned * times)


def stage_state(model: ModelSpec, layout: TrainLayout, pp: int, precision: Precision = BF16, shard_optimizer: bool = True) -> StateBytes:
    """Bytes of a rank of pipeline stage `pp`; all ranks of a stage hold the same, up to the rounding of a shard."""
    numels = _stage_numels(model, layout, pp)
    shards = (layout.data * layout.context, layout.expert_data)
    buffers = [_up(n.aligned, lcm(s, _BUFFER_END)) for n, s in zip(numels, shards, strict=True)]
    sharded = sum(-(-b // (s if shard_optimizer else 1)) for b, s in zip(buffers, shards, strict=True))
    return StateBytes(
        parameters=sum(buffers) * precision.parameters,
        gradients=sum(buffers) * precision.gradients,
        optimizer=round(sharded * precision.adam),
        optimizer_host=round(sharded * precision.adam_on_host),
    )


def largest_parameter(model: ModelSpec, layout: TrainLayout, pp: int) -> int:
    """Elements of the largest single parameter of a stage: a vocabulary matrix, or the fused projection of a layer."""
    sizes = [prod(shape) for part in (_attention(model, layout.tensor), _mlp(model, layout)) for shape in part]
    if pp in (0, layout.pipeline - 1):
        sizes.append(prod(_vocabulary(model, layout.tensor)))
    return max(sizes)


def layer_kinds(model: ModelSpec, layout: TrainLayout, pp: int, vp: int) -> tuple[bool, ...]:
    """Of each layer of a model chunk, whether it has experts."""
    if len(model.moe_layers) in (0, model.num_layers):  # all are alike: which layers these are does not matter
        return (model.is_moe,) * layout.chunk_layers[pp][vp]
    return tuple(layer in model.moe_layers for layer in layout.stage_layers(pp, vp))


def _stage_numels(model: ModelSpec, layout: TrainLayout, pp: int) -> tuple[_Numel, _Numel]:
    """(dense, expert) elements of a rank of the stage."""
    kinds = [kind for vp in range(layout.virtual_pipeline) for kind in layer_kinds(model, layout, pp, vp)]
    moe = sum(kinds)
    dense_layer, moe_layer, experts = _layer_numels(model, layout.tensor, layout.expert, layout.expert_tensor)
    dense = dense_layer * (len(kinds) - moe) + moe_layer * moe
    word, norm = _Numel.of(_vocabulary(model, layout.tensor)), _Numel.of((model.hidden_size,))
    if pp == 0:
        dense += word
    if pp == layout.pipeline - 1:
        dense += norm
        if not (model.tie_word_embeddings and layout.pipeline == 1):  # tied weights lie twice only where the ends are two stages
            dense += word
    return dense, experts * moe


@cache
def _layer_numels(model: ModelSpec, tensor: int, expert: int, expert_tensor: int) -> tuple[_Numel, _Numel, _Numel]:
    """(a dense layer, the dense part of a layer with experts, its experts) on one rank."""
    h, attention = model.hidden_size, _Numel.of(*_attention(model, tensor))
    dense = attention + _Numel.of(*_gated(h, model.intermediate_size // tensor))
    moe = attention + _Numel.of((model.num_experts, h))
    if shared := model.shared_expert_intermediate_size:
        moe += _Numel.of(*_gated(h, shared // tensor), (1, h))
    local = model.num_experts // expert
    return dense, moe, _Numel.of(*_gated(h, model.moe_intermediate_size // expert_tensor)) * local


def _attention(m: ModelSpec, tensor: int) -> list[tuple[int, ...]]:
    """Shapes of a layer's attention and of its two norms."""
    rows = (m.num_attention_heads + 2 * m.num_key_value_heads) * m.head_dim // tensor
    shapes: list[tuple[int, ...]] = [(m.hidden_size,), (m.hidden_size,), (rows, m.hidden_size)]
    shapes.append((m.hidden_size, m.num_attention_heads * m.head_dim // tensor))
    shapes += [(rows,)] * m.qkv_bias + [(m.head_dim,)] * (2 * m.qk_norm)
    return shapes


def _mlp(m: ModelSpec, layout: TrainLayout) -> list[tuple[int, ...]]:
    if m.is_moe:
        return _gated(m.hidden_size, m.moe_intermediate_size // layout.expert_tensor)
    return _gated(m.hidden_size, m.intermediate_size // layout.tensor)


def _gated(hidden: int, intermediate: int) -> list[tuple[int, ...]]:
    """Gate and up in one matrix, then down."""
    return [(2 * intermediate, hidden), (hidden, intermediate)]


def _vocabulary(m: ModelSpec, tensor: int) -> tuple[int, int]:
    return padded_vocab_size(m.vocab_size, tensor) // tensor, m.hidden_size


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
