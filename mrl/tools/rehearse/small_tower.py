"""Surrounds the small text model with what makes it see: a vision tower, tokens of images, an image processor.

Family and kinds of layers stay, and so do the sizes of patches, which the processor cuts. DeepStack's features become
one, since the first pipeline chunk of a rehearsal may have a single layer. Images are resized to few tokens.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mrl.model import model_spec
from mrl.model.hf_config import HfConfig
from mrl.model.rotation import settings as rotary_settings
from mrl.model.tower_sizes import VisionTower
from mrl.model.weight_map import Family
from mrl.model.wrapped import INSIDE
from mrl.plain_files import TEXT_BYTES, read_settings

TOKENS = 4  # most of an image, unless it is far longer than wide
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_IDS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")  # in their order
# a vision tower of a few weights, by the keys of all classes, and the pairs of a head that an image's positions turn
_TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "deepstack_visual_indexes": [1, 0]}
_TOWER |= {"fullatt_block_indexes": [0], "num_position_embeddings": 16}
_DRAWN_IDS = {"image_token_id": 7, "video_token_id": 8, "vision_start_token_id": 9, "vision_end_token_id": 10}
_PAIRS = [6, 5, 5]
_SMALL = {"hidden_size": 64, "intermediate_size": 128}  # heads of 32, as those of the text model
# sizes of patches and what a class computes, under the names of all classes
_KEPT = ("patch_size", "spatial_patch_size", "temporal_patch_size", "spatial_merge_size", "in_channels", "in_chans",
         "tokens_per_second", "hidden_act")  # fmt: skip
_PROCESSOR = "preprocessor_config.json"
_NESTED = "processor_config.json"  # newer folders have it, with all processors of the model
_LIMITS = ("min_pixels", "max_pixels")  # older names of `size`
_EXPERT = re.compile(r"((?:model|mtp)\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def whole_config(plain: dict[str, Any], family: Family) -> dict[str, Any]:
    """Returns the configuration of a model that reads images around the text model of `plain`."""
    inside = family.wrapped_type or family.model_type
    inner = {**plain, "model_type": inside}
    if family.wrapped_type:
        rotation = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": _PAIRS}
        if inside.startswith("qwen3_vl"):
            rotation["mrope_interleaved"] = True
        inner = {key: value for key, value in inner.items() if key not in ("rope_theta", "rope_scaling")}
        inner["rope_parameters"] = rotation
    elif (rotation := inner.get("rope_parameters")) is not None and "mrope_section" in rotation:
        pairs = model_spec(plain).rotated_head_dim // 2  # of a small head; vLLM wants the sections to be all of them
        third = pairs // 3
        inner["rope_parameters"] = rotation | {"mrope_section": [pairs - 2 * third, third, third]}
    tower = {**_TOWER, "out_hidden_size": plain["hidden_size"]}
    if inside.startswith("qwen3_5"):  # whose class has none of DeepStack's features, and vLLM's would make them
        tower["deepstack_visual_indexes"] = []
    return {
        "architectures": [family.wrapper],
        "model_type": inside.removesuffix("_text"),
        "tie_word_embeddings": bool(plain.get("tie_word_embeddings")),
        **_DRAWN_IDS,
        "text_config": inner,
        "vision_config": tower,
    }


def small_whole(original: HfConfig, plain: dict[str, Any], family: Family) -> dict[str, Any]:
    """Returns the configuration of the small model that sees. `original`: of the large one; `plain`: of the small text
    model.

    Token ids are the large model's.
    """
    whole = whole_config(plain, family)
    tower = original["vision_config"]
    kept = {key: tower[key] for key in _KEPT if key in tower}
    small = whole["vision_config"] | kept | _SMALL
    if small["deepstack_visual_indexes"]:
        small["deepstack_visual_indexes"] = [0]
    if VisionTower.of(original).gated:
        del small["deepstack_visual_indexes"]
        small["window_size"] = small.get("patch_size", 14) * small.get("spatial_merge_size", 2)  # of one token
    rotation = whole["text_config"].get("rope_parameters", {})
    if theta := rotary_settings(plain).get("rope_theta"):
        rotation["rope_theta"] = theta
    return whole | {"vision_config": small} | {key: original[key] for key in _IDS if key in original}


def ids_of(tokenizer: Any) -> dict[str, int]:
    """Returns the ids of IMAGE_TOKENS under the keys of config.json."""
    return dict(zip(_IDS, tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS)), strict=True))


def write_processor(source: Path, folder: Path, tower: Mapping[str, Any]) -> bool:
    """Writes the image processor of `source` into `folder`, with images of few tokens. Returns whether it is the
    model's own; otherwise it is Qwen's. `tower`: vision_config of the small model.
    """
    own = _own_processor(source)
    patch, merge = tower.get("patch_size", 14), tower.get("spatial_merge_size", 2)
    settings = own or {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "temporal_patch_size": tower.get("temporal_patch_size", 2),
        "merge_size": merge,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    token = (settings.get("patch_size", patch) * settings.get("merge_size", merge)) ** 2
    kept = {key: value for key, value in settings.items() if key not in _LIMITS}
    small = kept | {"size": {"shortest_edge": token, "longest_edge": TOKENS * token}}
    (folder / _NESTED).unlink(missing_ok=True)
    (folder / _PROCESSOR).write_text(json.dumps(small, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return own is not None


def _own_processor(source: Path) -> dict[str, Any] | None:
    """Returns the settings of a model's image processor, which transformers reads in this order too."""
    nested = source / _NESTED
    if nested.is_file() and "image_processor" in (found := read_settings(nested, TEXT_BYTES)):
        return found["image_processor"]
    plain = source / _PROCESSOR
    return read_settings(plain, TEXT_BYTES) if plain.is_file() else None


def as_files(tensors: Mapping[str, NDArray]) -> dict[str, NDArray]:
    """Returns tensors by the names of mrl as transformers writes them: the text model inside the whole, and all experts
    of a layer in one tensor (mrl/model/wrapped.py).
    """
    experts: dict[str, dict[str, list[NDArray]]] = {}
    files = {}
    for name, tensor in tensors.items():
        found = _EXPERT.fullmatch(name)
        if found is None:
            files[_inside(name)] = tensor
        else:
            experts.setdefault(found[1], {}).setdefault(found[3], []).append(tensor)
    for module, parts in experts.items():
        sides = [np.stack(parts[side]) for side in ("gate", "up")]
        files[f"{_inside(module)}.gate_up_proj"] = np.concatenate(sides, axis=1)
        files[f"{_inside(module)}.down_proj"] = np.stack(parts["down"])
    return files


def _inside(name: str) -> str:
    if name.startswith("model.") and not name.startswith("model.visual."):
        return INSIDE + name.removeprefix("model.")
    return name
