"""A linear layer that is replicated on every tensor rank. Megatron only has Transformer Engine's."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class ReplicatedLinear(torch.nn.Module):
    """A linear layer that is equal on all tensor ranks, each with its own tokens. Same as TELinear in mode
    `duplicated`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str,
        config: Any,
        init_method: Any,
        bias: bool,
        **_: Any,
    ):
        super().__init__()
        if bias or parallel_mode != "duplicated":
            raise ValueError("a replicated linear layer has no bias and is not cut")
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight.data)
        # requests the sum over tensor ranks, each of which has its own tokens
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Maps `x` [..., input] to [..., output]."""
        return F.linear(x, self.weight), None

    def backward_dw(self) -> None:
        """Does nothing: weight gradients are never delayed here."""
