"""Batch invariance on CPU: the bits of a token do not depend on how many are computed at once.

Sigmoids: torch has a vector function for whole registers, and another function for the values behind the last one. A
token may have fewer values than a register: the gate of a shared expert has one, the router of a small model a few. The
number of tokens then decides which values go through which function. So tensors are padded to whole registers here.

Linears in 16 bits: on processors with AMX, oneDNN chooses a kernel by the number of rows. Kernels add up products in
different orders. So rows are computed in blocks of one size. vLLM has another kernel for small weights. Up to four
tokens it adds up in another order than more, so it is left to integers. Private in vLLM: `ops.onednn_mm`, and
`check_cpu_sgl_kernel`, which says where the small kernel is used.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

VALUES = 64  # a multiple of every register's size, and of torch's step through a tensor
ROWS = 32  # two tiles of AMX


def install() -> None:
    """Changes this process. A second call changes nothing. `F.sigmoid` calls the method, so it is changed too."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers import utils

    if not hasattr(torch.Tensor.sigmoid, "__wrapped__"):
        torch.Tensor.sigmoid = of_whole_registers(torch.Tensor.sigmoid)
        ops.onednn_mm = of_blocks(ops.onednn_mm)
        utils.check_cpu_sgl_kernel = for_integers(utils.check_cpu_sgl_kernel)


def of_blocks(product: Callable[[Any, Tensor, Tensor | None], Tensor]) -> Callable[..., Tensor]:
    """Wraps `product` of (weight, rows [..., in], bias). In 16 bits the number of rows then changes no bit."""

    @wraps(product)
    def in_blocks(weight: Any, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        if rows.element_size() != 2:
            return product(weight, rows, bias)
        flat = rows.reshape(-1, rows.shape[-1])
        filled = F.pad(flat, (0, 0, 0, -len(flat) % ROWS))
        blocks = [product(weight, block, bias) for block in filled.split(ROWS)]
        answer = torch.cat(blocks)[: len(flat)]
        return answer.view(*rows.shape[:-1], answer.shape[-1])

    return in_blocks


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
