"""Composes a run's configuration: preset < recipe < `--set`, with the origin of every value.

Loading imports no torch and takes well under a second.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mrl.algo.spec import AGGREGATIONS, CORRECTIONS
from mrl.config.describe import describe_loss
from mrl.config.schema import RunConfig
from mrl.config.schema_errors import rest_of, schema_violations
from mrl.config.yaml_tree import Node, Origin, dump_value, merge, parse_yaml
from mrl.errors import ConfigError, InvalidConfig, Violation, did_you_mean
from mrl.plain_files import CONFIG_BYTES, read_text, reason
from mrl.record.redact import without_secrets

RECIPES = Path(__file__).parent / "recipes"
DEFAULT = Origin("default")
COMMAND_LINE = "--set"
TIS = CORRECTIONS["TIS"]
# Keys that mean more where a user set them: the deadline then always holds, and no correction is chosen.
JUDGED_BY_BEING_SET = ("cluster.step_timeout_s", "algorithm.rollout_correction.level")


@dataclass(frozen=True)
class ResolvedConfig:
    """A whole configuration, with the origin of every value by its dotted key."""

    config: RunConfig
    origins: dict[str, Origin]
    recipe: str | None = None
    files: tuple[str, ...] = ()  # every YAML file that was read, lowest priority first

    def where(self, field: str) -> str:
        """Returns the origin of a key as text. For a section it is the origin of its first value that is no default."""
        below = [o for key, o in self.origins.items() if key == field or key.startswith(field + ".")]
        return str(next((o for o in below if o != DEFAULT), below[0] if below else DEFAULT))

    def to_yaml(self) -> str:
        """Returns the configuration as YAML, with every default and with each value's origin as a comment.

        `load_config` reads it back to an equal RunConfig. It names no recipe, because the recipe's values are written
        out.
        """
        return self._text(self.config.model_dump())

    def to_record(self) -> str:
        """Returns the configuration as YAML without secrets, as a run stores it. Whoever reads it has to set them
        again.
        """
        return self._text(without_secrets(self.config.model_dump()))

    def _text(self, values: dict[str, Any]) -> str:
        head = [
            f"# loss: {describe_loss(self.config)}",
            f"# recipe: {self.recipe or 'none'}",
            f"# files: {', '.join(self.files)}",
        ]
        return "\n".join([*head, *_lines(values, self.origins), ""])


class SchemaRefusal(InvalidConfig):
    """Raised for a configuration that the schema refuses in part. `rest` is the other part, for `rules.with_rules`."""

    def __init__(self, violations: Iterable[Violation], rest: ResolvedConfig) -> None:
        super().__init__(violations)
        self.rest = rest


@dataclass(frozen=True)
class _Layer:
    """One part of the composition. `recipe` is its name where it is a recipe."""

    tree: Node
    file: str | None = None
    recipe: str | None = None


def load_config(path: str | Path, recipe: str | None = None, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """Composes the preset at `path` (with its `extends:` and `recipe:`), `recipe` and `overrides` (`a.b=value`).

    Later ones win. A file's own keys win over the recipe that it names, and that recipe wins over the files it extends.
    `recipe` wins over the whole preset and replaces the preset's recipe. Raises ConfigError. SchemaRefusal lists
    everything that the schema refuses.
    """
    layers = _file_layers(Path(path), ())
    if recipe is not None:
        layers = [*layers, _recipe_layer(recipe, "--recipe")]
    layers = [*_with_last_recipe(layers), *(_Layer(_override(text)) for text in overrides)]
    tree = reduce(merge, (layer.tree for layer in layers))
    name = next((layer.recipe for layer in layers if layer.recipe), None)
    files = tuple(layer.file for layer in layers if layer.file)
    try:
        config = RunConfig.model_validate(tree.plain())
        written = tree
        tree = _with_derived(tree, config)
        if tree is not written:
            config = RunConfig.model_validate(tree.plain())
        return _resolved(config, tree, name, files)
    except ValidationError as error:
        refused = schema_violations(error, tree)
        rest = rest_of(tree.plain(), refused)
        raise SchemaRefusal(refused.values(), _resolved(rest, tree, name, files)) from None


def _resolved(config: RunConfig, tree: Node, recipe: str | None, files: tuple[str, ...]) -> ResolvedConfig:
    return ResolvedConfig(config, dict(_origins(config.model_dump(), tree)), recipe, files)


def available_recipes() -> tuple[str, ...]:
    """Returns the names of the recipes that come with the package."""
    return tuple(sorted(file.stem for file in RECIPES.glob("*.yaml")))


def _file_layers(path: Path, chain: tuple[Path, ...], open_files: frozenset[Path] = frozenset()) -> list[_Layer]:
    """Returns the files that a preset extends, its recipe and the preset itself, lowest priority first.

    `chain` holds the files that led to this one, `open_files` the same without links.
    """
    trail = " -> ".join(map(str, (*chain, path)))
    real = path.resolve()
    if real in open_files:
        raise ConfigError(f"extends: goes in a circle: {trail}")
    tree = parse_yaml(_read(path, trail), str(path))
    if not tree.is_mapping:
        raise ConfigError(f"{path}: must be a mapping of sections, such as model: and actor:")
    if not tree.value and not chain:
        raise ConfigError(
            f"{path}: is empty; a preset has at least model:, actor: and data:, or names a file under extends:"
        )
    keys = dict(tree.value)
    bases = keys.pop("extends", None)
    recipe = keys.pop("recipe", None)
    led = ((*chain, path), open_files | {real})
    layers = [layer for base in _base_paths(bases, path) for layer in _file_layers(base, *led)]
    if recipe is not None:
        layers.append(_recipe_layer(recipe.plain(), str(recipe.origin)))
    return [*layers, _Layer(Node(keys, tree.origin), file=str(path))]


def _read(path: Path, trail: str) -> str:
    try:
        return read_text(path, CONFIG_BYTES)
    except UnicodeDecodeError:
        raise ConfigError(f"{trail}: not UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{trail}: cannot be read: {reason(error)}") from None


def _base_paths(bases: Node | None, path: Path) -> list[Path]:
    names = []
    if bases is not None:
        names = bases.plain()
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"{bases.origin}: extends must be a file name or a list of them, relative to this file")
    if any("\0" in name for name in names):
        raise ConfigError(f"{bases.origin}: extends names a file with a zero byte in its name")
    return [_shortest(path.parent / name) for name in names]


def _shortest(path: Path) -> Path:
    """Shortens `a/b/../c.yaml` to `a/c.yaml`, so that origins are easy to read.

    The path stays as it is where b is a link and the two differ.
    """
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts and parts[-1] not in ("..", "/"):
            parts.pop()
        else:
            parts.append(part)
    short = Path(*parts)
    if short == path or short.resolve() == path.resolve():
        return short
    return path


def _recipe_layer(name: Any, where: str) -> _Layer:
    if name not in available_recipes():
        raise ConfigError(f"{where}: no recipe {name}; {did_you_mean(str(name), available_recipes())}")
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    return _Layer(parse_yaml(text, f"recipe {name}", with_lines=False), recipe=name)


def _with_last_recipe(layers: list[_Layer]) -> list[_Layer]:
    """Keeps only the last recipe. Two of them would mix one algorithm's clip with another's loss."""
    named = [i for i, layer in enumerate(layers) if layer.recipe]
    return [layer for i, layer in enumerate(layers) if i not in named[:-1]]


def _override(text: str) -> Node:
    key, equals, value = text.partition("=")
    if key.startswith("~"):
        raise ConfigError(
            f"--set {text}: hydra's ~ removes a key; here a key that is left out has its default; or --set KEY=null, "
            "where it may be null"
        )
    if not equals or not value.strip() or not all(key.strip().split(".")):
        raise ConfigError(f"--set {text}: must read a.b=value, such as actor.optim.lr=1e-6 (null unsets a key)")
    try:
        node = parse_yaml(value, f"--set {text}", with_lines=False)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; a text that YAML reads otherwise stands in double quotes inside single ones"
        ) from None
    return _nest(key.strip().split("."), _at_origin(node, Origin(COMMAND_LINE)))


def _at_origin(node: Node, origin: Origin) -> Node:
    return Node({k: _at_origin(v, origin) for k, v in node.value.items()} if node.is_mapping else node.value, origin)


def _with_derived(tree: Node, config: RunConfig) -> Node:
    """Adds values that follow from other keys where they are not set, so that the resolved configuration shows them."""
    for path, value, key in _derived(config):
        tree = merge(tree, _nest(path, Node(value, Origin(key))))
    return tree


def _derived(config: RunConfig) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """Yields keys with their values, and the key that each follows from.

    Dr. GRPO's divisor is the longest response, DAPO's buffer is a fifth of it. Quantised engines get a correction for
    the gap to the trained weights.
    """
    length = "data.max_response_length"
    loss = config.algorithm.policy_loss
    buffer = config.algorithm.overlong_buffer
    longest = config.data.max_response_length
    aggregation = AGGREGATIONS.get(loss.loss_agg_mode)
    if aggregation is not None and aggregation.needs_scale_factor and loss.loss_scale_factor is None:
        yield ("algorithm", "policy_loss", "loss_scale_factor"), float(longest), length
    if buffer.enable and buffer.len is None:
        yield ("algorithm", "overlong_buffer", "len"), max(longest // 5, 1), length
    if config.rollout.quantization is not None and _lacks_a_correction(config):
        yield ("algorithm", "rollout_correction", "level"), TIS.level, "rollout.quantization"


def _lacks_a_correction(config: RunConfig) -> bool:
    """Whether no correction is set although the loss could have one."""
    algorithm = config.algorithm
    is_said = "level" in algorithm.rollout_correction.model_fields_set
    is_filtered = config.rollout.top_p != 1 or config.rollout.top_k != -1
    return not (is_said or is_filtered or algorithm.anchor == "rollout" or algorithm.on_policy)


def _nest(path: Iterable[str], node: Node) -> Node:
    for part in reversed(tuple(path)):
        node = Node({part: node}, node.origin)
    return node


def _origins(values: dict[str, Any], tree: Node, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, Origin]]:
    for key, value in values.items():
        path = (*prefix, key)
        if isinstance(value, dict) and value:
            yield from _origins(value, tree, path)
            continue
        node, steps = tree.find(path)
        yield ".".join(path), node.origin if steps == len(path) else DEFAULT


def _lines(values: dict[str, Any], origins: dict[str, Origin], prefix: tuple[str, ...] = ()) -> Iterator[str]:
    indent = "  " * len(prefix)
    for key, value in values.items():
        path = (*prefix, key)
        if isinstance(value, dict) and value:
            yield f"{indent}{dump_value(key)}:"
            yield from _lines(value, origins, path)
            continue
        name = ".".join(path)
        # what stands in the file counts as set when it is read again
        comment = "# " if name in JUDGED_BY_BEING_SET and origins[name] == DEFAULT else ""
        yield f"{indent}{comment}{dump_value(key)}: {dump_value(value)}  # {origins[name]}"
