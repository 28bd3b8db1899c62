"""A critic's last layer: one number for each token instead of logits."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn import Module, Parameter


class ValueHead(Module):
    """A linear layer to one number, without bias, complete on every tensor-parallel rank. It begins at zero.

    So initial values are zero for every token, in any layout, and all later values are learnt. Under sequence
    parallelism each rank multiplies its own tokens. Megatron sums the weight's gradients as it does for norms.
    """

    def __init__(self, output_layer: Module, sequence_parallel: bool) -> None:
        """Copies number format, device and width from `output_layer`, which the head replaces."""
        super().__init__()
        self.weight = Parameter(output_layer.weight.new_zeros(1, output_layer.weight.shape[1]))
        self.weight.sequence_parallel = sequence_parallel
        self._sequence_parallel = sequence_parallel

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Returns float32 [length, batch, 1], all tokens on every tensor-parallel rank.

        Takes [length or part, batch, hidden]. Values are computed in float32 whatever the weights are. In bfloat16, its
        8 bits could not tell near values apart.
        """
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self._sequence_parallel:
            # every rank continues with the same loss, so each takes the gradient of its own tokens, once
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def put_head(chunk: Module, post_process: bool, config: Any, **_: Any) -> None:
    """Replaces a chunk's output layer by a value head if it has one. It is a callback of mbridge."""
    if post_process:
        chunk.output_layer = ValueHead(chunk.output_layer, config.sequence_parallel)


@contextmanager
def head_hidden(chunks: Iterable[Module]) -> Iterator[None]:
    """Hides the value head, until the block ends, from code that walks the parameters by the checkpoint's names."""
    heads = [module for chunk in chunks for module in chunk.modules() if isinstance(module, ValueHead)]
    weights = [head._parameters.pop("weight") for head in heads]
    try:
        yield
    finally:
        for head, weight in zip(heads, weights, strict=True):
            head.register_parameter("weight", weight)
