"""Fixes for latent attention in vLLM 0.32's CPU platform. CpuWorker installs them, only for models that need them.

* `RotaryEmbedding.forward_cpu`: its kernel rotates parts of wider rows wrongly, without an error. Latent attention
  passes only such parts. Angles that yarn stretches are computed by torch already.
* `torch.bmm`, and `layer.cpu_linear` of the projection that makes keys and values: MKL computes few rows differently
  from many. The result of a token would depend on how many others are computed. So few rows are padded, and in 16
  bits rows are computed in blocks of one size.
* `split_decodes_and_prefills`: a prompt of one token is computed as a prompt or as decoding, depending on what stands
  before it in the batch. Here it is always a prompt.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.engine.cpu_batch_invariance import ROWS, of_blocks

LEAST_ROWS = 16  # MKL computes 4 rows and more in one way, as the module's test shows


def install() -> None:
    """Installs the fixes in this process. A second call changes nothing."""
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if hasattr(torch.bmm, "__wrapped__"):
        return
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    torch.bmm = bmm_of_many_rows(torch.bmm)
    mla_attention.split_decodes_and_prefills = prompts_as_prompts(mla_attention.split_decodes_and_prefills)
    UnquantizedLinearMethod.process_weights_after_loading = _with_linear_of_many_rows(
        UnquantizedLinearMethod.process_weights_after_loading
    )


def prompts_as_prompts(split: Callable[..., tuple[int, ...]]) -> Callable[..., tuple[int, ...]]:
    """Wraps `split`, which divides a batch into decodes and prompts, so that short prompts never count as decodes."""

    @wraps(split)
    def by_phase(*arguments: Any, **named: Any) -> tuple[int, ...]:
        return split(*arguments, **(named | {"treat_short_extends_as_decodes": False}))

    return by_phase


def bmm_of_many_rows(bmm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps `bmm` ([batch, rows, in] x [batch, in, out]) so that bits do not depend on the number of rows."""

    @wraps(bmm)
    def of_many(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
        rows = left.shape[1]
        block = ROWS if left.element_size() == 2 else max(rows, LEAST_ROWS)
        filled = F.pad(left, (0, 0, 0, -rows % block))
        blocks = [bmm(part.contiguous(), right) for part in filled.split(block, 1)]
        answer = torch.cat(blocks, 1)[:, :rows]
        if out is None:
            return answer
        return out.copy_(answer)

    return of_many


def linear_of_many_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies [rows, in] to [rows, out]. The bits do not depend on the number of rows."""
    missing = LEAST_ROWS - len(x)
    many = F.pad(x, (0, 0, 0, missing)) if missing > 0 else x.contiguous()
    return _linear(weight, many, bias)[: len(x)]


_linear = of_blocks(lambda weight, rows, bias: F.linear(rows, weight, bias))


def _with_linear_of_many_rows(process: Callable[..., None]) -> Callable[..., None]:
    """Wraps `process` of vLLM's linear layers, so that it leaves this one projection to torch."""

    @wraps(process)
    def processed(self: Any, layer: torch.nn.Module) -> None:
        process(self, layer)
        if getattr(layer, "_cpu_skip_gemm_dispatch", False):
            layer.cpu_linear = linear_of_many_rows

    return processed
