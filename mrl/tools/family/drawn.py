"""Draws tiny configurations of a model's class: the small form of a rehearsal, odd sizes, and each of its switches."""

from collections.abc import Iterator
from typing import Any

from mrl.errors import ConfigError
from mrl.model import ModelSpec, model_spec
from mrl.model.hf_config import HfConfig
from mrl.model.registry import family_of
from mrl.tools.rehearse.small_model import HEAD_DIM, small_hf_config
from mrl.tools.rehearse.small_tower import whole_config

PLAIN = "plain"
ODD = "odd sizes"
BIASES = "attention_bias = "  # how the name of that switch begins
MIXED = ("mlp_only_layers", "decoder_sparse_step")
APART = "heads of another size"  # than hidden_size over heads
WHOLE = "inside a model that reads images"
_LAYERS = 4
_LAYERS_OF_A_SWITCH = 2  # one of each kind
_VOCAB_SIZE = 127  # divides by no tensor degree
_POSITIONS = 256
# one key/value head for three query heads, and sizes that no degree divides
_ODD = {
    "num_hidden_layers": 3,
    "hidden_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 101,
    "intermediate_size": 88,
}
_ODD_LATENT = {"num_key_value_heads": 3, "qk_nope_head_dim": 40, "v_head_dim": 24}
_ODD_HYBRID = {"linear_num_key_heads": 3}
# further settings, of which a family is tried with those that change its model
_SWITCHES: tuple[dict[str, Any], ...] = (
    {"q_lora_rank": None},
    {"n_group": 1, "topk_group": 1},
    {"mlp_only_layers": [0]},
    {"decoder_sparse_step": 2},
    {"partial_rotary_factor": 0.5},
    {"routed_scaling_factor": 2.5},
)


def small_config(config: HfConfig) -> dict[str, Any]:
    """Returns the small form of a model's own config.json. Raises ConfigError for a family without one."""
    small = small_hf_config(config, _LAYERS, _VOCAB_SIZE, _POSITIONS)
    if small.get("kv_lora_rank"):
        # transformers' norms of latents have it whatever the configuration says (mrl/model/deepseek_v3.py)
        small["rms_norm_eps"] = 1e-6
    return small


def drawn_configs(config: HfConfig) -> dict[str, dict[str, Any]]:
    """Returns tiny configurations by a name that says what is special about each. All of them are accepted.

    Raises ConfigError for a family without a small form.
    """
    plain = small_config(config)
    drawn = {PLAIN: plain, ODD: _odd(plain)}
    seen = [model_spec(plain)]
    family = family_of(seen[0])
    short = {**plain, "num_hidden_layers": _LAYERS_OF_A_SWITCH}
    apart = {**short, "head_dim": 2 * HEAD_DIM}
    if not seen[0].is_latent and _accepted(apart) is not None:
        drawn[APART] = apart
    if family.wrapper:
        drawn[WHOLE] = whole_config(plain, family)
    for change in _changes(plain):
        model = _accepted({**plain, **change})
        if model is not None and model not in seen:
            seen.append(model)
            changed = {**(plain if change.keys() & set(MIXED) else short), **change}
            drawn[", ".join(f"{key} = {value}" for key, value in change.items())] = changed
    return drawn


def _odd(plain: dict[str, Any]) -> dict[str, Any]:
    odd = {**plain, **_ODD}
    if "moe_intermediate_size" in plain:
        odd["moe_intermediate_size"] = 40
    if model_spec(plain).clamped_experts:
        odd["intermediate_size"] = 96  # vLLM's CPU kernel with a clamp pads no expert
    if plain.get("kv_lora_rank"):
        odd |= _ODD_LATENT
    if plain.get("linear_num_key_heads"):
        values = plain["linear_num_value_heads"] // plain["linear_num_key_heads"]
        odd |= _ODD_HYBRID | {"linear_num_value_heads": 3 * values}
    return odd


def _changes(plain: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields every switch of the class the other way round, and the settings of _SWITCHES that it has."""
    known = as_transformers(plain)
    for key, value in sorted(known.items()):
        if isinstance(value, bool):
            yield {key: not value}
    for change in _SWITCHES:
        if any(key in known or key in plain for key in change):
            yield change


def _accepted(config: dict[str, Any]) -> ModelSpec | None:
    try:
        return model_spec(config)
    except ConfigError:
        return None


def as_transformers(config: HfConfig) -> dict[str, Any]:
    """Returns all keys of a config.json with the values that transformers' class gives them."""
    from transformers import AutoConfig

    keys = {key: value for key, value in config.items() if key not in ("architectures", "torch_dtype", "dtype")}
    return AutoConfig.for_model(**keys).to_dict()
