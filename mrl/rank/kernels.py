"""Names the kernels that a rank really computes with, read from its modules.

What Megatron builds may differ from what was configured.
"""

from collections.abc import Iterable, Iterator

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import nn

from mrl.platforms.hosting import grouped_gemm_text
from mrl.platforms.layers import layers
from mrl.rank.gradient_sums import added_within_products
from mrl.rank.logprob import head_gradient_text

_PARTS = {"attention": ".core_attention", "experts": ".mlp.experts", "norm": ".final_layernorm"}


def kernels_text(chunks: Iterable[nn.Module], optimizer: MegatronOptimizer) -> str:
    """Names the classes of layers, attention, experts, last norm and Adam, as far as this rank's chunks have them.

    It also says how gradients of 16-bit weights are summed.
    """
    chunks = list(chunks)
    classes = _classes(chunks)
    parts = [f"{part} {kind}" for part, kind in classes.items()]
    if " of TE" in classes.get("experts", ""):
        parts.append(grouped_gemm_text())
    return ", ".join([f"layers of {layers()}", *parts, *_gradient_sums(chunks), f"optimizer {_adam(optimizer)}"])


def _gradient_sums(chunks: list[nn.Module]) -> Iterator[str]:
    weights = {name: p for chunk in chunks for name, p in chunk.named_parameters() if p.requires_grad and p.dim() > 1}
    if all(weight.dtype is torch.float32 for weight in weights.values()):
        return
    within, able = added_within_products(chunks)
    yield f"gradients of {within} of {able} fused modules added in float32 within the product"
    head = next((weight for name, weight in weights.items() if name.endswith("output_layer.weight")), None)
    if head is not None:
        yield f"that of the head by {head_gradient_text(head)}"


def _classes(chunks: Iterable[nn.Module]) -> dict[str, str]:
    """Returns part -> class of the first module of that part.

    For experts it adds the class of their first layer, which computes the product.
    """
    classes: dict[str, str] = {}
    for chunk in chunks:
        for name, module in chunk.named_modules():
            for part, ending in _PARTS.items():
                if part not in classes and name.endswith(ending):
                    first = getattr(module, "linear_fc1", None)
                    classes[part] = type(module).__name__ + (f" of {type(first).__name__}" if first is not None else "")
    return classes


def _adam(optimizer: MegatronOptimizer) -> str:
    """Returns the Adam's name with its package.

    torch's and Transformer Engine's Adam share a name but not speed and memory.
    """
    inner: torch.optim.Optimizer | None = next(
        (part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None), None
    )
    if inner is None:
        return "none"
    return f"{type(inner).__name__} of {type(inner).__module__.partition('.')[0]}"
