"""Sizes of the vision tower of a model that reads images, from `vision_config` of its config.json: weights and FLOPs.

    pixels --> patches --> layers with attention, over the patches of one image --> merger: a token for each square of
    patches, and one more merger for each of DeepStack's features (arXiv:2406.04334)

Keys that are left out have the values of transformers' classes.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

from mrl.errors import ConfigError, shown

_QWEN3 = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "in_channels": 3, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584, "num_position_embeddings": 2304,
}  # fmt: skip
_QWEN2_5 = {
    "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "in_channels": 3, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
_DEEPSTACK = "deepstack_visual_indexes"
# model_type of the whole -> what its class's tower has where config.json leaves it out
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": _QWEN2_5,
    "qwen3_vl": _QWEN3 | {_DEEPSTACK: [8, 16, 24]},
    "qwen3_vl_moe": _QWEN3 | {_DEEPSTACK: [8, 16, 24]},
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
}


@dataclass(frozen=True)
class VisionTower:
    """Sizes of a tower."""

    layers: int
    hidden_size: int
    intermediate_size: int
    patch: tuple[int, int, int, int]  # numbers of one patch: colours, times, rows and columns
    merged: int  # patches of one token
    out_hidden_size: int  # of features, which is the text model's
    positions: int  # learned ones; 0: there are none
    features: int  # DeepStack's, beside those of the embedding
    gated: bool  # Qwen2.5-VL's layers: RMS norms and MLPs with a gate
    window_patches: int = 0  # patches that attend to each other in most layers; 0: all of an image do in each
    whole_layers: int = 0  # layers without windows, if others have them

    @classmethod
    def of(cls, config: dict[str, Any]) -> "VisionTower | None":
        """Returns the tower that config.json of a whole model describes; None for a class without a known one.

        Raises ConfigError for sizes that are no whole numbers, and for features that the class does not have.
        """
        defaults = _DEFAULTS.get(str(config.get("model_type")))
        given = config.get("vision_config") or {}
        if defaults is None or not isinstance(given, dict):
            return None
        found = {key: given.get(key, value) for key, value in defaults.items()}
        for key, value in found.items():
            _check(key, value, type(defaults[key]))
        gated = defaults is _QWEN2_5
        if defaults is _QWEN3 and given.get(_DEEPSTACK):
            raise ConfigError(
                f"config.json: vision_config.{_DEEPSTACK} = {shown(given[_DEEPSTACK])}: must be [], or left out: this "
                "class has no such features in transformers, and vLLM would look for their weights"
            )
        merged = found["spatial_merge_size"] ** 2
        windows = {}
        if gated:
            side = found["window_size"] // found["patch_size"]
            windows = {"window_patches": side**2, "whole_layers": len(found["fullatt_block_indexes"])}
        return cls(
            layers=found["depth"],
            hidden_size=found["hidden_size"],
            intermediate_size=found["intermediate_size"],
            patch=(found["in_channels"], found["temporal_patch_size"], found["patch_size"], found["patch_size"]),
            merged=merged,
            out_hidden_size=found["out_hidden_size"],
            positions=found.get("num_position_embeddings", 0),
            features=len(found.get(_DEEPSTACK, ())),
            gated=gated,
            **windows,
        )

    @property
    def patch_numbers(self) -> int:
        """How many numbers a patch has."""
        return prod(self.patch)

    @property
    def parameters(self) -> int:
        """Number of weights, all mergers included."""
        hidden = self.hidden_size
        wide = hidden * self.merged
        embedding = self.patch_numbers * hidden + self.positions * hidden
        norm = 2 * hidden  # weight and bias
        merger = wide * wide + wide + wide * self.out_hidden_size + self.out_hidden_size
        if self.gated:
            norm = hidden
            mlp = 3 * hidden * self.intermediate_size + 2 * self.intermediate_size + hidden
        else:
            embedding += hidden
            mlp = 2 * hidden * self.intermediate_size + self.intermediate_size + hidden
        layer = 2 * norm + 4 * hidden * hidden + 4 * hidden + mlp
        added = merger + 2 * wide  # whose norm is behind the merging
        return embedding + self.layers * layer + norm + merger + self.features * added

    def flops(self, patches: float) -> float:
        """Returns the FLOPs of a forward pass over one image of so many patches."""
        hidden = self.hidden_size
        wide = hidden * self.merged
        mlp = (3 if self.gated else 2) * hidden * self.intermediate_size
        products = self.patch_numbers * hidden + self.layers * (4 * hidden * hidden + mlp)
        merger = (1 + self.features) * (wide * wide + wide * self.out_hidden_size) / self.merged
        whole = self.whole_layers if self.window_patches else self.layers
        attended = whole * patches + (self.layers - whole) * min(self.window_patches, patches)
        return patches * (2 * (products + merger) + 4 * hidden * attended)

    def feature_numbers(self) -> int:
        """Returns the numbers of one token of an image: in the embedding's place, and those added behind layers."""
        return (1 + self.features) * self.out_hidden_size


def _check(key: str, value: Any, kind: type) -> None:
    if kind is list and not isinstance(value, list):
        raise ConfigError(f"config.json: vision_config.{key} = {shown(value)}: must be a list, or left out")
    if kind is int and (type(value) is not int or value < 1):
        raise ConfigError(f"config.json: vision_config.{key} = {shown(value)}: must be a whole number above 0")
