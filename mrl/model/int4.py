"""Reads matrices of 4-bit integers with one scale for a group of columns, as Kimi-K2-Thinking has its experts.

The format is `pack-quantized` of compressed-tensors: `X.weight_packed` has eight columns in one int32, the first in the
lowest bits, each 8 more than its value. `X.weight_scale` has one bfloat16 number for each group of columns of a row.

    columns   0 .. 31   32 .. 63   64 .. 95
    scales    s[i, 0]   s[i, 1]    s[i, 2]

An element is its value times its scale, rounded to the nearest bfloat16.
"""

from typing import Any

import numpy as np

from mrl.errors import ConfigError, shown
from mrl.model.fp8 import nearest_bfloat16

PACKED = "_packed"  # in the place of nothing: X.weight is stored as X.weight_packed
COLUMNS = 8  # of an int32
BYTES = 4
_OFFSET = 8
_WANTED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
_LEFT_OUT = ("actorder", "zp_dtype", "block_structure", "dynamic")  # null or false


def int4_group(quantization: dict[str, Any]) -> int:
    """Returns the columns of one scale. Raises ConfigError for another format of compressed-tensors."""
    key = "quantization_config"
    if quantization.get("format") != "pack-quantized":
        raise _unknown(f"{key}.format", quantization.get("format"), "pack-quantized")
    groups = quantization.get("config_groups") or {}
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _unknown(f"{key}.config_groups", list(groups), "one group")
    (group,) = groups.values()
    for activations in ("input_activations", "output_activations"):
        if group.get(activations) is not None:
            raise _unknown(f"{key}.{activations}", group[activations], "null")
    weights = group.get("weights") or {}
    for name, wanted in _WANTED.items():
        if weights.get(name) != wanted:
            raise _unknown(f"{key}.weights.{name}", weights.get(name), wanted)
    for name in _LEFT_OUT:
        if weights.get(name):
            raise _unknown(f"{key}.weights.{name}", weights[name], "null")
    size = weights.get("group_size")
    if type(size) is not int or size < COLUMNS or size % COLUMNS:
        raise _unknown(f"{key}.weights.group_size", size, "a multiple of 8")
    return size


def _unknown(key: str, value: Any, wanted: Any) -> ConfigError:
    return ConfigError(
        f"config.json: {key} = {shown(value)} of compressed-tensors is not read (only {wanted}); give the checkpoint "
        "that was not quantised"
    )


def bfloat16_rows(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the bfloat16 numbers of whole rows, as integers of 16 bits [rows, columns].

    `packed`: the int32 numbers as bytes [rows, columns / 2]. `scales`: float32 [rows, columns / group].
    """
    values = np.empty((len(packed), packed.shape[1] * 2), np.int8)
    values[:, ::2] = (packed & 15).astype(np.int8) - _OFFSET
    values[:, 1::2] = (packed >> 4).astype(np.int8) - _OFFSET
    of_columns = np.repeat(scales, values.shape[1] // scales.shape[1], axis=1)
    return nearest_bfloat16(values.astype(np.float32) * of_columns)


def bfloat16_as_float32(bits: np.ndarray) -> np.ndarray:
    """Returns float32 numbers of bfloat16 ones, which are given as integers of 16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
