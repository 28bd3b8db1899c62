"""Chooses a preset's Megatron layout for a script without one, or says why the model's family is not supported."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mrl.config.load import load_config
from mrl.config.schema import LayoutConfig, RunConfig
from mrl.errors import ConfigError
from mrl.model import is_size_of_known, known_like, known_name
from mrl.model.layout import LayoutDegrees
from mrl.platforms.source import PRESETS, preset_folder

_SHOWN = 60  # characters of a model's name
_DEFAULT = LayoutConfig(world_size=1).model_dump()
# Families in launch scripts that mrl does not have: (pattern of the model's name, what it is). The first match counts.
_OTHERS = (
    (
        r"omni|[-_.]vl|vl[-_.]|internvl|minicpm|glm-?4\.?(1|5)v|paligemma|geo3k",
        "a model that also reads images or sound",
    ),
    (r"kimi[-_]?linear", "Kimi-Linear (linear attention beside latent attention)"),
    (r"deepseek[-_]?v(3[._]2|4)", "DeepSeek-V3.2 or later (attention through a sparse indexer)"),
    (r"deepseek[-_]?v2", "DeepSeek-V2 (latent attention with softmax routers)"),
    (r"glm(?!-?4\.[567])", "GLM-4"),
    (r"mimo", "MiMo (multi-token prediction)"),
    (r"gemma", "Gemma"),
    (r"nemotron", "Nemotron (state-space layers)"),
    (r"longcat", "LongCat (experts of size zero)"),
)


@dataclass(frozen=True)
class Chosen:
    """Degrees (keys of LayoutConfig, without world_size and defaults), and their origin in words."""

    degrees: dict[str, Any]
    source: str


def choose_layout(
    model: str, device: str, devices: int, preset: str | None = None, with_adapters: bool = False
) -> Chosen | None:
    """Returns the layout of `preset`, or of the nearest preset for `model`, device and number of devices.

    `with_adapters` says that the script trains adapters, so that presets for adapters may be used. Returns None where
    no preset has that model, or none divides over the devices. Raises ConfigError for a preset that cannot be used.
    """
    if preset is not None:
        chosen = _layout_of(Path(preset), load_config(preset).config)
        if devices % _ranks(chosen.degrees):
            raise ConfigError(f"--preset {preset}: its layout does not divide over the script's {devices} devices")
        return chosen
    dividing = [
        (rank, chosen)
        for rank, chosen in _candidates(model, device, devices, with_adapters)
        if not devices % _ranks(chosen.degrees)
    ]
    if dividing:
        return min(dividing, key=lambda pair: (pair[0], pair[1].source))[1]
    return None


def unknown_family(path: str, is_there: bool) -> str | None:
    """Says why a script's model cannot be trained or planned, and what can. None where its folder is here."""
    if is_there:
        return None
    name = Path(path).name
    short = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
    other = next((what for pattern, what in _OTHERS if re.search(pattern, name.lower())), None)
    if other is not None and not is_size_of_known(path):
        return f"{short} is {other}, a family that is not here; README.md lists those that are"
    near = known_like(path)
    return f"not on this machine, and not a known name, {near}; give --set model.path=FOLDER, or a name that is known"


def _candidates(model: str, device: str, devices: int, with_adapters: bool) -> Iterator[tuple[tuple[Any, ...], Chosen]]:
    here = Path(PRESETS)
    folder = here if here.is_dir() else preset_folder()
    name = known_name(model)
    if name is None:
        return
    for file in sorted(folder.glob("*/*.yaml")):
        config = _preset(file)
        if config.actor.lora.rank and not with_adapters:
            continue
        if known_name(config.model.path) == name:
            world = config.actor.layout.world_size
            rank = (
                config.cluster.device != device,
                config.cluster.placement != "colocated",
                world != devices,
                abs(world - devices),
            )
            yield rank, _layout_of(file, config)


@cache
def _preset(file: Path) -> RunConfig:
    """Returns one of the folder's presets, which are read once: every script without a layout asks for all of them."""
    return load_config(file).config


def _layout_of(file: Path, config: RunConfig) -> Chosen:
    layout = config.actor.layout.model_dump()
    degrees = {key: value for key, value in layout.items() if key != "world_size" and value != _DEFAULT[key]}
    return Chosen(degrees, f"that of the preset {file.parent.name}/{file.name}")


def _ranks(degrees: dict[str, Any]) -> int:
    d = LayoutDegrees.of({**degrees, "world_size": 1})
    return max(d.dense_ranks, d.expert_ranks)
