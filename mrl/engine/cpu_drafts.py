"""Fixes for speculative decoding in vLLM 0.32's CPU platform. CpuWorker installs them, only for engines that speculate.

`rejection_sampler.expand_batch_to_tokens` repeats each request's temperature, top_k and top_p for each of its drafted
tokens. The CPU's kernel below it (`vllm/utils/cpu_triton_utils.py`, `_expand_kernel_impl`) fills an int64 copy of its
output and drops the copy. Temperatures of drafted tokens then are memory that nobody wrote. Drafts are accepted by a
wrong distribution, and the log-probs returned for them are those of no policy.

A text model of Qwen3.5 has one row of positions: vLLM drops `mrope_section` from its configuration (models/config.py,
Qwen3_5ForCausalLMConfig), and not from that of its predicting layer. The drafter of CPUs (llm_base_proposer.py, by
`draft_model_config.uses_mrope`) then gives the layer three rows, behind which its rotary kernel reads and writes other
memory, and the process aborts. That of accelerators always gives one row (v1/worker/gpu/spec_decode).
"""

from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Installs the fix in this process. A second call changes nothing."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def share_positions(vllm_config: Any) -> None:
    """Gives a drafting model one row of positions where the model has one. Call it before vLLM makes its drafter.

    `vllm_config`: vLLM's VllmConfig of this process, of an engine that drafts.
    """
    if vllm_config.model_config.uses_mrope:
        return
    drafting = vllm_config.speculative_config.draft_model_config
    rotation = getattr(drafting.hf_text_config, "rope_parameters", None) or {}
    for name in ("mrope_section", "mrope_interleaved"):
        rotation.pop(name, None)


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Returns [num_tokens]: each request's value of `x` [requests], once for each of its drafted tokens.

    `cu_num_tokens` [requests]: drafted tokens up to and with a request's. `replace_from` becomes `replace_to`: the
    temperature 0 of a greedy request, by which nothing can be divided.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    replacement = torch.tensor(replace_to, dtype=x.dtype, device=x.device)
    return x.where(x != replace_from, replacement).repeat_interleave(counts, output_size=num_tokens)
