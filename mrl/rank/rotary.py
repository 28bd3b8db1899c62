"""Puts a model's rotation (mrl/model/rotation.py) into Megatron's module, whatever bridge has built it.

Megatron's own classes lack some kinds and have constants of Llama 3.1 for others, and mbridge passes few of their
settings. Latent attention rotates by a module of its own, which `mapped_bridge.py` configures.
"""

from math import e
from typing import Any

import torch
from torch.nn import Module

from mrl.model import ModelSpec


def set_rotation(model: ModelSpec, chunk: Module, **_: Any) -> None:
    """Sets the frequencies of a chunk, and the magnitude of its queries and keys. It is a callback of mbridge."""
    rotation = model.rotation
    module = chunk.rotary_pos_emb
    rotated = model.rotated_head_dim
    # the powers are computed where vLLM computes them, on the device, so that they are rounded alike
    steps = torch.arange(0, rotated, 2, dtype=torch.float32, device=module.inv_freq.device)
    powers = rotation.base(rotated) ** (steps / rotated)
    frequencies = torch.from_numpy(rotation.frequencies(powers.cpu().numpy()))
    module.inv_freq = frequencies.to(powers.device)
    module.seq_len_interpolation_factor = None
    if rotation.magnitude != 1.0:
        _set_magnitude(chunk.config, rotation.magnitude)


def _set_magnitude(config: Any, magnitude: float) -> None:
    """Sets the three fields from which attention computes the magnitude, 1 + yarn_mscale x ln(factor) / 10."""
    config.yarn_rotary_scaling_factor = e
    config.yarn_mscale = 10 * (magnitude - 1)
    config.yarn_mscale_all_dim = 0.0
