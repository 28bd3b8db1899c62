"""Sigmoids on CPU whose bits do not depend on how many tokens are computed at once.

torch has a vector function for whole registers, and another function for the values behind the last one. A token may
have fewer values than a register: the gate of a shared expert has one, the router of a small model a few. The number of
tokens then decides which values go through which function. So tensors are padded to whole registers here.
"""

from collections.abc import Callable
from functools import wraps

import torch
import torch.nn.functional as F
from torch import Tensor

VALUES = 64  # a multiple of every register's size, and of torch's step through a tensor


def install() -> None:
    """Changes this process. A second call changes nothing. `F.sigmoid` calls the method, so it is changed too."""
    if not hasattr(torch.Tensor.sigmoid, "__wrapped__"):
        torch.Tensor.sigmoid = of_whole_registers(torch.Tensor.sigmoid)


def of_whole_registers(sigmoid: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wraps `sigmoid` of any shape, so that the bits of a value do not depend on its position."""

    @wraps(sigmoid)
    def filled(values: Tensor) -> Tensor:
        if values.device.type != "cpu":
            return sigmoid(values)
        missing = -values.numel() % VALUES
        if not missing:
            return sigmoid(values.contiguous())  # torch computes a view row by row, and each row has an end
        answer = sigmoid(F.pad(values.reshape(-1), (0, missing)))
        return answer[: values.numel()].view(values.shape)

    return filled
