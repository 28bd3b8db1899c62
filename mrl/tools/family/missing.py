"""Reads the model that `mrl family check` is given, and says what an unknown family lacks."""

from pathlib import Path
from typing import Any

from mrl.errors import ConfigError, MrlError
from mrl.model.registry import FAMILIES, known_hf_config, known_name, own_config, read_hf_config, wrapper_of
from mrl.tools.family.config_keys import transformers_folder, vllm_file


def config_of(model: str) -> dict[str, Any]:
    """Returns the text model's config.json of a folder, or of a known name.

    Raises ConfigError for a family that is not supported, with what is there of it and what has to be written.
    """
    config = _published(model)
    names = config.get("architectures") or []
    if names and wrapper_of(config) is None and not any(known in FAMILIES for known in names):
        raise ConfigError(_missing(config, names))
    return dict(own_config(config))


def _of_engine(files: list[str]) -> str:
    if not files:
        return "no class"
    if files[0] == "transformers":
        return (
            "no class of its own (it runs transformers'): give engine_architecture, and engine_keys as "
            "`architectures`, one of vLLM's with the same layers"
        )
    return f"models/{files[0]}.py"


def _published(model: str) -> dict[str, Any]:
    name = known_name(model)
    if name is None or Path(model).is_dir():
        return read_hf_config(model)
    return known_hf_config(name)


def _missing(config: dict[str, Any], names: list[str]) -> str:
    model_type = config.get("model_type")
    lines = [f"no family of {names}, model_type {model_type!r}. What there is of it:"]
    try:
        folder = transformers_folder(str(model_type))
        lines.append(f"  transformers: {f'models/{folder.name}' if folder else 'no class, so nothing to compare with'}")
        engine = [found for name in names if (found := vllm_file(name))]
        lines.append(f"  vLLM: {_of_engine(engine)}")
    except MrlError as error:
        lines.append(f"  {error}")
    lines.append(
        "What has to be written: its rows in mrl/model/NAME.py with a FAMILY, its module in _MODULES of "
        "mrl/model/registry.py, its small form in SMALL_FORMS of mrl/tools/rehearse/small_model.py; "
        "docs/adding_a_family.md shows one from nothing"
    )
    return "\n".join(lines)
