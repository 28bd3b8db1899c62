"""Checkpoints of models that also read images and have a text model of ours inside (Qwen3.5).

The text model alone is trained, and its tensors have their names everywhere in mrl. In the files they have others, and
all experts of a layer are one tensor:

    in the files                                                  of the text model
    model.language_model.norm.weight                              model.norm.weight
    model.language_model.layers.0.mlp.experts.gate_up_proj        model.layers.0.mlp.experts.0.gate_proj.weight
        [experts, rows of gate and up, hidden]                    model.layers.0.mlp.experts.0.up_proj.weight, ...
    model.language_model.layers.0.mlp.experts.down_proj           model.layers.0.mlp.experts.0.down_proj.weight, ...
        [experts, hidden, columns]
    model.visual.patch_embed.proj.weight                          none: it stays as it is

Which form a folder has is seen by the names in its files: a text model's own folder has the right column's.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from mrl.model.hf_config import HfConfig, refuse_unless, required

VISION_TOWER = "model.visual."  # its tensors' names begin so
_INSIDE = "model.language_model."
_TEXT = "text_config"
_DTYPES = ("dtype", "torch_dtype")
_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up|down)_proj")


@dataclass(frozen=True)
class Inner:
    """A tensor of the text model in one that is stored, whose axes but the last count as rows."""

    name: str
    shape: tuple[int, ...]
    first: int  # row of the stored tensor at which it begins

    @property
    def rows(self) -> int:
        """Rows of the stored tensor that it takes."""
        return prod(self.shape[:-1])


def text_config(config: HfConfig, architecture: str) -> dict[str, Any]:
    """The config.json that the text model has by itself, from that of the whole. `architecture`: of the text model.

    Raises ConfigError where both say different things of one.
    """
    inner = required(config, _TEXT)
    tied = "tie_word_embeddings"
    # transformers asks the outer one, vLLM the inner
    refuse_unless(f"{_TEXT}.{tied}", bool(inner.get(tied)), bool(config.get(tied)))
    dtypes = {}
    if not any(inner.get(key) for key in _DTYPES):
        dtypes = {key: config[key] for key in _DTYPES if config.get(key)}
    return {**inner, **dtypes, "architectures": [architecture]}


def with_text_config(config: HfConfig, changes: HfConfig) -> dict[str, Any]:
    """The config.json of the whole with `changes` to the text model's part."""
    return {**config, _TEXT: {**config[_TEXT], **changes}}


def is_whole(config: HfConfig) -> bool:
    """Whether a config.json has the text model's in a part of its own."""
    return isinstance(config.get(_TEXT), dict)


def inner_tensors(key: str, shape: tuple[int, ...]) -> Iterable[Inner]:
    """The tensors of the text model in a stored one; of another tensor it is the one itself."""
    name = key
    if key.startswith(_INSIDE):
        name = "model." + key.removeprefix(_INSIDE)
    stacked = _EXPERTS.fullmatch(name)
    if stacked is None or len(shape) != 3:
        return (Inner(name, shape, 0),)
    return _of_experts(stacked[1], stacked[2], *shape)


def _of_experts(prefix: str, kind: str, experts: int, rows: int, columns: int) -> Iterator[Inner]:
    names = ("down",)
    if kind == "gate_up":
        names = ("gate", "up")
    each = rows // len(names)
    for expert in range(experts):
        for place, name in enumerate(names):
            first = expert * rows + place * each
            yield Inner(f"{prefix}{expert}.{name}_proj.weight", (each, columns), first)
