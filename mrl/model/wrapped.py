"""Checkpoints of models that also read images and contain a supported text model (Qwen2.5-VL, Qwen3-VL, Qwen3.5).

Only the text model is trained, and mrl uses its tensor names everywhere. The files have other names, and all experts of
a layer in one tensor:

    in the files                                                  of the text model
    model.language_model.norm.weight                              model.norm.weight
    model.language_model.layers.0.mlp.experts.gate_up_proj        model.layers.0.mlp.experts.0.gate_proj.weight
        [experts, rows of gate and up, hidden]                    model.layers.0.mlp.experts.0.up_proj.weight, ...
    model.language_model.layers.0.mlp.experts.down_proj           model.layers.0.mlp.experts.0.down_proj.weight, ...
        [experts, hidden, columns]
        Qwen3-VL's official folders have both turned, [experts, hidden, rows] and [experts, columns, hidden], and
        transformers writes them as above: as it does, one goes by the hidden size
    model.visual.patch_embed.proj.weight                          none: it stays as it is

Qwen2.5-VL's folders have the text model's own names and `visual.`, and a config.json that is also the text model's.

The names in a folder's files tell its form: a text model's own folder has the names of the right column.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mrl.errors import ConfigError, shown
from mrl.model.hf_config import (
    INNER_CONFIGS,
    TEXT_CONFIG,
    HfConfig,
    or_default,
    refuse_inner,
    refuse_quantised,
    refuse_unless,
    required,
)
from mrl.model.weight_map import Inner

VISION_TOWER = ("model.visual.", "visual.")  # prefixes of its tensors' names
INSIDE = "model.language_model."  # prefix of the text model's tensors in files, and of its modules in transformers
# of the whole; its class in transformers takes numbers alone
_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_OF_WHOLE = (*_TOKENS, "vision_end_token_id", "vision_token_id", "vision_config")
_DTYPES = ("dtype", "torch_dtype")
_TIED = "tie_word_embeddings"
_ROTATIONS = ("rope_parameters", "rope_scaling")
_SECTIONS = ("mrope_section", "mrope_interleaved")  # by them the positions of an image turn some pairs of a head
_EXPERTS = re.compile(r"((?:model|mtp)\.layers\.\d+\.mlp\.experts\.)(gate_up|down)_proj")


def text_config(
    config: HfConfig,
    architecture: str,
    model_type: str,
    inside: str = "",
    always: HfConfig = MappingProxyType({}),
    inner_ties: bool = False,
) -> dict[str, Any]:
    """Returns the text model's own config.json, from that of the whole. `architecture`, `model_type`: of the text
    model. `inside`: its model_type inside the whole, if that is another one. `always`: what its class inside the whole
    computes whatever the configuration says. `inner_ties`: as `Family.wrapped_ties`.

    Raises ConfigError if the two disagree, the whole is of another type or weights are quantised.
    """
    refuse_unless("model_type", config.get("model_type"), (inside or model_type).removesuffix("_text"))
    refuse_quantised(config)
    has_inner = TEXT_CONFIG in config or not inside
    inner = required(config, TEXT_CONFIG) if has_inner else _without(config, *_OF_WHOLE)
    refuse_inner(config, [name for name in INNER_CONFIGS if name != TEXT_CONFIG])
    is_tied = bool(or_default(config, _TIED, False))
    if not inside:  # transformers reads the outer key, and vLLM's class the inner one
        refuse_unless(f"{TEXT_CONFIG}.{_TIED}", bool(inner.get(_TIED)), is_tied)
    if inner_ties and inner.get(_TIED):
        is_tied = True
    for key in _TOKENS:
        if type(token := config.get(key, 0)) is not int:
            raise ConfigError(f"config.json: {key} = {shown(token)}: must be a whole number, or left out")
    dtypes = {}
    if not any(inner.get(key) for key in _DTYPES):
        dtypes = {key: config[key] for key in _DTYPES if config.get(key)}
    for key, value in always.items():
        refuse_unless(f"{TEXT_CONFIG}.{key}", inner.get(key, value), value)
    # written out, since classes of text models are tied where the key is left out, and wholes are not
    own = {**inner, **dtypes, **always, _TIED: is_tied, "architectures": [architecture]}
    if not inside:
        return own
    if has_inner:
        refuse_unless(f"{TEXT_CONFIG}.model_type", inner.get("model_type"), inside)
    return own | {"model_type": model_type} | _plain_rotation(own)


def _without(config: HfConfig, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def _plain_rotation(config: HfConfig) -> dict[str, Any]:
    """Returns the rotation of a text, whose positions turn every pair alike."""
    plain = {}
    for name in _ROTATIONS:
        if config.get(name):
            entry = _without(config[name], *_SECTIONS)
            kinds = {key: "default" for key in ("type", "rope_type") if entry.get(key) == "mrope"}
            plain[name] = entry | kinds
    return plain


def with_text_config(config: HfConfig, changes: HfConfig) -> dict[str, Any]:
    """Returns the config.json of the whole with `changes` in the text model's part."""
    if TEXT_CONFIG not in config:
        return {**config, **changes}
    return {**config, TEXT_CONFIG: {**config[TEXT_CONFIG], **changes}}


def is_whole(config: HfConfig) -> bool:
    """Tells whether a config.json contains that of a text model."""
    return isinstance(config.get(TEXT_CONFIG), dict)


def inner_tensors(key: str, shape: tuple[int, ...], hidden_size: int | None = None) -> Iterable[Inner]:
    """Returns the tensors of the text model in a stored one. Any other tensor is returned unchanged.

    `hidden_size`: the model's, which tells experts that are turned; None: they are not.
    """
    name = key
    if key.startswith(INSIDE):
        name = "model." + key.removeprefix(INSIDE)
    for prefix in VISION_TOWER:
        if key.startswith(prefix):
            name = VISION_TOWER[0] + key.removeprefix(prefix)
    stacked = _EXPERTS.fullmatch(name)
    if stacked is None or len(shape) != 3:
        return (Inner(name, shape, 0),)
    experts, rows, columns = shape
    sides = {"gate_up": (columns, rows), "down": (rows, columns)}[stacked[2]]
    if hidden_size is not None and sides[0] != hidden_size and sides[1] == hidden_size:
        turned = _of_experts(stacked[1], stacked[2], experts, columns, rows)
        return (replace(inner, is_turned=True) for inner in turned)
    return _of_experts(stacked[1], stacked[2], experts, rows, columns)


def _of_experts(prefix: str, kind: str, experts: int, rows: int, columns: int) -> Iterator[Inner]:
    names = ("down",)
    if kind == "gate_up":
        names = ("gate", "up")
    each = rows // len(names)
    for expert in range(experts):
        for index, name in enumerate(names):
            first = expert * rows + index * each
            yield Inner(f"{prefix}{expert}.{name}_proj.weight", (each, columns), first)
