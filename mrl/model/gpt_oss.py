"""gpt-oss: routed experts with biases in every layer, and attention with a sink. Every second layer, from the first on,
attends within a window.

Of each expert, gate and up are one matrix, whose rows are those of both in turns. Megatron and vLLM hold it so. The
files have all experts of a layer in one tensor, and the matrices transposed or in MXFP4 (mrl/model/mxfp4.py):

    in the files                                            of the model
    mlp.experts.gate_up_proj [experts, hidden, 2 x size]    mlp.experts.0.gate_up_proj.weight [2 x size, hidden], ...
    mlp.experts.gate_up_proj_bias [experts, 2 x size]       mlp.experts.0.gate_up_proj.bias, ...
    mlp.experts.gate_up_proj_blocks [experts, 2 x size, hidden / 32, 16], _scales    as gate_up_proj
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

from mrl.model.decoder_weights import attention, layer_norms, no_dense_layer
from mrl.model.hf_config import (
    ANY,
    FULL_ATTENTION,
    QUANTIZATION,
    HfConfig,
    ModelSpec,
    common,
    refuse_tied,
    refuse_unless,
    required,
    without_quantization,
)
from mrl.model.mxfp4 import BLOCKS, GROUP_BYTES, SCALES, check_method
from mrl.model.rotation import Yarn, settings
from mrl.model.weight_map import VLLM_NORMS, Family, Inner, Part, Weight, copied

_SLIDING = "sliding_attention"
_EPSILON = 1e-5  # of all norms of vLLM's class, whatever the configuration says
# vLLM's class has these numbers, whatever the configuration says
_PLAIN = {
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    "sliding_window": ANY,
    "layer_types": ANY,
}
_NEEDED = ("beta_fast", "beta_slow")  # vLLM's class has no other value for an absent one
_IGNORED = ("attention_factor", "mscale", "mscale_all_dim")  # by vLLM's class, and read by transformers'
_EXPERTS = "mlp.experts."
_STORED = re.compile(rf"(model\.layers\.\d+\.{re.escape(_EXPERTS)})(gate_up|down)_proj(_bias|{BLOCKS}|{SCALES})?")
_OF_EXPERT = re.compile(r"(.+\.experts\.\d+)\.(gate_up|down)_proj\.(weight|bias)")
_LOADED = {"gate_up": "w13", "down": "w2"}


def read(config: HfConfig) -> ModelSpec:
    refuse_tied(config)
    is_mxfp4 = bool(config.get(QUANTIZATION))
    if is_mxfp4:
        check_method(config[QUANTIZATION])
    layers = required(config, "num_hidden_layers")
    _refuse_other_layers(config, layers)
    _refuse_other_rotation(config)
    refuse_unless("rms_norm_eps", required(config, "rms_norm_eps"), _EPSILON)
    window = required(config, "sliding_window")
    if type(window) is not int or window < 1:
        refuse_unless("sliding_window", window, "a whole number above 0")
    size = required(config, "head_dim")
    experts_per_token = required(config, "num_experts_per_tok")
    fields = common(without_quantization(config), head_dim=size, **_PLAIN)
    if is_mxfp4:
        fields["dtype"] = "bfloat16"
    return ModelSpec(
        **fields,
        head_dim=size,
        qkv_bias=True,
        qk_norm=False,
        num_experts=required(config, "num_local_experts", "num_experts"),
        num_experts_per_tok=experts_per_token,
        moe_intermediate_size=required(config, "intermediate_size"),
        moe_layers=tuple(range(layers)),
        norm_topk_prob=True,
        window_layers=tuple(range(0, layers, 2)),
        sliding_window=window,
        attention_sinks=True,
        clamped_experts=True,
        is_mxfp4=is_mxfp4,
    )


def _refuse_other_layers(config: HfConfig, layers: int) -> None:
    """Raises ConfigError unless every second layer has a window, which vLLM's class does not read."""
    kinds = [FULL_ATTENTION if layer % 2 else _SLIDING for layer in range(layers)]
    if config.get("layer_types") is not None:
        refuse_unless("layer_types", config["layer_types"], kinds)


def _refuse_other_rotation(config: HfConfig) -> None:
    """Raises ConfigError unless the rotation is the one that vLLM's class always makes."""
    rope = settings(config)
    refuse_unless("rope_type", rope["rope_type"], Yarn.kind)
    for key in _NEEDED:
        required(rope, key)
    for key in _IGNORED:
        refuse_unless(key, rope.get(key), None)


def _layer(m: ModelSpec) -> tuple[Weight, ...]:
    sinks = Part("self_attn.sinks", (m.num_attention_heads,), matmul=False)
    out = Part("self_attn.o_proj.bias", (m.hidden_size,), matmul=False)
    return (
        *layer_norms(m, "pre_mlp_layernorm.weight"),
        Weight((sinks,), "self_attention.core_attention.softmax_offset", "attn.sinks", "rows"),
        *(replace(row, vllm=row.vllm.removeprefix("self_")) for row in attention(m)),
        Weight((out,), "self_attention.linear_proj.bias", "attn.o_proj.bias", "copied"),
        copied("mlp.router.weight", (m.num_experts, m.hidden_size), "mlp.router.weight", matmul=True),
        copied("mlp.router.bias", (m.num_experts,), "mlp.router.bias"),
        *_experts(m),
    )


def _experts(m: ModelSpec) -> Iterator[Weight]:
    """Yields matrix and bias of both projections of an expert, as Megatron and vLLM order them."""
    sides = {"gate_up": (2 * m.moe_intermediate_size, m.hidden_size), "down": (m.hidden_size, m.moe_intermediate_size)}
    for (name, shape), fc, split in zip(sides.items(), ("fc1", "fc2"), ("rows", "columns"), strict=True):
        weight = Part(f"{_EXPERTS}{{expert}}.{name}_proj.weight", shape)
        bias = Part(f"{_EXPERTS}{{expert}}.{name}_proj.bias", shape[:1], matmul=False)
        megatron = f"{_EXPERTS}linear_{fc}"
        vllm = f"{_EXPERTS}routed_experts.{_LOADED[name]}"
        yield Weight((weight,), f"{megatron}.weight{{expert}}", f"{vllm}_weight", split, is_expert=True)
        # workers sum what they multiplied with their columns, and one of them adds the bias
        of_bias = "rows" if name == "gate_up" else "first"
        yield Weight((bias,), f"{megatron}.bias{{expert}}", f"{vllm}_bias", of_bias, is_expert=True)


# ---------------------------------------------------------------- files


def inside(key: str, shape: tuple[int, ...], hidden_size: int = 0) -> Iterable[Inner]:
    """Returns the tensors of the model in a stored one. Scales are in none."""
    found = _STORED.fullmatch(key)
    if found is None:
        return (Inner(key, shape, 0),)
    prefix, name, suffix = found.groups()
    match suffix, shape:
        case None, (count, columns, rows):
            return _each(prefix, f"{name}_proj.weight", count, (rows, columns), is_turned=True)
        case "_bias", (count, rows):
            return _each(prefix, f"{name}_proj.bias", count, (rows,))
        case "_blocks", (count, rows, groups, width) if width == GROUP_BYTES:
            return _each(prefix, f"{name}_proj.weight", count, (rows, groups * width * 2))
        case "_scales", _:
            return ()
    return (Inner(key, shape, 0),)


def _each(prefix: str, name: str, count: int, shape: tuple[int, ...], is_turned: bool = False) -> Iterator[Inner]:
    for expert in range(count):
        yield Inner(f"{prefix}{expert}.{name}", shape, expert * prod(shape[:-1]), is_turned)


def stored(name: str, shape: tuple[int, ...], experts: int) -> tuple[str, tuple[int, ...]]:
    """Returns name and shape of the stored tensor that holds one of the model. Exports are never in MXFP4."""
    found = _OF_EXPERT.fullmatch(name)
    if found is None:
        return name, shape
    prefix, projection, leaf = found.groups()
    suffix = "_bias" if leaf == "bias" else ""
    return f"{prefix.rpartition('.')[0]}.{projection}_proj{suffix}", (experts, *shape[::-1])


def for_loader(name: str, tensor: Any) -> tuple[str, Any]:
    """Returns a tensor as vLLM's loader takes experts one by one: under its own names, matrices transposed."""
    found = _OF_EXPERT.fullmatch(name)
    if found is None:
        return name, tensor
    prefix, projection, leaf = found.groups()
    loaded = f"{prefix}.{_LOADED[projection]}_{leaf}"
    return loaded, tensor.T if leaf == "weight" else tensor


FAMILY = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    read,
    no_dense_layer,
    _layer,
    megatron_order=("self_attn.sinks", "input_layernorm.", "self_attn.", "post_attention_layernorm.", "mlp.router.",
                    "mlp.experts."),
    vllm_order=("self_attn.sinks", "self_attn.q_proj.", "self_attn.o_proj.", "mlp.router.", "mlp.experts.",
                *VLLM_NORMS),
    vllm_embedding="model.embedding.weight",
    vllm_divides_evenly=True,
    inside=inside,
    stored=stored,
    for_loader=for_loader,
)  # fmt: skip
