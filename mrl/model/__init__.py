"""A model without its weights: config.json -> ModelSpec, parallel layouts, and the weight map.

The main types are `ModelSpec` (sizes), `WeightMap` and `Weight` (weight_map.py: every tensor in the checkpoint, in
Megatron and in vLLM), `TrainLayout` and `RolloutLayout` (layout.py: ranks and workers), `Box` (boxes.py). A new family
is one file, listed in registry.py. Imports nothing of mrl except `errors`, and neither torch, ray, megatron nor vllm.
"""

from mrl.model.hf_config import ModelSpec
from mrl.model.registry import (
    FAMILIES,
    is_size_of_known,
    known_like,
    known_models,
    known_name,
    known_spec,
    load_model_spec,
    model_spec,
    planning_model_spec,
    read_hf_config,
    with_predicting,
)
from mrl.model.tensors import (
    TensorSpec,
    active_parameter_count,
    expert_share,
    forward_flops,
    forward_flops_per_token,
    module_flops_per_token,
    parameter_count,
    tensor_specs,
)

__all__ = [
    "FAMILIES",
    "ModelSpec",
    "TensorSpec",
    "active_parameter_count",
    "expert_share",
    "forward_flops",
    "forward_flops_per_token",
    "is_size_of_known",
    "known_like",
    "known_models",
    "known_name",
    "known_spec",
    "load_model_spec",
    "model_spec",
    "module_flops_per_token",
    "parameter_count",
    "planning_model_spec",
    "read_hf_config",
    "tensor_specs",
    "with_predicting",
]
