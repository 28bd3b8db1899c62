"""Batch invariance on CPU: the bits of a token do not depend on how many are computed at once.

Sigmoids: torch has a vector function for whole registers, and another function for the values behind the last one. A
token may have fewer values than a register: the gate of a shared expert has one, the router of a small model a few. The
number of tokens then decides which values go through which function. So tensors are padded to whole registers here.

Linears: on processors with AMX, vLLM has a kernel for small weights in 16 bits. It adds up the products of one to four
tokens in another order than those of five and more. oneDNN's kernels, which vLLM has for all other weights, do not.
Private in vLLM: `check_cpu_sgl_kernel`, which says where the small kernel is used.
"""

from collections.abc import Callable
from functools import wraps

import torch
import torch.nn.functional as F
from torch import Tensor

VALUES = 64  # a multiple of every register's size, and of torch's step through a tensor


def install() -> None:
    """Changes this process. A second call changes nothing. `F.sigmoid` calls the method, so it is changed too."""
    from vllm.model_executor.layers import utils

    if not hasattr(torch.Tensor.sigmoid, "__wrapped__"):
        torch.Tensor.sigmoid = of_whole_registers(torch.Tensor.sigmoid)
        utils.check_cpu_sgl_kernel = for_integers(utils.check_cpu_sgl_kernel)


def for_integers(is_small: Callable[[int, int, torch.dtype], bool]) -> Callable[[int, int, torch.dtype], bool]:
    """Wraps what chooses the small kernel for a weight [n, k] of a dtype, so that only integers get it."""

    @wraps(is_small)
    def chosen(n: int, k: int, dtype: torch.dtype) -> bool:
        return not dtype.is_floating_point and is_small(n, k, dtype)

    return chosen


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
