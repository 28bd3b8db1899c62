"""What the schema has against a configuration, in words: the key, where it was written, what it may be."""

import types
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from mrl.config.violation import MISSING, ConfigViolation, did_you_mean
from mrl.config.yaml_tree import Node

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping", Any: "anything"}
_BOUNDS = {Ge: ("ge", ">="), Gt: ("gt", ">"), Le: ("le", "<="), Lt: ("lt", "<")}


def schema_violations(error: ValidationError, tree: Node, root: type[BaseModel]) -> list[ConfigViolation]:
    """All of pydantic's complaints about `tree` as violations, in the order of the schema, each key once."""
    found = {}
    for e in reversed(error.errors()):
        violation = _violation(e["type"], e["loc"], e["input"], tree, root)
        found[violation.field] = violation
    return list(reversed(found.values()))


def allowed_text(field: FieldInfo) -> str:
    """What a field may be: `a number > 0`, `one of cpu, cuda, npu`, `a list, each text`."""
    bounds = [f"{sign} {getattr(m, name):g}" for m in field.metadata for kind, (name, sign) in _BOUNDS.items() if isinstance(m, kind)]
    return " ".join([_type_text(field.annotation), " and ".join(bounds)]).strip()


def _type_text(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join("null" if a is type(None) else _type_text(a) for a in reversed(arguments))
    if origin is tuple:
        count = "a list, each" if Ellipsis in arguments else f"a list of {len(arguments)}, each"
        return f"{count} {_type_text(arguments[0])}"
    if origin is dict and get_origin(arguments[1]) is dict:
        return "a mapping of mappings"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with keys of {', '.join(annotation.model_fields)}"
    return _NAMES[origin or annotation]


def _violation(kind: str, loc: Sequence[Any], value: Any, tree: Node, root: type[BaseModel]) -> ConfigViolation:
    owner, field, depth = _resolve(loc, root)
    path, unknown = loc[: depth + (kind == "extra_forbidden")], kind == "extra_forbidden"
    node, steps = tree.find(path)
    name, where = ".".join(map(str, path)), str(node.origin) if steps else ""
    if unknown:
        return ConfigViolation(name, where, MISSING, f"unknown key; {_suggestion(path, owner, root)}")
    if steps < len(path):
        return ConfigViolation(name, where, MISSING, f"is not set; must be {allowed_text(field)}")
    quote = "; put it in quotes" if field.annotation is str and isinstance(value, int | float) else ""
    return ConfigViolation(name, where, node.plain(), f"must be {allowed_text(field)}{quote}")


def _resolve(loc: Sequence[Any], root: type[BaseModel]) -> tuple[type[BaseModel], FieldInfo | None, int]:
    """The section in which the path ends, the last field on the path, and how many keys lead to it: what follows is inside a value."""
    owner, field, depth = root, None, 0
    for depth, key in enumerate(loc, start=1):
        if key not in owner.model_fields:
            return owner, field, depth - 1
        field = owner.model_fields[key]
        section = section_of(field.annotation)
        if section is None:
            break
        owner = section
    return owner, field, depth


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The Section class of a field that holds one (or null), else None."""
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _suggestion(loc: Sequence[Any], owner: type[BaseModel], root: type[BaseModel]) -> str:
    key = str(loc[-1])
    elsewhere = [path for path in schema_paths(root) if path.rpartition(".")[2] == key]
    return f"did you mean {elsewhere[0]}?" if elsewhere else did_you_mean(key, owner.model_fields)


def schema_paths(root: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of the schema, dotted, sections included."""
    for name, field in root.model_fields.items():
        yield prefix + name
        section = section_of(field.annotation)
        if section is not None:
            yield from schema_paths(section, f"{prefix}{name}.")
