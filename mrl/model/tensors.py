"""The checkpoint's view of the weight map: names and shapes of all tensors, parameter counts, FLOPs of a token."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mrl.model.hf_config import ModelSpec
from mrl.model.registry import family_of, inner_tensors, weight_map
from mrl.model.weight_map import Inner, Weight, per_expert


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layer: int | None = None  # from 0; None outside of layers
    expert: int | None = None  # global number, from 0
    is_constant: bool = False  # not trained

    @property
    def numel(self) -> int:
        return prod(self.shape)


@cache
def tensor_specs(model: ModelSpec) -> tuple[TensorSpec, ...]:
    """Returns all tensors in the order of the layers, those of a trained vision tower at the end.

    Tied embeddings are one tensor (`model.embed_tokens.weight`), as in the checkpoint files.
    """
    weights = weight_map(model)
    specs = [*_tensors(model, weights.embedding)]
    for layer in range(model.all_layers):
        for weight, expert in per_expert(weights.layer(layer).hf, range(model.num_experts)):
            specs += _tensors(model, weight, layer, expert)
    return (*specs, *(spec for weight in (*weights.ends, *weights.tower) for spec in _tensors(model, weight)))


def _tensors(
    model: ModelSpec, weight: Weight, layer: int | None = None, expert: int | None = None
) -> Iterator[TensorSpec]:
    dtype = weight.dtype or model.dtype
    for part in weight.parts:
        name = part.name.format(layer=layer, expert=expert)
        yield TensorSpec(name, part.shape, dtype, layer, expert, weight.is_constant)


def stored_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the tensors in an export's files, of which one may hold several of the model."""
    stored = family_of(model).stored
    if stored is None:
        return {spec.name: spec.shape for spec in tensor_specs(model)}
    return dict(stored(spec.name, spec.shape, model.num_experts) for spec in tensor_specs(model))


def as_stored(model: ModelSpec, tensors: Mapping[str, NDArray]) -> dict[str, NDArray]:
    """Returns the tensors of a checkpoint's files. `tensors`: those of the model, by name."""
    if family_of(model).stored is None:
        return dict(tensors)
    shapes = stored_shapes(model)
    return {key: _joined(inner_tensors(model, key, shape), shape, tensors) for key, shape in shapes.items()}


def _joined(inner: Iterable[Inner], shape: tuple[int, ...], tensors: Mapping[str, NDArray]) -> NDArray:
    parts = [tensors[each.name].T if each.is_turned else tensors[each.name] for each in inner]
    return np.concatenate([part.reshape(-1) for part in parts]).reshape(shape)


def parameter_count(model: ModelSpec) -> int:
    """Returns the number of parameters. Tied embeddings count once."""
    return _count(model, model.num_experts)


def active_parameter_count(model: ModelSpec) -> int:
    """Returns the number of parameters that one token uses: all except the experts that its router does not choose.

    Includes embeddings, as model cards do.
    """
    return _count(model, model.num_experts_per_tok)


@cache
def _count(model: ModelSpec, experts: int) -> int:
    """Returns the number of parameters with this number of experts in each layer."""
    counted = weight_map(model).counted
    return sum(weight.numel * layers * (experts if weight.is_expert else 1) for weight, layers in counted)


def expert_share(model: ModelSpec) -> float:
    """Returns the share of the parameters in routed experts."""
    experts = parameter_count(model) - _count(model, 0)
    return experts / parameter_count(model)


@cache
def forward_flops_per_token(model: ModelSpec, context: float) -> float:
    """Returns floating-point operations (two for a multiply-add) of one token's forward pass.

    `context`: mean number of positions that a token attends to, including itself. For a causal sequence this is (length
    + 1) / 2, because the masked half need not be computed. Counts matrix products and attention, and in gated delta
    layers a token's operations on the state. A backward pass costs twice as much.
    """
    weights = weight_map(model)
    # a tied output layer multiplies with the embedding, which itself is a look-up
    tied = []
    if model.tie_word_embeddings:
        tied = [(weights.output, 1)]
    matmul = sum(_matmul_numel(model, weight) * layers for weight, layers in (*weights.counted, *tied))
    of_a_pair = model.num_attention_heads * (model.head_dim + model.value_head_dim)
    windows = len(model.window_layers)
    seen = context * (model.attending_layers - windows) + min(context, model.sliding_window) * windows
    scores_and_values = of_a_pair * seen
    # of a token with the state of one gated delta layer: reading by the key, writing, and reading by the query
    state_products = 3 * model.linear_num_value_heads * model.linear_key_head_dim * model.linear_value_head_dim
    return 2.0 * (matmul + scores_and_values + state_products * len(model.linear_layers))


@cache
def module_flops_per_token(model: ModelSpec, context: float) -> Mapping[str, float]:
    """Returns the part of `forward_flops_per_token` in each module that Megatron's selective recompute names."""
    by_module = dict.fromkeys(("core_attn", "mlp", "moe", "shared_experts"), 0.0)
    by_module["core_attn"] = forward_flops_per_token(model, context) - forward_flops_per_token(model, 0)
    for weight, layers in weight_map(model).counted:
        flops = 2.0 * _matmul_numel(model, weight) * layers
        if ".mlp.linear_" in weight.megatron:
            by_module["mlp"] += flops
        elif ".mlp." in weight.megatron:
            by_module["moe"] += flops
            by_module["shared_experts"] += flops * (".mlp.shared_experts." in weight.megatron)
    return MappingProxyType(by_module)


def forward_flops(model: ModelSpec, lengths: Sequence[int], predicted: int) -> float:
    """Returns FLOPs of a forward pass over sequences of these lengths in tokens, without padding.

    `predicted`: tokens whose log-prob is computed. Only these pass through the output layer.
    """
    first = forward_flops_per_token(model, 0)
    per_pair = forward_flops_per_token(model, 1) - first
    tokens = sum(lengths)
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    if windows := len(model.window_layers):
        outside = sum(_pairs_outside(length, model.sliding_window) for length in lengths)
        pairs -= outside * windows / model.attending_layers
    output = 2.0 * sum(part.numel for part in weight_map(model).output.parts)
    return tokens * first + pairs * per_pair - (tokens - predicted) * output


def _pairs_outside(length: int, window: int) -> float:
    """Returns the pairs of a token and one before its window."""
    longer = max(0, length - window)
    return longer * (longer + 1) / 2


def _matmul_numel(model: ModelSpec, weight: Weight) -> int:
    """Returns the elements of a weight that are multiplied with one token in one layer."""
    numel = sum(part.numel for part in weight.parts if part.matmul)
    if weight.is_expert:
        return numel * model.num_experts_per_tok
    return numel
