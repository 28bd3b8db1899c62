"""A critic's last layer: a number for each token in place of the logits."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn import Module, Parameter


class ValueHead(Module):
    """A linear layer to one number, without bias, whole on every tensor-parallel rank; it begins at zero.

    Zero says nothing of any token, whatever the layout: what a critic has learned is all that its values are. Under
    sequence parallelism each rank multiplies its own tokens, and Megatron sums the gradients of the weight as it does
    for norms.
    """

    def __init__(self, output_layer: Module, sequence_parallel: bool) -> None:
        """`output_layer`: in whose place it stands, which has the number format, the device and the width."""
        super().__init__()
        self.weight = Parameter(output_layer.weight.new_zeros(1, output_layer.weight.shape[1]))
        self.weight.sequence_parallel = sequence_parallel
        self._sequence_parallel = sequence_parallel

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """float32 [length, batch, 1], all tokens on every tensor-parallel rank, from [length or part, batch, hidden].

        Values are computed in float32 whatever the weights are: 8 bits would tell no two of them apart.
        """
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self._sequence_parallel:
            # every rank goes on with the same loss, so each takes the gradient of its own tokens, once
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def put_head(chunk: Module, post_process: bool, config: Any, **_: Any) -> None:
    """Puts a value head in the place of a chunk's output layer, where it has one; a callback of mbridge."""
    if post_process:
        chunk.output_layer = ValueHead(chunk.output_layer, config.sequence_parallel)


@contextmanager
def head_hidden(chunks: Iterable[Module]) -> Iterator[None]:
    """The chunks have no value head, for whoever goes through their parameters by the checkpoint's names."""
    heads = [module for chunk in chunks for module in chunk.modules() if isinstance(module, ValueHead)]
    weights = [head._parameters.pop("weight") for head in heads]
    try:
        yield
    finally:
        for head, weight in zip(heads, weights, strict=True):
            head.register_parameter("weight", weight)
