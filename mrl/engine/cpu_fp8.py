"""FP8 engines on a CPU: a stand-in that holds what devices hold, and computes in the engine's dtype.

vLLM's own CPU kernels for FP8 need AMX and know only blocks of 128. They also pack FP8 values where no sync could write
them. Here linear layers and experts have the parameters that vLLM makes for such checkpoints. They are FP8 values and
scales in vLLM's shapes, filled by its weight loaders. Each use computes with FP8 values times scales, rounded to the
engine's dtype. A device gives close results and not the same bits, since it also quantises activations.

CpuWorker installs it in vLLM's worker processes of quantised engines, and nowhere else. Private in vLLM, and why it is
touched:

* `Fp8Config.get_quant_method`: chooses the method that computes a layer.
* `Fp8MoEMethod.create_weights`: makes the experts' parameters; its constructor would look for a kernel and find none.
* `make_unquantized_moe_kernel`, `cpu_prepack_moe_weight`: the kernel of experts that are not quantised.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.oracle.unquantized import make_unquantized_moe_kernel
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
    validate_fp8_block_shape,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.parameter import BlockQuantScaleParameter

LEAST_ROWS = 16  # products of fewer rows are computed differently, so a token's bits would depend on the others


def install() -> None:
    """Makes vLLM's `Fp8Config` choose the stand-ins in this process. A second call changes nothing."""
    Fp8Config.get_quant_method = quant_method


def quant_method(config: Fp8Config, layer: nn.Module, prefix: str) -> Any:
    """Returns the method of a layer: a stand-in where vLLM quantises, else vLLM's own unquantised method."""
    is_linear = isinstance(layer, LinearBase)
    if not is_linear and not isinstance(layer, RoutedExperts):
        return None
    is_kept = is_layer_skipped(prefix, config.ignored_layers, config.packed_modules_mapping)
    if is_linear:
        return UnquantizedLinearMethod() if is_kept else Fp8Linear(config.weight_block_size)
    return UnquantizedFusedMoEMethod(layer.moe_config) if is_kept else Fp8Experts(config, layer)


@register_weight_loader_v2_supported_method
class Fp8Linear(LinearMethodBase):
    """A linear layer of FP8 values and scales, filled by vLLM's own loaders."""

    def __init__(self, block: list[int]):
        """`block`: rows and columns of one block."""
        self.block = block

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Makes the parameters of vLLM's Fp8LinearMethod. Raises ValueError for a layer that cuts a block."""
        loader = attributes.get("weight_loader")
        layer.weight_block_size = self.block  # vLLM's loaders of fused layers read it
        sizes = (input_size, output_size, input_size_per_partition, output_partition_sizes)
        validate_fp8_block_shape(layer, *sizes, self.block)
        weights = create_fp8_weight_parameter(sum(output_partition_sizes), input_size_per_partition, loader)
        scales = create_fp8_scale_parameter(
            BlockQuantScaleParameter, output_partition_sizes, input_size_per_partition, self.block, loader
        )
        layer.register_parameter("weight", weights)
        layer.register_parameter("weight_scale_inv", scales)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies [..., in] with the weight and returns [..., out]."""
        weight = dequantised(layer.weight, layer.weight_scale_inv, self.block, x.dtype)
        return of_many_rows(x, weight, bias)


class Fp8Experts(Fp8MoEMethod):
    """Experts of FP8 values and scales, computed by the kernel for experts that are not quantised."""

    def __init__(self, config: Fp8Config, layer: RoutedExperts):
        super(Fp8MoEMethod, self).__init__(layer.moe_config)  # Fp8MoEMethod's own looks for an FP8 kernel, in vain
        self.quant_config = config
        self.weight_block_size = self.moe_block_shape = config.weight_block_size
        self.block_quant = True
        self.weight_scale_name = "weight_scale_inv"
        self.weight_scale_refine = None
        self.plain = UnquantizedFusedMoEMethod(layer.moe_config)
        self.unquantized_backend = self.plain.unquantized_backend

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Leaves FP8 values and scales as they were loaded, and makes the kernel once."""
        if self.moe_kernel is None:
            self.moe_quant_config = self.plain.get_fused_moe_quant_config(layer)
            self.moe_kernel = make_unquantized_moe_kernel(
                quant_config=self.moe_quant_config,
                moe_config=self.moe,
                backend=self.unquantized_backend,
                experts_cls=self.plain.experts_cls,
                routing_tables=layer._expert_routing_tables(),
            )

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> Any:
        """Returns the configuration of experts that are not quantised, since their kernel computes."""
        return self.plain.get_fused_moe_quant_config(layer)

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Returns the output of the chosen experts for each token, [tokens, hidden]."""
        isa = self.moe_kernel.fused_experts.isa
        packed = [
            cpu_prepack_moe_weight(dequantised(weights, scales, self.weight_block_size, x.dtype), isa)
            for weights, scales in (
                (layer.w13_weight, layer.w13_weight_scale_inv),
                (layer.w2_weight, layer.w2_weight_scale_inv),
            )
        ]
        return self.moe_kernel.apply(
            hidden_states=x,
            w1=packed[0],
            w2=packed[1],
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )


def dequantised(weights: Tensor, scales: Tensor, block: list[int], dtype: torch.dtype) -> Tensor:
    """Multiplies FP8 values [..., rows, columns] with the scales of their blocks in float32, and rounds to `dtype`."""
    for axis in (-2, -1):
        scales = scales.repeat_interleave(block[axis], axis).narrow(axis, 0, weights.shape[axis])
    return (weights.float() * scales).to(dtype)


def of_many_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies [..., in] to [..., out] in float32. The bits do not depend on the number of rows."""
    rows = x.reshape(-1, x.shape[-1])
    missing = max(0, LEAST_ROWS - len(rows))
    many = F.pad(rows, (0, 0, 0, missing)).float()
    answer = F.linear(many, weight.float(), None if bias is None else bias.float())
    return answer[: len(rows)].to(x.dtype).view(*x.shape[:-1], -1)
