"""Adds gradients of weights to Megatron's float32 buffers within the matrix product, where Transformer Engine computes
it.

Otherwise its modules return a gradient in the weights' 16 bits, which is added afterwards. That rounds it once for each
micro-batch, and writes and reads it once more. Megatron's `gradient_accumulation_fusion` would switch this on too. But
then Megatron does not build its output layer without Apex. mrl.rank.logprob needs that layer's weight.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module

# an attribute of Transformer Engine's modules, read in each forward (2.11: transformer_engine/pytorch/module/linear.py,
# layernorm_linear.py and grouped_linear.py)
SWITCH = "fuse_wgrad_accumulation"
_FIELD = "gradient_accumulation_fusion"


def is_wanted(overrides: Mapping[str, Any]) -> bool:
    """Tells whether Megatron's transformer config leaves this on, as it is by default."""
    return overrides.get(_FIELD) is not False


def for_megatron(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields for Megatron's config. Transformer Engine's modules are configured here instead."""
    return {name: value for name, value in overrides.items() if name != _FIELD}


def add_within_products(chunks: Iterable[Module]) -> None:
    """Switches it on in every module that can add gradients within its product and has float32 buffers.

    The chunks are wrapped for data parallelism, which makes the buffers. The wrapper reads from
    `grad_added_to_main_grad` whether a gradient was added.
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
    """Tells whether all trained weights have a float32 buffer.

    Norms and biases beside them get their gradients in the usual way. Adapters inside the module are not weights of its
    product.
    """
    own = module.parameters(recurse=False)
    buffers = [getattr(p, "main_grad", None) for p in own if p.requires_grad and p.dim() > 1]
    return bool(buffers) and all(buffer is not None and buffer.dtype is torch.float32 for buffer in buffers)
