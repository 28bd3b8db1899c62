"""Describes what the schema refuses: which key, where it was written, what it may be.

It also builds the rest of the configuration without the refused keys.
"""

import types
from collections.abc import Collection, Sequence
from functools import reduce
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from mrl.config.schema import RunConfig, Section, schema_paths
from mrl.config.section import section_of
from mrl.config.yaml_tree import Node
from mrl.errors import Violation, did_you_mean

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

    Reading a refused key of it raises UnknownValue. `values` is the configuration as written, and is changed. Legal
    stand-ins replace refused keys while the schema is checked, and are removed afterwards.
    """
    fields = {tuple(path.split(".")): field for path, field in schema_paths()}
    for path in refused:
        _at(values, path[:-1]).pop(path[-1], None)
    for path in refused:
        if path in fields and fields[path].is_required():
            _at(values, path[:-1])[path[-1]] = _stand_in(fields[path])
    config = RunConfig.model_validate(values)
    for path in fields.keys() & set(refused):
        del vars(reduce(getattr, path[:-1], config))[path[-1]]
    return config


def _at(values: dict[str, Any], path: _Path) -> dict[str, Any]:
    return reduce(lambda below, key: below[key], path, values)


def _stand_in(field: FieldInfo) -> Any:
    """Returns some value that the schema accepts for a required key."""
    section = section_of(field.annotation)
    if section is not None:
        return {name: _stand_in(inner) for name, inner in section.model_fields.items() if inner.is_required()}
    if field.annotation is int:
        return 1
    return "-"


def allowed_text(field: FieldInfo) -> str:
    """Describes what a field may be: `a number > 0`, `one of cpu, cuda, npu`, `a list, each text`."""
    bounds = [
        f"{sign} {getattr(m, name):g}"
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
