"""A resolved configuration as text: every key with its value and origin, for files of any version."""

import re
from dataclasses import dataclass
from pathlib import Path

from pydantic_core import PydanticUndefined

from mrl.config.load import COMMAND_LINE, RECIPES, available_recipes
from mrl.config.schema import schema_keys
from mrl.config.yaml_tree import Node, dump_value, parse_yaml
from mrl.errors import ConfigError
from mrl.plain_files import CONFIG_BYTES, read_text, reason

_DEFAULT = "default"
_RECIPE = "recipe "
_LEAF = re.compile(r"(?P<indent> *)(?P<key>[^\s:#][^:]*):(?: (?P<value>.*?)  # (?P<origin>.*))?")
_COMMENTED = re.compile(r"^( +)# ")  # a default whose key would say more if it were read again


@dataclass(frozen=True)
class Setting:
    """One key: its value as YAML text, and its origin."""

    key: str
    value: str
    origin: str

    @property
    def is_own(self) -> bool:
        """Tells whether the user or a preset set it, not the recipe or the schema."""
        return self.origin != _DEFAULT and not self.origin.startswith(_RECIPE)

    @property
    def on_command_line(self) -> bool:
        """Tells whether `--set` set it."""
        return self.origin == COMMAND_LINE


@dataclass(frozen=True)
class Settings:
    """A complete resolved configuration. `recipe`: the name in its head; None if absent."""

    by_key: dict[str, Setting]
    recipe: str | None
    head: tuple[str, ...]

    def text(self, key: str, missing: str = "") -> str:
        """Returns the value of a key: text unchanged, anything else as YAML writes it."""
        if key not in self.by_key:
            return missing
        value = self.by_key[key].value
        plain = parse_yaml(value, key, with_lines=False).value
        if isinstance(plain, str):
            return plain
        return value

    def number(self, key: str) -> float | None:
        """Returns the value of a key if it is a number, else None."""
        try:
            return float(self.text(key))
        except ValueError:
            return None

    def own(self) -> list[tuple[Setting, str]]:
        """Returns settings that differ from the recipe and the schema, each with the value that it would otherwise
        have.
        """
        usual = _usual(self.recipe)
        rows = [(setting, usual.get(key, "")) for key, setting in self.by_key.items() if setting.is_own]
        return [(setting, value) for setting, value in rows if setting.value != value]


def read_settings(path: Path) -> Settings:
    """Reads a resolved configuration. Raises ConfigError for any other file."""
    try:
        text = read_text(path, CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as text ({reason(error)})") from None
    by_key: dict[str, Setting] = {}
    open_keys: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LEAF.fullmatch(_COMMENTED.sub(r"\1", line))
        if match is None:
            raise ConfigError(f"{path}:{number}: not a line of a resolved configuration: {line[:80]}")
        open_keys = [*open_keys[: len(match["indent"]) // 2], match["key"].strip()]
        if match["value"] is not None:
            key = ".".join(open_keys)
            by_key[key] = Setting(key, match["value"], match["origin"])
    if not by_key:
        raise ConfigError(f"{path}: holds no key; it is not a resolved configuration")
    head = tuple(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
    return Settings(by_key, _recipe(head), head)


def _recipe(head: tuple[str, ...]) -> str | None:
    names = [line.removeprefix("recipe: ").strip() for line in head if line.startswith("recipe: ")]
    if names and names[0] != "none":
        return names[0]
    return None


def _usual(recipe: str | None) -> dict[str, str]:
    """Returns the value of every key if only the recipe was given."""
    fields = schema_keys()
    usual = {key: dump_value(field.default) for key, field in fields.items() if field.default is not PydanticUndefined}
    if recipe in available_recipes():
        tree = parse_yaml(
            (RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8"), f"recipe {recipe}", with_lines=False
        )
        usual |= {key: _as_resolved(text, fields, key) for key, text in _leaves(tree)}
    return usual


def _as_resolved(text: str, fields: dict, key: str) -> str:
    """Formats a float of the schema in one way, however the recipe wrote it."""
    if key in fields and fields[key].annotation in (float, float | None) and text != "null":
        return dump_value(float(text))
    return text


def _leaves(node: Node, prefix: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    if not node.is_mapping:
        return [(".".join(prefix), dump_value(node.value))]
    return [leaf for key, child in node.value.items() for leaf in _leaves(child, (*prefix, str(key)))]
