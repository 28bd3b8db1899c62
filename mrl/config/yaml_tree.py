"""Parses YAML text into a tree that knows where every value was written.

It reads plain data only: no tags, no duplicate keys, no merge keys. Plain scalars follow the core schema of YAML 1.2,
not PyYAML's 1.1. So `3e-4` is a number, `on` and `1:30` are text, and dates stay text.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from mrl.errors import ConfigError

MAX_NODES = 20_000  # after alias expansion; the largest real configuration has a few hundred
MAX_DEPTH = 100
MOST_DIGITS = 100  # in a whole number
_TAG = "tag:yaml.org,2002:"
_FLOAT = r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
_SCALARS = (
    (_TAG + "null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    (_TAG + "bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    (_TAG + "int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (_TAG + "float", _FLOAT, list("-+.0123456789")),
)
_MERGE = "<<"


@dataclass(frozen=True)
class Origin:
    """Where a value comes from: a file with its line, a recipe, the command line, another key, or the default."""

    name: str
    line: int | None = None

    def __str__(self) -> str:
        if self.line is None:
            return self.name
        return f"{self.name}:{self.line}"


@dataclass(frozen=True)
class Node:
    """A value with its origin. A mapping holds further nodes, everything else is plain data."""

    value: "dict[str, Node] | Any"
    origin: Origin

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.value, dict)

    def plain(self) -> Any:
        """Returns the value without origins."""
        if self.is_mapping:
            return {key: child.plain() for key, child in self.value.items()}
        return self.value

    def find(self, path: Iterable[Any]) -> tuple["Node", int]:
        """Returns the deepest node along `path`, and how many steps of the path exist."""
        node = self
        steps = 0
        for key in path:
            if not node.is_mapping or key not in node.value:
                break
            node = node.value[key]
            steps = steps + 1
        return node, steps


def merge(below: Node, above: Node) -> Node:
    """Merges two trees. `above` wins. Mappings merge key by key, everything else (lists too) is replaced."""
    if not (below.is_mapping and above.is_mapping):
        return above
    merged = dict(below.value)
    for key, child in above.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return Node(merged, above.origin)


@lru_cache(maxsize=512)  # presets, what they extend and recipes are read again for every variant that is tried
def parse_yaml(text: str, name: str, with_lines: bool = True) -> Node:
    """Parses one document. An empty document is an empty mapping. Raises ConfigError.

    `name` appears in origins and messages. Calls with the same text share one tree, so nobody may change it.
    """
    try:
        root = _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        line = ""
        if error.problem_mark:
            line = f":{error.problem_mark.line + 1}"
        raise ConfigError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply") from None
    if root is not None:
        return _Builder(name, with_lines).node(root)
    return Node({}, Origin(name))


def dump_value(value: Any) -> str:
    """Writes a value as one line of YAML, which `parse_yaml` reads back as the same value."""
    if value is None or isinstance(value, str | int):
        return _dump_again(value)
    return _dump(value)


def _dump(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=2**31, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()


# PyYAML builds a writer for each value. A configuration has hundreds, and most of them appear in others too.
# Floats are not cached: 0.0 and -0.0 are equal, but their texts differ.
_dump_again = lru_cache(maxsize=4096, typed=True)(_dump)


class _Loader(yaml.SafeLoader):
    """Composes nodes and refuses every explicit tag. PyYAML constructs no objects."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - PyYAML's own name for its table
    composed = depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        self.composed += 1
        if self.composed > MAX_NODES:  # ends before a long text fills memory with nodes
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_NODES} values", problem_mark=event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(
                problem=f"the tag {event.tag} is refused, only plain data is read", problem_mark=event.start_mark
            )
        self.depth += 1
        if self.depth > MAX_DEPTH:  # the reader's time grows with the square of the depth
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Puts text in quotes that the loader above would read as something else."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: _Dumper, text: str) -> yaml.Node:
    return dumper.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_str)
_Dumper.add_representer(tuple, lambda dumper, items: dumper.represent_list(items))
for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), _first)
    _Dumper.add_implicit_resolver(_tag, re.compile(_pattern), _first)


def _scalar(node: yaml.ScalarNode) -> Any:
    match node.tag.removeprefix(_TAG):
        case "null":
            return None
        case "bool":
            return node.value.lower() == "true"
        case "int":
            return _int(node.value)
        case "float":
            return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return node.value


def _int(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits; {MOST_DIGITS} are the most")
    if text[:2] in ("0o", "0x"):
        return int(text, 0)
    return int(text)


class _Builder:
    """Converts PyYAML's nodes to Node. It counts them, so that nested aliases cannot grow without bound."""

    def __init__(self, name: str, with_lines: bool) -> None:
        self.name = name
        self.with_lines = with_lines
        self.count = 0
        self.open: set[int] = set()  # nodes being built: an alias to one of them contains itself

    def fail(self, node: yaml.Node, problem: str) -> ConfigError:
        return ConfigError(f"{self.name}:{node.start_mark.line + 1}: {problem}")

    def node(self, node: yaml.Node, key: yaml.Node | None = None) -> Node:
        line = None
        if self.with_lines:
            line = (key or node).start_mark.line + 1
        return Node(self.value(node), Origin(self.name, line))

    def value(self, node: yaml.Node) -> Any:
        self.count += 1
        if self.count > MAX_NODES:
            raise self.fail(node, f"more than {MAX_NODES} values once aliases are expanded")
        if isinstance(node, yaml.ScalarNode):
            try:
                return _scalar(node)
            except ValueError as error:
                raise self.fail(node, str(error)) from None
        if id(node) in self.open:
            raise self.fail(node, "an alias to what contains it")
        self.open.add(id(node))
        built = (
            self.mapping(node)
            if isinstance(node, yaml.MappingNode)
            else [_plain(self.value(item)) for item in node.value]
        )
        self.open.discard(id(node))
        return built

    def mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        built: dict[str, Node] = {}
        for key, value in node.value:
            name = key.value
            if not isinstance(key, yaml.ScalarNode) or key.tag != _TAG + "str":
                raise self.fail(key, "a key must be text; put it in quotes")
            if name == _MERGE:
                raise self.fail(
                    key, "merge keys (<<) are not read; put what is shared into a file and name it under extends:"
                )
            if name in built:
                raise self.fail(
                    key, f"the key {name} appears twice in one mapping (first at line {built[name].origin.line})"
                )
            built[name] = self.node(value, key)
        return built


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: child.plain() for key, child in value.items()}
    return value


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Turns dotted keys into nested mappings. Keys inside engine_kwargs and the like contain no dots."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree
