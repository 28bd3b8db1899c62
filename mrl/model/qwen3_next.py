"""Qwen3-Next: gated delta attention in three of four layers, gated attention in the fourth; all have routed experts and
a gated shared one.

Norms are zero-centred: they multiply by 1 + weight. A quarter of each head is rotated. Checkpoints also have a layer
for multi-token prediction (`mtp.`), which transformers and vLLM's model leave out. It has gated attention. Its class in
vLLM takes one such layer where config.json has no number of them, as official ones have none.
"""

from typing import Any

from mrl.errors import ConfigError
from mrl.model.decoder_weights import dense_layer
from mrl.model.delta_attention import MEGATRON_DELTA_ATTENTION, VLLM_DELTA_ATTENTION
from mrl.model.hf_config import (
    ANY,
    FULL_ATTENTION,
    HfConfig,
    ModelSpec,
    common,
    experts,
    or_default,
    refuse_tied,
    refuse_unless,
    required,
)
from mrl.model.qwen2_moe import shared_size, with_shared_expert
from mrl.model.weight_map import (
    MEGATRON_ORDER,
    VLLM_ATTENTION,
    VLLM_NORMS,
    Family,
    PredictingNames,
)

_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_LINEAR = "linear_attention"
_HEAD = "mtp."
# settings that vLLM or transformers would compute differently, with their plain values
_PLAIN = {
    "attn_output_gate": True,
    "output_gate_type": "silu",
    "layer_scale": False,
    "qkv_bias": False,
    "decoder_sparse_step": 1,
    # in the weight map, layers with one kind of attention have one kind of MLP
    "mlp_only_layers": [],
    "layer_types": ANY,
}
_SAME = {"swish": "silu"}  # two names of one function


def read(config: HfConfig) -> ModelSpec:
    refuse_tied(config)
    return ModelSpec(
        **hybrid(config),
        **experts({"norm_topk_prob": True, **config}),
        shared_expert_intermediate_size=shared_size(config),
        left_out_layers=or_default(config, "num_nextn_predict_layers", 1),
    )


def hybrid(config: HfConfig, **plain: Any) -> dict[str, Any]:
    """Returns the fields of ModelSpec that hybrids of gated delta and gated attention read alike.

    `plain`: as for `common`.
    """
    gate = config.get("output_gate_type", "silu")
    head_dim = required(config, "head_dim")
    read_alike = common(
        {**config, "output_gate_type": _SAME.get(gate, gate), "mlp_only_layers": config.get("mlp_only_layers") or []},
        head_dim=head_dim,
        rotary_share=0.25,
        **_PLAIN | plain,
    )
    sizes: dict[str, Any] = {name: required(config, name) for name in _SIZES}
    if sizes["linear_num_value_heads"] % sizes["linear_num_key_heads"]:
        whole = f"a multiple of linear_num_key_heads = {sizes['linear_num_key_heads']}"
        refuse_unless("linear_num_value_heads", sizes["linear_num_value_heads"], whole)
    return {
        **read_alike,
        **sizes,
        "head_dim": head_dim,
        "qkv_bias": False,
        "qk_norm": True,
        "linear_layers": _linear_layers(config),
        "attn_output_gate": True,
        "zero_centered_norm": True,
    }


def _linear_layers(config: HfConfig) -> tuple[int, ...]:
    """Returns the numbers of layers with gated delta attention: listed, or all except every fourth."""
    count = required(config, "num_hidden_layers")
    every = or_default(config, "full_attention_interval", 4)
    kinds = config.get("layer_types") or [FULL_ATTENTION if (n + 1) % every == 0 else _LINEAR for n in range(count)]
    if len(kinds) != count or set(kinds) != {_LINEAR, FULL_ATTENTION}:
        raise ConfigError(
            f"config.json: layer_types must name {_LINEAR} or {FULL_ATTENTION} for each of {count} layers, and both of "
            "them"
        )
    return tuple(number for number, kind in enumerate(kinds) if kind == _LINEAR)


def is_left_out(name: str, m: ModelSpec) -> bool:
    """Tells whether a tensor belongs to the layer for multi-token prediction, where ranks do not hold it."""
    return name.startswith(_HEAD) and not m.predicting_layers


def _in_vllm(name: str) -> str:
    return name.removeprefix(_HEAD)


# of one layer: its number is no part of the names of its norms
PREDICTING_NAMES = PredictingNames(
    _HEAD + "layers.0.",
    _HEAD + "pre_fc_norm_embedding.weight",
    _HEAD + "pre_fc_norm_hidden.weight",
    _HEAD + "fc.weight",
    _HEAD + "norm.weight",
    _in_vllm,
    "layers.0.",
    "rows",
    forgets_second_token=False,
)
FAMILY = Family(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    read,
    dense_layer,
    with_shared_expert,
    lambda m: with_shared_expert(m, is_linear=True),
    megatron_order=("input_layernorm.", *MEGATRON_DELTA_ATTENTION, *MEGATRON_ORDER),
    vllm_order=(
        *VLLM_DELTA_ATTENTION,
        *VLLM_ATTENTION,
        "mlp.gate.",
        "mlp.shared_expert_gate.",
        "mlp.",
        *VLLM_NORMS,
    ),
    predicting=PREDICTING_NAMES,
    is_left_out=is_left_out,
)
