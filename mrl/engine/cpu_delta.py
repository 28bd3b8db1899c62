"""Gated delta attention for vLLM 0.32's CPU engines, in plain torch and float32.

CpuWorker installs it, only for models that have such attention. vLLM's own kernels compute in bfloat16 and refuse
float32, in which engines and ranks are compared on CPUs. Here tokens go through a layer one by one, in all sequences at
once. So a token's result depends neither on how many others are computed, nor on how a prompt is cut. This is slow for
long prompts, but exact.

Private in vLLM, and why it is touched:

* `gdn_attention.cpu_gdn_attention_core`: the function that is registered as the layer's operator, once in a process.
* `layer.kv_cache`: states by slot, the convolution's [slots, width - 1, channels] (or channels first), wider by the
  drafted tokens in engines that draft, and the heads' [slots, heads, value dim, key dim].
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.engine.cpu_batch_invariance import of_whole_registers

_NORM_EPS = 1e-6  # for queries and keys, as in mrl/rank/gated_delta.py
# there is one value a head, and torch computes values behind the last whole register with another function
_exp = of_whole_registers(torch.exp)
_softplus = of_whole_registers(F.softplus)
_sigmoid = of_whole_registers(torch.sigmoid)
_silu = of_whole_registers(F.silu)


def install() -> None:
    """Makes vLLM register this operator instead of its own. A second call changes nothing."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    attend.__annotations__["layer_name"] = gdn_attention.LayerNameType  # registration reads the type from here
    gdn_attention.cpu_gdn_attention_core = attend


def attend(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: Any) -> None:
    """Fills `core_attn_out` [tokens, heads, value dim] and updates the states of all sequences.

    `mixed_qkv` [tokens, channels] comes before the convolution; `b` and `a` [tokens, heads] are rates and steps. Raises
    RuntimeError for other formats than float32: for bfloat16 vLLM has packed the weight of the convolution.
    """
    if mixed_qkv.dtype is not torch.float32:
        raise RuntimeError(
            f"gated delta attention on a CPU is computed in float32 alone, and this is {mixed_qkv.dtype}"
        )
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # vLLM's step that only measures memory
        return
    batch = context.attn_metadata[layer.prefix]
    inputs = mixed_qkv, b, a
    if batch.spec_sequence_masks is None:
        _plain(layer, batch, inputs, core_attn_out, torch.arange(len(mixed_qkv)))
        return
    _drafted(layer, batch, inputs, core_attn_out, batch.spec_token_indx.long())
    _plain(layer, batch, inputs, core_attn_out, batch.non_spec_token_indx.long())


_Inputs = tuple[Tensor, Tensor, Tensor]


def _plain(layer: Any, batch: Any, inputs: _Inputs, out: Tensor, tokens: Tensor) -> None:
    """Computes sequences without drafts. `tokens`: places of theirs, one sequence behind the other."""
    sequences = batch.num_decodes + batch.num_prefills
    if sequences == 0:
        return
    goes_on = torch.ones(sequences, dtype=torch.bool)
    if batch.num_prefills:
        goes_on[batch.num_decodes :] = batch.has_initial_state[batch.num_decodes : sequences]
    starts = batch.non_spec_query_start_loc[: sequences + 1].long()
    slots = batch.non_spec_state_indices_tensor[:sequences].long()
    earlier, state = _states(layer)
    reach = layer.conv1d.weight.shape[-1] - 1
    window = torch.where(goes_on[:, None, None], earlier[slots, :, :reach], 0)
    memory = torch.where(goes_on[:, None, None, None], state[slots], 0)
    window, memory = _all_tokens(layer, inputs, out, tokens, starts, window, memory)
    earlier[slots, :, :reach] = window
    state[slots] = memory


def _drafted(layer: Any, batch: Any, inputs: _Inputs, out: Tensor, tokens: Tensor) -> None:
    """Computes sequences with drafted tokens, of which the next step says how many were accepted.

    A sequence has a slot for the state behind each token of a step, and in the first one all inputs of the convolution
    that may be needed. The states behind the last accepted token are those to go on from.
    """
    sequences = batch.num_spec_decodes
    if sequences == 0:
        return
    starts = batch.spec_query_start_loc[: sequences + 1].long()
    slots = batch.spec_state_indices_tensor[:sequences].long()
    last = batch.num_accepted_tokens[:sequences].long() - 1
    earlier, state = _states(layer)
    reach = layer.conv1d.weight.shape[-1] - 1
    window = torch.stack([earlier[slot, :, at : at + reach] for slot, at in zip(slots[:, 0], last, strict=True)])

    def keep(rows: Tensor, step: int, memory: Tensor) -> None:
        state[slots[rows, step]] = memory

    _all_tokens(layer, inputs, out, tokens, starts, window, state[slots[torch.arange(sequences), last]], keep)
    for row, slot in enumerate(slots[:, 0]):
        seen = inputs[0][tokens[starts[row] : starts[row + 1]]].T
        earlier[slot, :, : reach - 1 + seen.shape[1]] = torch.cat([window[row, :, 1:], seen], dim=1)


def _all_tokens(
    layer: Any,
    inputs: _Inputs,
    out: Tensor,
    tokens: Tensor,
    starts: Tensor,
    window: Tensor,
    memory: Tensor,
    keep: Callable[[Tensor, int, Tensor], None] = lambda *_: None,
) -> tuple[Tensor, Tensor]:
    """Computes all tokens. Returns the convolution's last inputs and the states of the heads behind them.

    `starts` [sequences + 1]: first one of a sequence's `tokens`. `window`, `memory`: what comes before, by sequence.
    `keep` gets rows of sequences, the number of a token in them, and the states behind it.
    """
    lengths = starts.diff()
    order = lengths.argsort(descending=True, stable=True)
    lengths = lengths[order]
    first = starts[:-1][order]
    window = window[order]
    memory = memory[order]
    for step in range(int(lengths[0])):
        count = int((lengths > step).sum())  # finished sequences are the last ones
        places = tokens[first[:count] + step]
        mixed, rate, step_size = (x[places] for x in inputs)
        seen = torch.cat([window[:count], mixed[:, :, None]], dim=2)
        window[:count] = seen[:, :, 1:]
        channels = _silu((seen * layer.conv1d.weight[:, 0]).sum(dim=2))
        out[places], memory[:count] = _one_token(layer, channels, rate, step_size, memory[:count])
        keep(order[:count], step, memory[:count])
    back = order.argsort()
    return window[back], memory[back]


def _states(layer: Any) -> tuple[Tensor, Tensor]:
    """Returns the states by slot: earlier inputs of the convolution [slots, channels, width - 1], and states of the
    heads.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    earlier, state = layer.kv_cache
    if not is_conv_state_dim_first():
        earlier = earlier.transpose(1, 2)
    return earlier, state


def _one_token(layer: Any, channels: Tensor, rate: Tensor, step: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes one token of each sequence.

    Returns its output, and the new states [sequences, heads, value dim, key dim].
    """
    keys = layer.key_dim // layer.tp_size
    query, key, value = channels.split([keys, keys, layer.value_dim // layer.tp_size], dim=1)
    value = value.unflatten(1, (-1, layer.head_v_dim))
    values_a_key = layer.num_v_heads // layer.num_k_heads
    query, key = (
        _unit(x.unflatten(1, (-1, layer.head_k_dim))).repeat_interleave(values_a_key, dim=1) for x in (query, key)
    )
    decay = _exp(-_exp(layer.A_log) * _softplus(step + layer.dt_bias))
    state = state * decay[:, :, None, None]
    read = (state * key[:, :, None]).sum(dim=3)
    written = _sigmoid(rate)[:, :, None] * (value - read)
    state = state + written[:, :, :, None] * key[:, :, None]
    scaled = query * layer.head_k_dim**-0.5
    return (state * scaled[:, :, None]).sum(dim=3), state


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _NORM_EPS)
