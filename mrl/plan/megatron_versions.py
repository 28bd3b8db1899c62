"""What depends on the version of Megatron-core: a layout that one release trains and another refuses."""

from collections.abc import Mapping
from typing import Any

from mrl.errors import ConfigError
from mrl.model.layout import ModelFacts

MEGATRON = "0.16.1"  # what mrl is tested with


def refuses_layout(megatron: str, model: ModelFacts, degrees: Mapping[str, Any]) -> str:
    """Why this version cannot have the layout although the current one can; empty when it can. Raises ConfigError for no version.

    Up to 0.15 megatron-core asserts that num_query_groups divides by the tensor degree (transformer_config.py); 0.16 shares a key/value
    head among tensor ranks (attention.py).
    """
    tensor, heads = degrees["tensor_model_parallel_size"], model.num_key_value_heads
    if _release(megatron) < (0, 16) and heads % tensor:
        return (
            f"actor.layout.tensor_model_parallel_size = {tensor}: megatron-core {megatron} needs a divisor of "
            f"num_key_value_heads = {heads}; "
            "0.16 and later share a head among tensor ranks"
        )
    return ""


def _release(version: str) -> tuple[int, int]:
    try:
        major, minor = version.removeprefix("core_r").split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        raise ConfigError(f"--megatron {version}: is no version of megatron-core, such as {MEGATRON}") from None
