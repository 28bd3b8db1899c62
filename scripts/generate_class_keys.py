"""Writes mrl/model/class_keys.json: what transformers' configuration class of each family takes and gives.

    python scripts/generate_class_keys.py            # write
    python scripts/generate_class_keys.py --check    # exit 1 when the file does not match the installed transformers

A key's entry is [kinds of its value as JSON has them, value of a configuration without the key]. "null" is among the
kinds if the class takes it.
"""

import argparse
import dataclasses
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mrl.model.registry import FAMILIES

TARGET = Path(__file__).parents[1] / "mrl" / "model" / "class_keys.json"
_JSON = {int: "int", float: "float", bool: "bool", str: "str", list: "list", dict: "dict", types.NoneType: "null"}
_OF_ALL = {field.name for field in dataclasses.fields(PreTrainedConfig)} - {"tie_word_embeddings"}


def classes() -> dict[str, type]:
    """Returns the classes of all families, and of their text models inside models that read images."""
    names = {name for family in FAMILIES.values() for name in (family.model_type, family.wrapped_type) if name}
    return {name: _class_of(name) for name in sorted(names)}


def _class_of(model_type: str) -> type:
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    for cls in map(CONFIG_MAPPING.__getitem__, CONFIG_MAPPING):
        for inner in cls.sub_configs.values():
            if inner.model_type == model_type:
                return inner
    raise ValueError(f"transformers has no class of model_type {model_type}")


def keys_of(cls: type) -> dict[str, list[Any]]:
    """Returns the keys of a class."""
    made = cls()
    found = {"rope_theta": [["int", "float"], made.rope_parameters["rope_theta"]]}
    for field in dataclasses.fields(cls):
        if field.name in _OF_ALL or field.name == "rope_parameters" or field.default is dataclasses.MISSING:
            continue
        found[field.name] = [_kinds(cls, field), field.default]
    return found


def _kinds(cls: type, field: dataclasses.Field) -> list[str]:
    options = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
    names = {_JSON[typing.get_origin(option) or option] for option in options} - {"null"}
    if _takes_null(cls, field.name):
        names.add("null")
    return sorted(names)


def _takes_null(cls: type, name: str) -> bool:
    try:
        cls(**{name: None})
    except Exception:  # of whatever kind: such a configuration is none
        return False
    return True


def text() -> str:
    """Returns the file's content, a key a line."""
    found = []
    for model_type, cls in classes().items():
        rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(keys_of(cls).items()))
        found.append(f" {json.dumps(model_type)}: {{\n{rows}\n }}")
    return "{\n" + ",\n".join(found) + "\n}\n"


def main() -> None:
    """Writes the file, or compares it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if not options.check:
        TARGET.write_text(text(), encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != text():
        sys.exit(f"{TARGET} is not that of the installed transformers: python {Path(__file__).name} writes it")


if __name__ == "__main__":
    main()
