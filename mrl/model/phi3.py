"""Phi-3 and Phi-4: Llama's layers. Queries, keys and values are one tensor of the checkpoint, gate and up another."""

from mrl.model.decoder_weights import layer_norms
from mrl.model.hf_config import (
    LLAMA_PLAIN,
    HfConfig,
    ModelSpec,
    common,
    own_head_dim,
    refuse_uneven_heads,
    refuse_unless,
    required,
)
from mrl.model.rotation import DEFAULT, LongRope, settings
from mrl.model.weight_map import VLLM_ATTENTION, VLLM_NORMS, Family, Part, Weight

_ROTATIONS = (DEFAULT, LongRope.kind)


def read(config: HfConfig) -> ModelSpec:
    # transformers' class takes yarn for longrope
    kind = settings(config)["rope_type"]
    if kind not in _ROTATIONS:
        refuse_unless("rope_type", kind, " or ".join(_ROTATIONS))
    refuse_uneven_heads(config)
    heads = required(config, "num_attention_heads")
    size = required(config, "hidden_size") // heads
    refuse_unless("head_dim", own_head_dim(config), size)  # vLLM's class would read another
    return ModelSpec(
        **common(config, head_dim=size, rotary_share=1.0, **LLAMA_PLAIN),
        head_dim=size,
        qkv_bias=False,
        qk_norm=False,
    )


def _layer(m: ModelSpec) -> tuple[Weight, ...]:
    queries = m.num_attention_heads * m.head_dim
    keys = m.num_key_value_heads * m.head_dim
    qkv = Part("self_attn.qkv_proj.weight", (queries + 2 * keys, m.hidden_size))
    out = Part("self_attn.o_proj.weight", (m.hidden_size, queries))
    gate_up = Part("mlp.gate_up_proj.weight", (2 * m.intermediate_size, m.hidden_size))
    down = Part("mlp.down_proj.weight", (m.hidden_size, m.intermediate_size))
    fc1 = "mlp.linear_fc1.weight"
    return (
        *layer_norms(m, "mlp.linear_fc1.layer_norm_weight"),
        Weight(
            (qkv,),
            "self_attention.linear_qkv.weight",
            qkv.name,
            "heads",
            groups=m.num_key_value_heads,
            sections=(queries, keys, keys),
        ),
        Weight((out,), "self_attention.linear_proj.weight", out.name, "columns"),
        Weight((gate_up,), fc1, gate_up.name, "sections", sections=(m.intermediate_size, m.intermediate_size)),
        Weight((down,), "mlp.linear_fc2.weight", down.name, "columns"),
    )


FAMILY = Family(
    "Phi3ForCausalLM",
    "phi3",
    read,
    _layer,
    vllm_order=("self_attn.qkv_proj.", *VLLM_ATTENTION, "mlp.", *VLLM_NORMS),
    has_code_beside=True,
)
