"""Gradients of weights are added to Megatron's float32 buffers within the product that makes them, where Transformer
Engine computes it.

Otherwise its modules hand out a gradient in the weights' 16 bits, which is added afterwards: rounded once a
micro-batch, and written and read once more. Megatron's `gradient_accumulation_fusion` would switch it on too, but then
its output layer is not built without Apex, and of that layer only the weight is used here (mrl.megatron.logprob).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module

# of modules of Transformer Engine, which read it at every forward (2.11: transformer_engine/pytorch/module/linear.py,
# layernorm_linear.py and grouped_linear.py)
SWITCH = "fuse_wgrad_accumulation"
_FIELD = "gradient_accumulation_fusion"


def is_wanted(overrides: Mapping[str, Any]) -> bool:
    """Whether fields of Megatron's transformer config leave this on, as it is by itself."""
    return overrides.get(_FIELD) is not False


def for_megatron(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that Megatron is given where Transformer Engine's modules are told here."""
    return {name: value for name, value in overrides.items() if name != _FIELD}


def add_within_products(chunks: Iterable[Module]) -> None:
    """Lets every module that can add gradients within its matrix product, where its weights have float32 buffers.

    The chunks are wrapped for data parallelism, which makes the buffers. It knows by `grad_added_to_main_grad` what has
    been added.
    """
    for module in _able(chunks):
        setattr(module, SWITCH, _has_float32_buffers(module))


def added_within_products(chunks: Iterable[Module]) -> tuple[int, int]:
    """Counts the modules that add gradients within their products, and those that could."""
    able = [bool(getattr(module, SWITCH)) for module in _able(chunks)]
    return sum(able), len(able)


def _able(chunks: Iterable[Module]) -> Iterator[Module]:
    return (module for chunk in chunks for module in chunk.modules() if hasattr(module, SWITCH))


def _has_float32_buffers(module: Module) -> bool:
    """Whether all weights that learn have one; norms and biases beside them get their gradients as before.

    Adapters below the module are no weights of its product.
    """
    own = module.parameters(recurse=False)
    buffers = [getattr(p, "main_grad", None) for p in own if p.requires_grad and p.dim() > 1]
    return bool(buffers) and all(buffer is not None and buffer.dtype is torch.float32 for buffer in buffers)
