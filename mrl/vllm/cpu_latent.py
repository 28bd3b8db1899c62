"""What vLLM 0.32's CPU platform lacks for latent attention. CpuWorker puts it in place, for models that have it alone.

* `RotaryEmbedding.forward_cpu`: the kernel behind it turns parts of wider rows wrongly, without an error, and latent
  attention passes it nothing else. Angles that yarn stretches are turned by torch already.
* `torch.bmm`, and `layer.cpu_linear` of the projection that keys and values are made by: of few rows MKL takes another
  way than of many, so that what a token becomes would depend on how many others are under way. Few rows are made more.
* `split_decodes_and_prefills`: prompts of one token are computed as prompts or as decoding goes, by what stands before
  them in the batch. Here they are always prompts.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_ROWS = 16  # from 4 on they come by one way; see the module's test


def install() -> None:
    """Fills the gaps in this process; a second time changes nothing."""
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
    """`split` of a batch into decodes and prompts, where short prompts are never taken for decodes."""

    @wraps(split)
    def by_phase(*arguments: Any, **named: Any) -> tuple[int, ...]:
        return split(*arguments, **(named | {"treat_short_extends_as_decodes": False}))

    return by_phase


def bmm_of_many_rows(bmm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`bmm` ([batch, rows, in] x [batch, in, out]) to bits that do not depend on the number of rows."""

    @wraps(bmm)
    def of_many(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
        rows = left.shape[1]
        many = left if rows >= LEAST_ROWS else F.pad(left, (0, 0, 0, LEAST_ROWS - rows))
        answer = bmm(many.contiguous(), right)[:, :rows]
        if out is None:
            return answer
        return out.copy_(answer)

    return of_many


def linear_of_many_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[rows, in] -> [rows, out], to bits that do not depend on the number of rows."""
    missing = LEAST_ROWS - len(x)
    return F.linear(F.pad(x, (0, 0, 0, missing)) if missing > 0 else x.contiguous(), weight, bias)[: len(x)]


def _with_linear_of_many_rows(process: Callable[..., None]) -> Callable[..., None]:
    """`process` of vLLM's linear layers, which leaves this one projection to torch."""

    @wraps(process)
    def processed(self: Any, layer: torch.nn.Module) -> None:
        process(self, layer)
        if getattr(layer, "_cpu_skip_gemm_dispatch", False):
            layer.cpu_linear = linear_of_many_rows

    return processed
