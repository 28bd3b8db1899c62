"""Sigmoids on CPU, to bits that do not depend on how many tokens are computed at once.

torch takes a vector function for whole registers, and another one for what is behind the last of them. Where a token
has fewer values than a register (the gate of a shared expert has one, the router of a small model some), the number of
tokens says which values those are. Here they are filled up to whole registers.
"""

from collections.abc import Callable
from functools import wraps

import torch
import torch.nn.functional as F
from torch import Tensor

VALUES = 64  # a multiple of what any register holds, and of what torch takes in one turn


def install() -> None:
    """Changes this process; a second time changes nothing. `F.sigmoid` goes by the method too."""
    if not hasattr(torch.Tensor.sigmoid, "__wrapped__"):
        torch.Tensor.sigmoid = of_whole_registers(torch.Tensor.sigmoid)


def of_whole_registers(sigmoid: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`sigmoid` of any shape, each value to the same bits wherever it stands."""

    @wraps(sigmoid)
    def filled(values: Tensor) -> Tensor:
        if values.device.type != "cpu":
            return sigmoid(values)
        missing = -values.numel() % VALUES
        if not missing:
            return sigmoid(values.contiguous())  # of a view torch goes through rows, each with an end of its own
        answer = sigmoid(F.pad(values.reshape(-1), (0, missing)))
        return answer[: values.numel()].view(values.shape)

    return filled
