"""A checkpoint directory's config.json -> ModelSpec. Nothing but JSON is read and no code of the checkpoint runs."""

import json
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import qwen2, qwen2_moe, qwen3, qwen3_moe
from mrl.model.fields import HfConfig
from mrl.model.spec import ModelSpec

FAMILIES = {family.ARCHITECTURE: family for family in (qwen2, qwen3, qwen2_moe, qwen3_moe)}


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """The config.json of a checkpoint directory. Raises EnvironmentFault when it is missing or no JSON object."""
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        hint = "" if Path(path).is_dir() else " (no such directory; a hub name must be downloaded first)"
        raise EnvironmentFault(f"{file} does not exist{hint}: model.path must be a Hugging Face checkpoint directory") from None
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise EnvironmentFault(f"{file} holds a {type(config).__name__}, not a JSON object")
    return config


def model_spec(config: HfConfig) -> ModelSpec:
    """Raises ConfigError for remote code, an unsupported architecture, a missing key or a feature that training would not compute."""
    if config.get("auto_map"):
        raise ConfigError(
            "config.json has auto_map: the checkpoint wants its own code to run (trust_remote_code), which mrl never does; "
            f"use a checkpoint of {_supported()}"
        )
    names = config.get("architectures") or []
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        raise ConfigError(f"config.json: architectures = {names} is not supported; supported: {_supported()}")
    return family.read(config)


def load_model_spec(path: str | Path) -> ModelSpec:
    """The model in a checkpoint directory. Raises EnvironmentFault and ConfigError that name the directory."""
    config = read_hf_config(path)
    try:
        return model_spec(config)
    except ConfigError as error:
        raise ConfigError(f"model.path {path}: {error}") from None


def _supported() -> str:
    return ", ".join(FAMILIES)
