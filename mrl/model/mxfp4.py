"""Reads matrices of 4-bit floating-point numbers with one power of two for 32 of them, as gpt-oss has its experts.

The format is MXFP4 (OCP Microscaling Formats 1.0, sections 5.3.3 and 6): a byte of `X_blocks` has two numbers, the
first in its low half. Each has a sign, two bits of exponent and one of mantissa. `X_scales` has a byte for each 32
numbers of a row, the exponent plus 127.

    experts x rows x [columns 0 .. 31 | 32 .. 63 | ...]      blocks: 16 bytes each, scales: 1 byte each

Every product is a bfloat16 number, unless it is too large for one.
"""

from typing import Any

import numpy as np

from mrl.errors import ConfigError, shown
from mrl.model.fp8 import nearest_bfloat16

METHOD = "mxfp4"  # quant_method
BLOCKS = "_blocks"  # X is stored as X_blocks and X_scales
SCALES = "_scales"
GROUP = 32  # numbers of one scale
GROUP_BYTES = GROUP // 2
CODE = "U8"  # safetensors' dtype of both
# twice each number, whose power is halved, so that all powers are float32
_VALUES = 2 * np.float32([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_NUMBERS = np.concatenate([_VALUES, -_VALUES])
_BIAS = 127 + 1


def check_method(quantization: dict[str, Any]) -> None:
    """Raises ConfigError for weights in another format than this."""
    if quantization.get("quant_method") != METHOD:
        raise ConfigError(
            f"config.json: quantization_config of quant_method {shown(quantization.get('quant_method'))} is not read "
            f"for this family (only {METHOD}); give the published checkpoint, or one in bfloat16 without the key"
        )


def mxfp4_rows(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the bfloat16 numbers of whole rows, as integers of 16 bits [rows, columns].

    `blocks`: bytes [rows, columns / 2]. `scales`: bytes [rows, columns / 32].
    """
    numbers = np.empty((len(blocks), blocks.shape[1] * 2), np.float32)
    numbers[:, ::2] = _NUMBERS[blocks & 15]
    numbers[:, 1::2] = _NUMBERS[blocks >> 4]
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS)
    with np.errstate(over="ignore"):
        return nearest_bfloat16(numbers * np.repeat(powers, GROUP, axis=1))
