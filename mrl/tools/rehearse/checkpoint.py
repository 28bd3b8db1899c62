"""Writes a Hugging Face checkpoint of random weights, which `model.path` of a rehearsal names.

Weights are seeded, and scaled so that activations stay near 1 through the layers. Every embedding has a part in one
common direction. The end token's row of the output layer has that direction too. So the end comes by chance, about once
in a response. Responses then differ in length, as those of a trained model do.
"""

import json
from collections.abc import Mapping
from math import log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mrl.model import ModelSpec, TensorSpec, model_spec, tensor_specs

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_ROUTER = "mlp.gate.weight"
_COMMON = 2.0  # length of the embeddings' common part, relative to their own part
_QUIET = 0.1  # scale of what a layer adds to its input


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], ends: tuple[int, ...], response: int, seed: int = 0
) -> ModelSpec:
    """Writes config.json and model.safetensors, and returns the model.

    `ends` are tokens that end a response, `response` is the length of the longest one in tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    model = model_spec(config)
    rng = np.random.default_rng(seed)
    tensors = {spec.name: _random(spec, rng, model.zero_centered_norm) for spec in tensor_specs(model)}
    _make_ends_likely(tensors, model, ends, response)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def _random(spec: TensorSpec, rng: np.random.Generator, zero_centered_norm: bool) -> np.ndarray:
    if "norm" in spec.name:
        is_plain = not zero_centered_norm or ".linear_attn." in spec.name
        return np.full(spec.shape, 1.0 if is_plain else 0.0, np.float32)
    if len(spec.shape) == 1:  # biases
        return rng.normal(0.0, 0.02, spec.shape).astype(np.float32)
    adds_to_stream = spec.name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
    scale = (_QUIET if adds_to_stream else 1.0) / sqrt(spec.shape[-1])
    return (rng.standard_normal(spec.shape, np.float32) * np.float32(scale)).astype(np.float32)


def _make_ends_likely(tensors: dict[str, np.ndarray], model: ModelSpec, ends: tuple[int, ...], response: int) -> None:
    """Changes `tensors` so that each token ends the response with a probability of about 1 / `response`, over all
    `ends`.

    The last norm scales the stream to a length of sqrt(hidden_size). `share` is its part in the common direction.
    Logits of other tokens have a variance of 1, so their exponentials sum to about vocab_size x sqrt(e).
    """
    direction = np.full(model.hidden_size, 1.0 / sqrt(model.hidden_size), np.float32)
    tensors[EMBEDDING] += _COMMON * direction
    for name in (name for name in tensors if name.endswith(_ROUTER)):
        # routers ignore that direction; otherwise all tokens would choose the same experts
        tensors[name] -= tensors[name].mean(-1, keepdims=True)
    share = _COMMON / sqrt(1.0 + _COMMON**2) * sqrt(model.hidden_size)
    # tied rows have the common part too
    shared_logit = 0.0
    if HEAD not in tensors:
        shared_logit = _COMMON * share
    wanted = log(model.vocab_size / (max(response, 2) * max(len(ends), 1))) + 0.5
    for end in ends:
        row = tensors[HEAD if HEAD in tensors else EMBEDDING]
        row[end] = direction * np.float32((wanted + shared_logit) / share)
