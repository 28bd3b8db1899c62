"""What transformers' configuration class of a family takes: kinds of values, and the value of a key that is absent.

vLLM reads config.json by the same classes. `class_keys.json` is made of them (scripts/generate_class_keys.py).
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError, shown
from mrl.model.rotation import given

_FILE = Path(__file__).parent / "class_keys.json"
# Keys that say which tensors there are. A file without them is not complete, whatever a class would take for them.
_SIZES = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts",
    "n_shared_experts", "num_experts_per_tok", "first_k_dense_replace", "n_group", "topk_group", "kv_lora_rank",
    "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "linear_conv_kernel_dim",
    "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "num_mtp_layers",
})  # fmt: skip
# Those of them by which a layer has latent or gated delta attention, so that another class would make other layers.
_OF_LAYERS = (
    "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "linear_conv_kernel_dim",
    "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
)  # fmt: skip
_CHECKED = ("pad_token_id", "rope_theta")  # by their readers, which say more
_KINDS = {
    "int": "a whole number",
    "float": "a number with a point",
    "bool": "true or false",
    "str": "a text",
    "list": "a list",
    "dict": "an object",
    "null": "null",
}
_OF_PYTHON = {int: "int", float: "float", bool: "bool", str: "str", list: "list", dict: "dict", type(None): "null"}


@cache
def _keys() -> dict[str, dict[str, tuple[list[str], Any]]]:
    return json.loads(_FILE.read_text(encoding="utf-8"))


def as_its_class_reads(config: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Returns a config.json with the class's own value of each absent key, except sizes of tensors.

    `model_type`: of the class. Raises ConfigError for a value of a kind that the class refuses, and for
    sizes of layers that it has none of.
    """
    keys = _keys().get(model_type, {})
    if others := [key for key in _OF_LAYERS if keys and key not in keys and config.get(key)]:
        raise ConfigError(
            f"config.json: {others[0]} = {shown(config[others[0]])} is of layers that {model_type} has none of: give "
            "architectures and model_type of the class that reads it, or remove it"
        )
    for key, (kinds, default) in keys.items():
        if key in config and key not in _CHECKED:
            _refuse_another_kind(key, config[key], kinds, default)
    elsewhere = _SIZES | given(config)
    absent = {key: default for key, (_, default) in keys.items() if key not in config and key not in elsewhere}
    known = {**absent, **config}
    if known.get("num_key_value_heads") is None and "num_key_value_heads" in keys:
        known["num_key_value_heads"] = config.get("num_attention_heads")
    return known


def _refuse_another_kind(key: str, value: Any, kinds: list[str], default: Any) -> None:
    kind = _OF_PYTHON.get(type(value), "")
    if kind in kinds or (value is None and key in _SIZES):  # its reader says that it is missing
        return
    takes = " or ".join(_KINDS[name] for name in kinds)
    absent = "" if key in _SIZES else f", or left out, which means {json.dumps(default)}"
    raise ConfigError(
        f"config.json: {key} = {shown(value)}: must be {takes}{absent}, because transformers' class takes nothing else"
    )
