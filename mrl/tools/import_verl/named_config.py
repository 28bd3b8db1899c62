"""Reads the configuration file that a launch script names by --config-name and --config-path.

The script's own overrides win over it. verl's own files are known by name. Another file is read where it is on this
machine. Otherwise it is a fault of the import.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.config.yaml_tree import parse_yaml
from mrl.errors import ConfigError
from mrl.plain_files import CONFIG_BYTES, read_text, reason
from mrl.tools.import_verl.expansion import Value

_MEGATRON = {"model_engine": "megatron"}
# Generation on separate devices, beside training; ratios use the engine's log-probs.
_BESIDE = {"rollout.nnodes": 1, "rollout.n_gpus_per_node": 8, "algorithm.rollout_correction.bypass_mode": True}
_FULLY_ASYNC = {**_BESIDE, "rollout.n": 4, "data.gen_batch_size": 1, "async_training.partial_rollout": True}
_TURNS = {
    "data.max_prompt_length": 1024,
    "data.max_response_length": 1024,
    "data.train_batch_size": 256,
    "data.return_raw_chat": True,
    "actor_rollout_ref.rollout.name": "sglang",
    "actor_rollout_ref.rollout.multi_turn.enable": True,
}
_PICTURES = _TURNS | {"data.max_prompt_length": 2048, "data.max_response_length": 2048}
_SEARCHES = _TURNS | {"data.shuffle": False}
# Values in verl's files that differ from its defaults, in releases 0.6 to 0.9.
SHIPPED: dict[str, Mapping[str, Any]] = {
    "ppo_trainer": {},
    "ppo_megatron_trainer": _MEGATRON,
    "dapo_trainer": {"reward_model.reward_manager": "dapo"},
    "dapo_megatron_trainer": {"reward_model.reward_manager": "dapo", **_MEGATRON},
    "one_step_off_ppo_trainer": _BESIDE,
    "one_step_off_ppo_megatron_trainer": {**_BESIDE, **_MEGATRON},
    "fully_async_ppo_trainer": _FULLY_ASYNC,
    "fully_async_ppo_megatron_trainer": {**_FULLY_ASYNC, **_MEGATRON},
    **dict.fromkeys(
        (
            "gsm8k_multiturn_grpo",
            "gsm8k_multiturn_grpo_server",
            "gsm8k_multiturn_grpo_w_interaction",
            "retool_multiturn_grpo",
        ),
        _TURNS,
    ),
    **dict.fromkeys(("search_multiturn_grpo", "search_multiturn_grpo_one_step_off"), _SEARCHES),
    "gsm8k_multiturn_megatron_grpo": {**_TURNS, **_MEGATRON},
    "geo3k_multiturn_grpo": _PICTURES,
    "geo3k_multiturn_megatron_grpo": {**_PICTURES, **_MEGATRON},
}
# The default file of an entry point, by a part of its module's name.
_OF_ENTRY = {
    "one_step_off": "one_step_off_ppo_trainer",
    "fully_async": "fully_async_ppo_trainer",
    "dapo": "dapo_trainer",
}


@dataclass(frozen=True)
class NamedConfig:
    """The settings of a named configuration. `values` has dotted keys of verl's.

    `said` is a remark about them, or "". `faults` are files that are not on this machine.
    """

    values: Mapping[str, Any]
    said: str = ""
    faults: tuple[str, ...] = ()


def named_config(name: str, folder: Value | None, entry: str, script: str) -> NamedConfig:
    """Returns what the file `name` in `folder` sets, including the files that it extends.

    `folder` is the value of --config-path, relative to the script's folder or the current one; None where none is
    given. Raises ConfigError for a file that is no mapping.
    """
    name = name.removesuffix(".yaml") or next(
        (file for part, file in _OF_ENTRY.items() if part in entry), "ppo_trainer"
    )
    folders = []
    if not (folder is None or not folder.known):
        folders = [base / folder.text for base in (Path(script).parent, Path.cwd())]
    values, faults = _of_file(name, folders, ())
    said = ""
    if values:
        said = f"the configuration {name} sets {', '.join(f'{key}={value}' for key, value in values.items())}"
    return NamedConfig(values, said, tuple(faults))


def _of_file(name: str, folders: Sequence[Path], chain: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    file = next((file for folder in folders if os.path.isfile(file := folder / f"{name}.yaml")), None)
    if file is None or name in chain:
        if name in SHIPPED:
            return dict(SHIPPED[name]), []
        missing = (
            f"give --config-path FOLDER with {name}.yaml in it, or its keys as overrides: --config-name {name}: that "
            "file is not at hand, so what it sets is not read"
        )
        return {}, [missing]
    try:
        text = read_text(file, CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {reason(error)}") from None
    tree = parse_yaml(text, str(file), with_lines=False).plain()
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: must be a mapping of sections, as verl's configurations are")
    values, faults = _of_defaults(tree.pop("defaults", []), folders, (*chain, name))
    tree.pop("hydra", None)
    return values | dict(_leaves(tree, "")), faults


def _of_defaults(defaults: Any, folders: Sequence[Path], chain: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns what the files of a `defaults:` list set, in order.

    Choices in the list count too (`override model_engine: megatron`).
    """
    values: dict[str, Any] = {}
    faults: list[str] = []
    for item in defaults if isinstance(defaults, list) else []:
        if isinstance(item, str) and item != "_self_":
            below, missing = _of_file(item.removesuffix("@_here_"), folders, chain)
            values |= below
            faults += missing
        elif isinstance(item, dict):
            values |= {
                key.removeprefix("override ").lstrip("/"): value
                for key, value in item.items()
                if not key.startswith("optional")
            }
    return values, faults


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields dotted keys with their values. Class names, and values that repeat another key's, are left out."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif key != "_target_" and not (isinstance(value, str) and value.startswith("${")):
            yield f"{prefix}{key}", value
