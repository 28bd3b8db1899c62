"""A Megatron layout for a script that has none: that of the preset for the same model, on the script's own devices."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mrl
from mrl.config.load import load_config
from mrl.config.schema import LayoutConfig
from mrl.errors import ConfigError
from mrl.model import known_name
from mrl.model.layout import LayoutDegrees

_DEFAULT = LayoutConfig(world_size=1).model_dump()


@dataclass(frozen=True)
class Chosen:
    """Degrees (keys of LayoutConfig, without world_size and defaults) and where they are from, in words."""

    degrees: dict[str, Any]
    source: str


def preset_folder() -> Path | None:
    """The presets that come with the source tree, looked for in the current directory and beside the package."""
    folders = (Path.cwd() / "parallel_configs", Path(mrl.__file__).parents[1] / "parallel_configs")
    return next((folder for folder in folders if folder.is_dir()), None)


def choose_layout(model: str, device: str, devices: int, preset: str | None = None) -> Chosen | None:
    """The layout of `preset`, or of the preset for `model` that is nearest to the device and the number of devices.

    None where no preset is of that model, or none divides over the devices. Raises ConfigError for a preset that cannot be used.
    """
    if preset is not None:
        chosen = _layout_of(Path(preset))
        if chosen is None or devices % _ranks(chosen.degrees):
            raise ConfigError(f"--preset {preset}: its layout does not divide over the script's {devices} devices")
        return chosen
    found = [(rank, chosen) for rank, chosen in _candidates(model, device, devices) if not devices % _ranks(chosen.degrees)]
    return min(found, key=lambda pair: (pair[0], pair[1].source))[1] if found else None


def _candidates(model: str, device: str, devices: int) -> Iterator[tuple[tuple[Any, ...], Chosen]]:
    folder, name = preset_folder(), known_name(model)
    for file in sorted(folder.glob("*/*.yaml")) if folder is not None and name is not None else ():
        config = load_config(file).config
        if known_name(config.model.path) == name and (chosen := _layout_of(file)) is not None:
            world = config.actor.layout.world_size
            rank = (config.cluster.device != device, config.cluster.placement != "colocated", world != devices, abs(world - devices))
            yield rank, chosen


def _layout_of(file: Path) -> Chosen | None:
    layout = load_config(file).config.actor.layout.model_dump()
    degrees = {key: value for key, value in layout.items() if key != "world_size" and value != _DEFAULT[key]}
    return Chosen(degrees, f"that of the preset {file.parent.name}/{file.name}")


def _ranks(degrees: dict[str, Any]) -> int:
    d = LayoutDegrees.of({**degrees, "world_size": 1})
    return max(d.dense_ranks, d.expert_ranks)
