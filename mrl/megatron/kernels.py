"""What a rank really computes with, read off its modules: what was asked for, and what Megatron made of it,
may differ.
"""

from collections.abc import Iterable

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import nn

from mrl.platforms.layers import layers

_PARTS = {"attention": ".core_attention", "experts": ".mlp.experts", "norm": ".final_layernorm"}


def kernels_in_words(chunks: Iterable[nn.Module], optimizer: MegatronOptimizer) -> str:
    """Layers, and the classes of attention, experts, last norm and Adam, as far as this rank's chunks have them."""
    parts = [f"{part} {kind}" for part, kind in _classes(chunks).items()]
    return ", ".join([f"layers of {layers()}", *parts, f"optimizer {_adam(optimizer)}"])


def _classes(chunks: Iterable[nn.Module]) -> dict[str, str]:
    """Part -> class of the first module that is it; of experts also that of their first layer, where the product is."""
    classes: dict[str, str] = {}
    for chunk in chunks:
        for name, module in chunk.named_modules():
            for part, ending in _PARTS.items():
                if part not in classes and name.endswith(ending):
                    first = getattr(module, "linear_fc1", None)
                    classes[part] = type(module).__name__ + (f" of {type(first).__name__}" if first is not None else "")
    return classes


def _adam(optimizer: MegatronOptimizer) -> str:
    """With its package: torch's and Transformer Engine's have one name for two speeds and two appetites."""
    inner: torch.optim.Optimizer | None = next(
        (part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None), None
    )
    return "none" if inner is None else f"{type(inner).__name__} of {type(inner).__module__.partition('.')[0]}"
