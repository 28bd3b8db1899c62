"""What a rank holds of the model between micro-batches: parameters, gradients, optimizer.

Sources in megatron-core 0.16.1:

* distributed/param_and_grad_buffer.py: one buffer for dense and one for expert parameters. Parameters begin at
  multiples of 64 elements. A buffer ends at a multiple of lcm(shards, 128).
* optimizer/distrib_optimizer.py: each rank that shares a buffer keeps one shard of Adam's moments. With 16-bit
  parameters it keeps one of float32 master weights too.
* optimizer/cpu_offloading/hybrid_optimizer.py: optimizer_cpu_offload.

Dense buffers are shared by dp x cp ranks, those of experts by the expert grid's own data-parallel ranks.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain, product
from math import lcm

from mrl.model import ModelSpec
from mrl.model.adapters import Lora, target_of
from mrl.model.critic_weights import body_of
from mrl.model.hf_config import LayerKind
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import last_stage_weights, megatron_slice
from mrl.model.precision import BF16, Precision
from mrl.model.registry import weight_map
from mrl.model.weight_map import Weight
from mrl.units import round_up

# elements
_PARAMETER_START = 64
_BUFFER_END = 128


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    optimizer: int
    optimizer_host: int = 0  # always in host memory
    frozen: int = 0  # part of the parameters that is not trained

    @property
    def trained(self) -> int:
        """Bytes of the parameters that have gradients."""
        return self.parameters - self.frozen


@dataclass(frozen=True)
class BufferNumel:
    """Elements of a rank's parameters in Megatron's two buffers, with the start of each parameter aligned."""

    dense: int = 0
    expert: int = 0

    def __add__(self, other: "BufferNumel") -> "BufferNumel":
        return BufferNumel(self.dense + other.dense, self.expert + other.expert)

    def __mul__(self, times: int) -> "BufferNumel":
        return BufferNumel(self.dense * times, self.expert * times)


def stage_state(
    model: ModelSpec,
    layout: TrainLayout,
    pp: int,
    precision: Precision = BF16,
    shard_optimizer: bool = True,
    lora: Lora | None = None,
    is_critic: bool = False,
) -> StateBytes:
    """Returns the bytes of a rank of pipeline stage `pp`. All ranks of a stage hold the same, up to the rounding of a
    shard.

    `lora`: trained adapters; the weights then lie beside Megatron's buffers. `is_critic`: the model has a value head in
    place of its output layer.
    """
    numel = critic_numel(model, layout, pp) if is_critic else stage_numel(model, layout, pp)
    frozen = 0
    if lora is not None:
        frozen = numel.dense + numel.expert
        numel = adapter_numel(model, layout, pp, lora)
    buffered = 0
    sharded = 0
    for elements, shards in ((numel.dense, layout.data * layout.context), (numel.expert, layout.expert_data)):
        buffer = round_up(elements, lcm(shards, _BUFFER_END))
        buffered += buffer
        sharded += -(-buffer // shards) if shard_optimizer else buffer
    return StateBytes(
        parameters=(buffered + frozen) * precision.parameters,
        gradients=buffered * precision.gradients,
        optimizer=round(sharded * precision.adam),
        optimizer_host=round(sharded * precision.adam_on_host),
        frozen=frozen * precision.parameters,
    )


def largest_parameter(model: ModelSpec, layout: TrainLayout, pp: int) -> int:
    """Returns the elements of a stage's largest single parameter on a rank.

    It is a vocabulary matrix, or the fused projection of a layer.
    """
    weights = [weight for kind, _ in weight_map(model).layers for weight in kind.megatron]
    weights += _ends(model, layout.pipeline, pp)
    return max(megatron_slice(weight, layout.tensor, layout.expert_tensor).numel for weight in weights)


def key_value_heads(model: ModelSpec, tensor: int) -> int:
    """Returns the key/value heads on one of `tensor` ranks. With more ranks than heads, several ranks share one."""
    return max(1, model.num_key_value_heads // tensor)


def layers_alike(model: ModelSpec) -> bool:
    """Returns whether all layers are of one kind. Then it does not matter which ones a chunk has."""
    return len(model.moe_layers) in (0, model.num_layers) and not model.is_hybrid


def layer_kinds(model: ModelSpec, layout: TrainLayout, pp: int, vp: int) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer of a model chunk."""
    return chunk_kinds(model, layout, pp)[vp]


@lru_cache(maxsize=1 << 14)
def _kinds_of_chunks(
    model: ModelSpec, chunk_layers: tuple[tuple[int, ...], ...]
) -> tuple[tuple[tuple[LayerKind, ...], ...], ...]:
    """Returns the kinds of layers of all chunks, [pipeline][virtual_pipeline]. Equal ones are one object."""
    kinds = _all_kinds(model)
    one: dict[tuple[LayerKind, ...], tuple[LayerKind, ...]] = {}
    stages = [[] for _ in chunk_layers]
    begin = 0
    for vp, pp in product(range(len(chunk_layers[0])), range(len(chunk_layers))):
        end = begin + chunk_layers[pp][vp]
        stages[pp].append(one.setdefault(kinds[begin:end], kinds[begin:end]))
        begin = end
    return tuple(map(tuple, stages))


@cache
def _all_kinds(model: ModelSpec) -> tuple[LayerKind, ...]:
    return tuple(model.layer_kind(layer) for layer in range(model.num_layers))


@cache
def _repeated(is_moe: bool, layers: int) -> tuple[LayerKind, ...]:
    return (LayerKind(is_moe),) * layers


@lru_cache(maxsize=1 << 14)
def _alike(is_moe: bool, chunk_layers: tuple[int, ...]) -> tuple[tuple[LayerKind, ...], ...]:
    return tuple(_repeated(is_moe, layers) for layers in chunk_layers)


def chunk_kinds(model: ModelSpec, layout: TrainLayout, pp: int) -> Sequence[tuple[LayerKind, ...]]:
    """Returns the kinds of the layers of each model chunk of a stage. Chunks of equal layers are one object."""
    if layers_alike(model):  # asked once: a search looks at very many chunks
        return _alike(model.is_moe, layout.chunk_layers[pp])
    return _kinds_of_chunks(model, layout.chunk_layers)[pp]


def _kind_counts(model: ModelSpec, layout: TrainLayout, pp: int) -> dict[LayerKind, int]:
    """Returns how many layers of each kind a stage has."""
    if layers_alike(model):
        return {LayerKind(model.is_moe): sum(layout.chunk_layers[pp])}
    return Counter(chain.from_iterable(chunk_kinds(model, layout, pp)))


def _ends(model: ModelSpec, pipeline: int, pp: int) -> tuple[Weight, ...]:
    """Returns the weights that a stage has beside its layers."""
    first = ()
    if pp == 0:
        first = (weight_map(model).embedding, *weight_map(model).tower)
    last = ()
    if pp == pipeline - 1:
        last = last_stage_weights(model, pipeline)
    return (*first, *last)


def stage_numel(model: ModelSpec, layout: TrainLayout, pp: int) -> BufferNumel:
    """Returns the elements of a rank of pipeline stage `pp`, with parameters' starts aligned but not yet the buffers'
    ends.
    """
    numel = _end_numel(model, layout.tensor, layout.pipeline, pp)
    counts = _kind_counts(model, layout, pp)
    if model.predicting_layers and pp == layout.pipeline - 1:
        counts = {**counts, model.layer_kind(model.num_layers): model.predicting_layers}
    for kind, layers in counts.items():
        numel += _layer_numel(model, kind, layout.tensor, layout.expert, layout.expert_tensor) * layers
    return numel


def critic_numel(model: ModelSpec, layout: TrainLayout, pp: int) -> BufferNumel:
    """Returns the elements of a critic on a rank of pipeline stage `pp`, as `stage_numel` counts the actor's."""
    body = body_of(model)
    numel = stage_numel(body, layout, pp)
    if pp < layout.pipeline - 1:
        return numel
    output = _aligned((weight_map(body).output,), layout.tensor)
    head = round_up(model.hidden_size, _PARAMETER_START)
    return BufferNumel(numel.dense - output.dense + head, numel.expert)


def adapter_numel(model: ModelSpec, layout: TrainLayout, pp: int, lora: Lora) -> BufferNumel:
    """Returns the elements of the adapters of a rank of pipeline stage `pp`, as `stage_numel` counts weights."""
    numel = BufferNumel()
    for kind, layers in _kind_counts(model, layout, pp).items():
        for weight in weight_map(model).of_kind(kind).megatron:
            numel += _adapters_of(weight, model, layout, lora) * layers
    return numel


def _adapters_of(weight: Weight, model: ModelSpec, layout: TrainLayout, lora: Lora) -> BufferNumel:
    """Returns the elements of both factors of each target in one layer's weight. Experts of a rank share a
    parameter.
    """
    blocks = megatron_slice(weight, layout.tensor, layout.expert_tensor).blocks
    together = 1
    if weight.is_expert:
        together = model.num_experts // layout.expert
    total = 0
    for target in {target_of(block.part.name) for block in blocks} & set(lora.targets):
        boxes = [block.hf_box.shape for block in blocks if target_of(block.part.name) == target]
        sides = (boxes[0][1], sum(rows for rows, _ in boxes))
        total += sum(round_up(together * lora.rank * side, _PARAMETER_START) for side in sides)
    if weight.is_expert:
        return BufferNumel(expert=total)
    return BufferNumel(dense=total)


@cache
def _layer_numel(model: ModelSpec, kind: LayerKind, tensor: int, expert: int, expert_tensor: int) -> BufferNumel:
    """Returns the elements of one layer on one rank."""
    return _aligned(weight_map(model).of_kind(kind).megatron, tensor, expert_tensor, model.num_experts // expert)


@cache
def _end_numel(model: ModelSpec, tensor: int, pipeline: int, pp: int) -> BufferNumel:
    return _aligned(_ends(model, pipeline, pp), tensor)


def _aligned(weights: Iterable[Weight], tensor: int, expert_tensor: int = 1, local_experts: int = 0) -> BufferNumel:
    """Returns the elements of these weights on one rank: those of one layer, or those outside the layers."""
    numels = {True: 0, False: 0}
    for weight in weights:
        size = round_up(megatron_slice(weight, tensor, expert_tensor).numel, _PARAMETER_START)
        numels[weight.is_expert] += size * (local_experts if weight.is_expert else 1)
    return BufferNumel(numels[False], numels[True])
