"""Rows of the weight map for gated delta attention (arXiv:2412.06464) as Qwen3-Next has it.

Projections are fused in the checkpoint already, head of keys by head of keys, and Megatron and vLLM cut them by these
heads. Channels of the convolution are queries, keys, then values; each of the three is cut by itself.

    in_proj_qkvz   of a key head: its query, its key, its values, their gates
    in_proj_ba     of a key head: rates of its values (b), steps of their decay (a)
    conv1d         channels of all queries, of all keys, of all values
    A_log, dt_bias one number of each value head
    norm           of a value head, one for all; unlike the model's other norms its weight is not zero-centred

Megatron's names are those of mrl/megatron/gated_delta.py. vLLM has A_log in float32, whatever the model's dtype.
"""

from mrl.model.hf_config import ModelSpec
from mrl.model.weight_map import Part, Weight, copied

# vLLM and Megatron register the parameters of this attention so
VLLM_DELTA_ATTENTION = ("linear_attn.",)
MEGATRON_DELTA_ATTENTION = (
    "linear_attn.dt_bias",
    "linear_attn.A_log",
    "linear_attn.in_proj",
    "linear_attn.out_proj.",
    "linear_attn.",
)
_HF = "linear_attn."
_MEGATRON = "self_attention."


def delta_attention(m: ModelSpec) -> tuple[Weight, ...]:
    """The weights of a layer's gated delta attention."""
    keys = m.linear_num_key_heads * m.linear_key_head_dim
    values = m.linear_num_value_heads * m.linear_value_head_dim
    rates = 2 * m.linear_num_value_heads
    convolution = Part(f"{_HF}conv1d.weight", (m.linear_channels, 1, m.linear_conv_kernel_dim))
    of_three = (keys, keys, values)
    out = Part(f"{_HF}out_proj.weight", (m.hidden_size, values))
    return (
        _of_heads(m, "dt_bias"),
        _of_heads(m, "A_log", vllm_dtype="float32"),
        Weight((convolution,), f"{_MEGATRON}conv1d.weight", convolution.name, "sections", sections=of_three),
        _by_head("in_proj_qkvz.weight", (2 * (keys + values), m.hidden_size)),
        _by_head("in_proj_ba.weight", (rates, m.hidden_size)),
        copied(f"{_HF}norm.weight", (m.linear_value_head_dim,), f"{_MEGATRON}norm.weight"),
        Weight((out,), f"{_MEGATRON}out_proj.weight", out.name, "columns"),
    )


def _by_head(name: str, shape: tuple[int, ...]) -> Weight:
    part = Part(_HF + name, shape)
    return Weight((part,), _MEGATRON + name, part.name, "rows")


def _of_heads(m: ModelSpec, name: str, vllm_dtype: str | None = None) -> Weight:
    part = Part(_HF + name, (m.linear_num_value_heads,), matmul=False)
    return Weight((part,), _MEGATRON + name, part.name, "rows", vllm_dtype=vllm_dtype)
