"""Rows of the weight map for gated delta attention (arXiv:2412.06464) as Qwen3-Next and Qwen3.5 have it.

Qwen3-Next's projections are already fused in the checkpoint, by key heads, and Megatron and vLLM split them by these
heads. Qwen3.5's are separate by kind, in four tensors, of which Megatron and vLLM make two. Each kind is split by
itself, and so are the channels of the convolution: queries, keys, then values.

                   Qwen3-Next                                      Qwen3.5
    in_proj_qkvz   of a key head: its query, its key, its values,  in_proj_qkv: all queries, all keys, all values;
                   their gates                                     in_proj_z: all gates
    in_proj_ba     of a key head: rates of its values (b), steps   in_proj_b: all rates; in_proj_a: all steps
                   of their decay (a)

    conv1d         channels of all queries, of all keys, of all values
    A_log, dt_bias one number of each value head
    norm           of a value head, one for all; unlike the model's other norms its weight is not zero-centred

Megatron's names are those of mrl/rank/gated_delta.py. vLLM has A_log in float32, whatever the model's dtype.
"""

from collections.abc import Mapping

from mrl.model.hf_config import ModelSpec
from mrl.model.weight_map import Part, Weight, copied

# the order in which vLLM and Megatron register the parameters of this attention
VLLM_DELTA_ATTENTION = (
    "linear_attn.dt_bias",
    "linear_attn.A_log",
    "linear_attn.conv1d.",
    "linear_attn.in_proj",
    "linear_attn.",
)
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
    """Returns the weights of a layer's gated delta attention."""
    keys = m.linear_num_key_heads * m.linear_key_head_dim
    values = m.linear_num_value_heads * m.linear_value_head_dim
    convolution = Part(f"{_HF}conv1d.weight", (m.linear_channels, 1, m.linear_conv_kernel_dim))
    of_three = (keys, keys, values)
    out = Part(f"{_HF}out_proj.weight", (m.hidden_size, values))
    return (
        _of_heads(m, "dt_bias"),
        _of_heads(m, "A_log", vllm_dtype="float32"),
        Weight((convolution,), f"{_MEGATRON}conv1d.weight", convolution.name, "sections", sections=of_three),
        *_projections(m, keys, values),
        copied(f"{_HF}norm.weight", (m.linear_value_head_dim,), f"{_MEGATRON}norm.weight"),
        Weight((out,), f"{_MEGATRON}out_proj.weight", out.name, "columns"),
    )


def _projections(m: ModelSpec, keys: int, values: int) -> tuple[Weight, Weight]:
    """Returns the projections of the hidden state: queries, keys, values and gates; rates and steps. `keys`, `values`:
    rows.
    """
    heads = m.linear_num_value_heads
    if m.linear_by_kind:
        kinds = {"qkv": 2 * keys + values, "z": values}
        return (
            _by_kind(m, "in_proj_qkvz.weight", kinds, (keys, keys, values, values)),
            _by_kind(m, "in_proj_ba.weight", {"b": heads, "a": heads}, (heads, heads)),
        )
    return (
        _by_head("in_proj_qkvz.weight", (2 * (keys + values), m.hidden_size)),
        _by_head("in_proj_ba.weight", (2 * heads, m.hidden_size)),
    )


def _by_kind(m: ModelSpec, name: str, rows: Mapping[str, int], sections: tuple[int, ...]) -> Weight:
    """Makes a weight of separate tensors. `rows`: of each tensor in the checkpoint, by the end of its name."""
    parts = tuple(Part(f"{_HF}in_proj_{kind}.weight", (count, m.hidden_size)) for kind, count in rows.items())
    return Weight(parts, _MEGATRON + name, _HF + name, "sections", sections=sections)


def _by_head(name: str, shape: tuple[int, ...]) -> Weight:
    part = Part(_HF + name, shape)
    return Weight((part,), _MEGATRON + name, part.name, "rows")


def _of_heads(m: ModelSpec, name: str, vllm_dtype: str | None = None) -> Weight:
    part = Part(_HF + name, (m.linear_num_value_heads,), matmul=False)
    return Weight((part,), _MEGATRON + name, part.name, "rows", vllm_dtype=vllm_dtype)
