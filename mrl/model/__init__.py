"""Hugging Face configurations -> sizes, tensor lists and counts. No weights, no torch."""

from mrl.model.counts import active_parameter_count, forward_flops_per_token, parameter_count
from mrl.model.known import known_models, known_name, known_spec, planning_model_spec
from mrl.model.reader import FAMILIES, load_model_spec, model_spec, read_hf_config
from mrl.model.spec import Kind, ModelSpec, TensorSpec
from mrl.model.tensors import tensor_specs

__all__ = [
    "FAMILIES",
    "Kind",
    "ModelSpec",
    "TensorSpec",
    "active_parameter_count",
    "forward_flops_per_token",
    "known_models",
    "known_name",
    "known_spec",
    "load_model_spec",
    "model_spec",
    "parameter_count",
    "planning_model_spec",
    "read_hf_config",
    "tensor_specs",
]
