"""Composes a run's configuration: preset < recipe < `--set`, with the origin of every value.

What the schema refuses is described: which key, where it was written, what it may be. The rest of the configuration is
then built without the refused keys.

Loading imports no torch and takes well under a second.
"""

import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from mrl.algo.spec import AGGREGATIONS, CORRECTIONS
from mrl.config.describe import describe_loss
from mrl.config.schema import RunConfig, Section, schema_paths
from mrl.config.section import section_of
from mrl.config.yaml_tree import Node, Origin, dump_value, merge, parse_yaml
from mrl.errors import ConfigError, InvalidConfig, Violation, did_you_mean
from mrl.plain_files import CONFIG_BYTES, read_text, reason
from mrl.platforms.source import preset_file
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

    Where no file is at `path`, parallel_configs/... is the preset that came with mrl. Later ones win. A file's own keys
    win over the recipe that it names, and that recipe wins over the files it extends. `recipe` wins over the whole
    preset and replaces the preset's recipe. Raises ConfigError. SchemaRefusal lists everything that the schema refuses.
    """
    layers = _file_layers(preset_file(Path(path)), ())
    if recipe is not None:
        layers = [*layers, _recipe_layer(recipe, "--recipe")]
    layers = [*_with_last_recipe(layers), *(_Layer(_override(text)) for text in overrides)]
    tree = reduce(merge, (layer.tree for layer in layers))
    name = next((layer.recipe for layer in layers if layer.recipe), None)
    files = tuple(layer.file for layer in layers if layer.file)
    try:
        config = RunConfig.model_validate(tree.plain())
        # values that follow from other keys, where they are not set, so that the resolved configuration shows them
        derived = list(_derived(config))
        for path, value, key in derived:
            tree = merge(tree, _nest(path, Node(value, Origin(key))))
        if derived:
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
            f"{error}; put a text that YAML would read as another type into double quotes inside single ones"
        ) from None
    return _nest(key.strip().split("."), _at_origin(node, Origin(COMMAND_LINE)))


def _at_origin(node: Node, origin: Origin) -> Node:
    return Node({k: _at_origin(v, origin) for k, v in node.value.items()} if node.is_mapping else node.value, origin)


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


# ---------------------------------------------------------------- what the schema refuses

_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping",
    Any: "anything",
}
_BOUNDS = {Ge: ("ge", ">="), Gt: ("gt", ">"), Le: ("le", "<="), Lt: ("lt", "<")}


_Path = tuple[str, ...]


def schema_violations(error: ValidationError, tree: Node) -> dict[_Path, Violation]:
    """Turns all of pydantic's complaints about `tree` into violations, one for each path of keys, in the schema's
    order.
    """
    by_path = dict(_violation(e["type"], e["loc"], tree) for e in reversed(error.errors()))
    return dict(reversed(by_path.items()))


def rest_of(values: dict[str, Any], refused: Collection[_Path]) -> RunConfig:
    """Builds the configuration without the refused keys, so that rules about other keys can be judged.

    `values`, the configuration as written, is changed. Refused keys have a legal value while the schema is checked, and
    none afterwards: reading such a key raises UnknownValue.
    """
    fields = {tuple(path.split(".")): field for path, field in schema_paths()}
    for path in refused:
        _at(values, path[:-1]).pop(path[-1], None)
    for path in refused:
        if path in fields and fields[path].is_required():
            _at(values, path[:-1])[path[-1]] = _placeholder(fields[path])
    config = RunConfig.model_validate(values)
    for path in fields.keys() & set(refused):
        del vars(reduce(getattr, path[:-1], config))[path[-1]]
    return config


def _at(values: dict[str, Any], path: _Path) -> dict[str, Any]:
    return reduce(lambda below, key: below[key], path, values)


def _placeholder(field: FieldInfo) -> Any:
    """Returns some value that the schema accepts for a required key."""
    section = section_of(field.annotation)
    if section is not None:
        return {name: _placeholder(inner) for name, inner in section.model_fields.items() if inner.is_required()}
    if int in (field.annotation, *get_args(field.annotation)):
        return 1
    return "-"


def _bound_text(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def allowed_text(field: FieldInfo) -> str:
    """Describes what a field may be: `a number > 0`, `one of cpu, cuda, npu`, `a list, each text`."""
    bounds = [
        f"{sign} {_bound_text(getattr(m, name))}"
        for m in field.metadata
        for kind, (name, sign) in _BOUNDS.items()
        if isinstance(m, kind)
    ]
    return " ".join([_type_text(field.annotation), " and ".join(bounds)]).strip()


def _type_text(annotation: Any) -> str:
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join("null" if a is type(None) else _type_text(a) for a in reversed(arguments))
    if origin is tuple:
        count = "a list, each"
        if Ellipsis not in arguments:
            count = f"a list of {len(arguments)}, each"
        return f"{count} {_type_text(arguments[0])}"
    if origin is dict and get_origin(arguments[1]) is dict:
        return "a mapping of mappings"
    if origin is dict and arguments[1] is not Any:
        return f"a mapping, each value {_type_text(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with keys of {', '.join(annotation.model_fields)}"
    return _NAMES[origin or annotation]


def _violation(kind: str, loc: Sequence[Any], tree: Node) -> tuple[_Path, Violation]:
    owner, field, depth = _resolve(loc)
    path = loc[: depth + (kind == "extra_forbidden")]
    unknown = kind == "extra_forbidden"
    node, steps = tree.find(path)
    name = ".".join(map(str, path))
    where = ""
    if steps:
        where = str(node.origin)
    if unknown:
        return path, Violation(name, f"unknown key; {_suggestion(path, owner)}", where=where)
    if steps < len(path):
        return path, Violation(name, f"is not set; must be {allowed_text(field)}", where=where)
    value = node.plain()
    quote = ""
    if field.annotation is str and isinstance(value, int | float):
        quote = "; put it in quotes"
    return path, Violation(name, f"must be {allowed_text(field)}{quote}", value=value, where=where)


def _resolve(loc: Sequence[Any]) -> tuple[type[Section], FieldInfo | None, int]:
    """Returns the section in which a path ends, the last field on it, and the number of its keys.

    Later parts of the path lie inside a value.
    """
    owner = RunConfig
    field = None
    depth = 0
    for depth, key in enumerate(loc, start=1):
        if key not in owner.model_fields:
            return owner, field, depth - 1
        field = owner.model_fields[key]
        section = section_of(field.annotation)
        if section is None:
            break
        owner = section
    return owner, field, depth


def _suggestion(loc: Sequence[Any], owner: type[Section]) -> str:
    key = str(loc[-1])
    elsewhere = [path for path, _ in schema_paths() if path.rpartition(".")[2] == key]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return did_you_mean(key, owner.model_fields)
