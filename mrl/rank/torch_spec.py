"""Layers in plain torch under Transformer Engine's parameter names, for installations without Transformer Engine.

mbridge maps Transformer Engine's names. There, the norm before a linear layer belongs to that layer, and experts are
`weight{i}` of one grouped layer. So a model of these modules loads and exports without changes to mbridge. Attributes
on parameters tell Megatron how their gradients are summed. A wrong one leaves the loss right and makes the gradient
wrong.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from mrl.model.hf_config import LayerKind, ModelSpec
from mrl.platforms.replicated_linear import ReplicatedLinear
from mrl.rank.attention import CausalAttention, SinkAttention
from mrl.rank.gated_delta import GatedDelta

# Fusions and schedules that need Transformer Engine, Apex or a CUDA kernel.
CONFIG_WITHOUT_TRANSFORMER_ENGINE = {
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "deallocate_pipeline_outputs": False,
}


def _norm_weight(size: int, config: TransformerConfig) -> torch.nn.Parameter:
    fill = 0.0 if config.layernorm_zero_centered_gamma else 1.0
    weight = torch.nn.Parameter(torch.full((size,), fill, dtype=config.params_dtype))
    # Under sequence parallelism each tensor rank sees its own tokens (or heads); this requests the sum over tensor
    # ranks.
    weight.sequence_parallel = config.sequence_parallel
    return weight


def normed(x: Tensor, weight: Tensor, eps: float, is_zero_centered: bool) -> Tensor:
    """Applies RMSNorm over the last dimension.

    A zero-centred weight stands for 1 + weight. A 16-bit format would round that sum and the product.
    """
    if is_zero_centered:
        return F.rms_norm(x.float(), (x.shape[-1],), 1.0 + weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class Norm(torch.nn.Module):
    """RMSNorm over the last dimension, named as TENorm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__()
        self.weight = _norm_weight(hidden_size, config)
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.weight, self.eps, self.is_zero_centered)


class WideQueryNorm(torch.nn.Module):
    """RMSNorm over the queries of all heads, which lie on several tensor ranks.

    Every rank has the whole weight and multiplies by its heads' part. Megatron sums the weight's gradients over tensor
    ranks, as of all norms of queries and keys (finalize_model_grads.py).
    """

    heads = "num_attention_heads"  # the configuration's number of heads on all ranks

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__()
        self.size = getattr(config, self.heads) * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(self.size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns this rank's heads, [..., heads, dim]."""
        group = get_tensor_model_parallel_group()
        flat = x.flatten(-2)
        squares = flat.float().square().sum(-1, keepdim=True)
        if group.size() > 1:
            squares = _SumOverRanks.apply(squares, group)
        first = group.rank() * flat.shape[-1]
        weight = self.weight[first : first + flat.shape[-1]]
        normal = flat.float() * torch.rsqrt(squares / self.size + self.eps)
        return (normal.to(x.dtype) * weight).unflatten(-1, x.shape[-2:])


class WideKeyNorm(WideQueryNorm):
    """The norm of the keys of all heads."""

    heads = "num_query_groups"


class _SumOverRanks(torch.autograd.Function):
    """A sum over ranks that all ranks use. So the gradient of each summand is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm and column-parallel linear in one, named as TELayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(input_size, config)

    def forward(self, x: Tensor, *args, **kwargs):
        config = self.config
        x = normed(x, self.layer_norm_weight, config.layernorm_epsilon, config.layernorm_zero_centered_gamma)
        return super().forward(x, *args, **kwargs)


class GroupedLinear(torch.nn.Module):
    """The local experts' matrices `weight{i}` [output, input], named as TEColumnParallelGroupedLinear."""

    partition_dim = 0

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None = None,
        pg_collection=None,
    ):
        super().__init__()
        expert_tensor_size = pg_collection.expt_tp.size()
        if not is_expert or (bias and expert_tensor_size > 1):
            raise ValueError("grouped linear layers are for experts, which are not cut if they have biases")
        self.adds_bias = bias and not skip_bias_add
        shape = [output_size, input_size]
        shape[self.partition_dim] //= expert_tensor_size
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            if config.perform_initialization:
                with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                    init_method(weight.data)
            # mbridge gathers parameters with these attributes over tensor ranks, so unsliced experts must not have them
            if expert_tensor_size > 1:
                set_tensor_model_parallel_attributes(weight, True, self.partition_dim, 1)
            self.register_parameter(f"weight{i}", weight)
            if bias:
                self.register_parameter(f"bias{i}", torch.nn.Parameter(weight.new_zeros(shape[0])))
        self.biases = [f"bias{i}" for i in range(num_gemms if bias else 0)]

    def forward(self, x: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """Takes `x` [tokens, input], sorted by expert. Returns [tokens, output], and biases that the caller adds."""
        parts = x.split(list(tokens_per_expert))
        biases = [getattr(self, name) for name in self.biases]
        added = biases if self.adds_bias else [None] * len(parts)
        out = [F.linear(part, getattr(self, f"weight{i}"), added[i]) for i, part in enumerate(parts)]
        return torch.cat(out), biases if biases and not self.adds_bias else None

    def backward_dw(self) -> None:
        """Does nothing, because weight gradients are never delayed here."""


class GroupedRowLinear(GroupedLinear):
    """The second matrices of the local experts, named as TERowParallelGroupedLinear."""

    partition_dim = 1


class ClampedGate(torch.nn.Module):
    """gpt-oss' product of gate and up, whose columns come in turns: gate x sigmoid(1.702 gate) x (up + 1), clamped.

    Megatron's own takes halves, as it calls Transformer Engine's of an activation with a gate.
    """

    limit = 7.0
    alpha = 1.702

    def __init__(self, config: TransformerConfig):
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Takes [..., 2 x size], returns [..., size]."""
        gate = x[..., ::2].clamp(max=self.limit)
        up = x[..., 1::2].clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


class TorchSpecProvider(BackendSpecProvider):
    """Provides these modules to Megatron's layer specs."""

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return Norm

    def core_attention(self) -> type:
        return CausalAttention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules]:
        return TEGroupedMLP, MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedRowLinear)

    def activation_func(self) -> None:
        return None


def decoder_block_spec(
    config: TransformerConfig, vp_stage: int | None = None, by_kind: bool = False
) -> TransformerBlockSubmodules:
    """Returns the layers of one of this rank's model chunks.

    `by_kind`: whether projections of gated delta attention are ordered by kind.
    """
    kinds = [_kind(config, layer) for layer in _layers_to_build(config, vp_stage)]
    of_kind = {kind: _layer_spec(config, kind, by_kind) for kind in set(kinds)}
    return TransformerBlockSubmodules(layer_specs=[of_kind[kind] for kind in kinds], layer_norm=Norm)


def with_gated_delta(
    block: TransformerBlockSubmodules, config: TransformerConfig, vp_stage: int | None = None, by_kind: bool = False
) -> TransformerBlockSubmodules:
    """Returns Megatron's layers of one of this rank's model chunks, with gated delta attention in its layers.

    The norm before it has the class of the norm after the layers. `by_kind`: whether its projections are ordered by
    kind.
    """
    layers = [
        _linear_layer(spec, block.layer_norm, by_kind) if _kind(config, layer).is_linear else spec
        for spec, layer in zip(block.layer_specs, _layers_to_build(config, vp_stage), strict=True)
    ]
    return replace(block, layer_specs=layers)


def with_wide_norms(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Returns the layers with one norm over the queries of all heads, and one over the keys."""

    def changed(spec: ModuleSpec) -> ModuleSpec:
        attention = spec.submodules.self_attention
        norms = replace(attention.submodules, q_layernorm=WideQueryNorm, k_layernorm=WideKeyNorm)
        submodules = replace(spec.submodules, self_attention=replace(attention, submodules=norms))
        return replace(spec, submodules=submodules)

    return replace(block, layer_specs=[changed(spec) for spec in block.layer_specs])


def with_sinks(block: TransformerBlockSubmodules, model: ModelSpec) -> TransformerBlockSubmodules:
    """Returns the layers with attention that has sinks and windows, on every device.

    Transformer Engine 2.11 has sinks in no kernel that takes packs (dot_product_attention/utils.py,
    get_attention_backend).
    """
    windows = tuple(model.sliding_window * (layer in model.window_layers) for layer in range(model.num_layers))
    core = ModuleSpec(module=SinkAttention, params={"windows": windows})

    def changed(spec: ModuleSpec) -> ModuleSpec:
        attention = spec.submodules.self_attention
        parts = replace(attention.submodules, core_attention=core)
        submodules = replace(spec.submodules, self_attention=replace(attention, submodules=parts))
        return replace(spec, submodules=submodules)

    return replace(block, layer_specs=[changed(spec) for spec in block.layer_specs])


def with_clamped_experts(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Returns the layers with gpt-oss' product of gate and up in their experts."""

    def changed(spec: ModuleSpec) -> ModuleSpec:
        mlp = spec.submodules.mlp
        experts = mlp.submodules.experts
        parts = replace(experts.submodules, activation_func=ClampedGate)
        inner = replace(mlp.submodules, experts=replace(experts, submodules=parts))
        return replace(spec, submodules=replace(spec.submodules, mlp=replace(mlp, submodules=inner)))

    return replace(block, layer_specs=[changed(spec) for spec in block.layer_specs])


def _linear_layer(spec: ModuleSpec, norm: type, by_kind: bool) -> ModuleSpec:
    submodules = replace(spec.submodules, input_layernorm=norm, self_attention=_gated_delta_spec(by_kind))
    return replace(spec, submodules=submodules)


def _gated_delta_spec(by_kind: bool) -> ModuleSpec:
    return ModuleSpec(module=GatedDelta, params={"by_kind": by_kind})


def _layers_to_build(config: TransformerConfig, vp_stage: int | None) -> Sequence[int]:
    """Returns global numbers, from 0, of a chunk's layers."""
    if layout := config.pipeline_model_parallel_layout:
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))


def _kind(config: TransformerConfig, layer: int) -> LayerKind:
    """Returns the kind of a layer.

    `moe_layer_freq` is a list of 0 and 1 for each layer, or the interval of layers with experts.
    `linear_attention_freq` is such a list, or None.
    """
    freq = config.moe_layer_freq
    has_experts = bool(freq[layer] if isinstance(freq, list) else layer % freq == 0)
    linear = config.linear_attention_freq
    return LayerKind(config.num_moe_experts is not None and has_experts, linear is not None and bool(linear[layer]))


def _layer_spec(config: TransformerConfig, kind: LayerKind, by_kind: bool) -> ModuleSpec:
    mlp = get_mlp_module_spec_for_backend(
        TorchSpecProvider(),
        num_experts=config.num_moe_experts if kind.has_experts else None,
        moe_grouped_gemm=kind.has_experts,
    )
    has_fused_norm = not (kind.is_linear or config.multi_latent_attention)
    submodules = TransformerLayerSubmodules(
        # the norm belongs to a fused projection of queries, keys and values
        input_layernorm=IdentityOp if has_fused_norm else Norm,
        self_attention=_attending_spec(config, kind, by_kind),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=Norm if kind.has_experts else IdentityOp,
        mlp=mlp,
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def _attending_spec(config: TransformerConfig, kind: LayerKind, by_kind: bool) -> ModuleSpec:
    if kind.is_linear:
        return _gated_delta_spec(by_kind)
    if config.multi_latent_attention:
        return _latent_attention_spec()
    return _attention_spec(config)


def _attention_spec(config: TransformerConfig) -> ModuleSpec:
    submodules = SelfAttentionSubmodules(
        linear_qkv=NormColumnParallelLinear,
        core_attention=CausalAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=Norm if config.qk_layernorm else IdentityOp,
        k_layernorm=Norm if config.qk_layernorm else IdentityOp,
    )
    return ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)


def _latent_attention_spec() -> ModuleSpec:
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=ReplicatedLinear,
        linear_q_up_proj=NormColumnParallelLinear,
        linear_kv_down_proj=ReplicatedLinear,
        linear_kv_up_proj=NormColumnParallelLinear,
        core_attention=CausalAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )
    return ModuleSpec(module=MLASelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)
