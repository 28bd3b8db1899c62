"""Which layers an update computes twice: Megatron runs what it will recompute without a graph first, and that is
counted.
"""

from collections.abc import Iterator, Sequence

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn import Module

_PARTS = (
    "input_layernorm",
    "self_attention.core_attention",
    "pre_mlp_layernorm",
    "mlp",
    "mlp.experts",
    "mlp.shared_experts",
)


class RecomputeCount:
    """Counts forward passes without a graph, of whole layers and of the parts that selective recompute names."""

    def __init__(self, chunks: Sequence[Module]):
        """Watches from now on. Nothing but a count changes."""
        self._layers = self._parts = 0
        for layer in (m for chunk in chunks for m in chunk.modules() if isinstance(m, TransformerLayer)):
            layer.register_forward_pre_hook(self._count_layer)
            for part in _parts_of(layer):
                part.register_forward_pre_hook(self._count_part)

    def begin(self) -> None:
        """An update begins."""
        self._layers = self._parts = 0

    @property
    def count(self) -> int:
        """Layers since then, summed over micro-batches; of selective recompute parts of layers."""
        return self._layers or self._parts

    def _count_layer(self, *_) -> None:
        self._layers += not torch.is_grad_enabled()

    def _count_part(self, *_) -> None:
        self._parts += not torch.is_grad_enabled()


def _parts_of(layer: TransformerLayer) -> Iterator[Module]:
    named = dict(layer.named_modules())
    return (named[name] for name in _PARTS if name in named)
