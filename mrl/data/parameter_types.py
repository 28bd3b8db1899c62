"""Reads a value that a call writes as plain text (XML and GLM form) by the JSON schema of its parameter.

Which types a schema allows, and which is tried first, is as in vLLM (tool_parsers/utils.py of 0.32), so that an agent
gets the same values from both. Beside it `$ref`, `const`, `nullable` and schemas without `type` are resolved here, and
a value that fits no type is an error rather than a text.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

STRING = "string"
_ANY = "any"  # JSON where it can be read, else text
_MOST_DEPTH = 200  # schemas inside schemas
_NAMES = {"str": STRING, "text": STRING, "int": "integer", "long": "integer", "float": "number", "double": "number"}
_NAMES |= {"bool": "boolean", "dict": "object", "list": "array"}
_KNOWN = frozenset((STRING, "integer", "number", "boolean", "null", "object", "array"))
_OF_VALUES = ((type(None), "null"), (bool, "boolean"), (int, "integer"), (float, "number"), (str, STRING))
_OF_KEYWORDS = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
_WHOLE = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_NONE = "None"  # as Qwen3-Coder's own template writes null


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Returns the JSON types that a parameter may have: string alone without a schema.

    `root` is the schema that `$ref` points into (`#/$defs/NAME`). A schema that names no type allows all of them; of a
    text that may be anything only objects and arrays are told from strings.
    """
    unsaid = ("object", "array", STRING) if isinstance(schema, Mapping) else (STRING,)
    return frozenset(_types(schema, root, {}, 0) or unsaid)


def properties_of(root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a function's schema, also those behind `$ref` and `allOf`."""
    return _properties(root, root, set(), 0)


def typed_parameters(root: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Returns the types of each parameter of a function's schema, with all references resolved."""
    return {name: {"type": sorted(types_of(schema, root))} for name, schema in properties_of(root).items()}


def _properties(schema: Any, root: Mapping[str, Any], seen: set[Any], depth: int) -> dict[str, Any]:
    """`seen` are the references that were followed: each once, however often a client's schema repeats it."""
    if not isinstance(schema, Mapping) or depth > _MOST_DEPTH:
        return {}
    found: dict[str, Any] = {}
    below = _options(schema, "allOf")
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        below = [_target(reference, root), *below]
    for part in below:
        found |= _properties(part, root, seen, depth + 1)
    own = schema.get("properties")
    return found | dict(own) if isinstance(own, Mapping) else found


def _types(schema: Any, root: Mapping[str, Any], known: dict[str, set[str]], depth: int) -> set[str]:
    """Returns the types that a schema names, of itself or below; empty where it names none.

    `known` are those of the references so far. Each is followed once, however often a client's schema repeats it.
    """
    if not isinstance(schema, Mapping) or depth > _MOST_DEPTH:
        return set()
    types = {_named(name) for name in _as_list(schema.get("type")) if isinstance(name, str)}
    for value in (*_options(schema, "enum"), *([schema["const"]] if "const" in schema else [])):
        types.add(_type_of(value))
    if "$ref" in schema:
        types |= _types_behind(str(schema["$ref"]), root, known, depth)
    for part in _options(schema, "allOf"):
        types |= _types(part, root, known, depth + 1)
    options = [choice for key in ("anyOf", "oneOf") for choice in _options(schema, key)]
    choices = [_types(choice, root, known, depth + 1) for choice in options]
    if not types and any(choices):
        choices = [choice or {STRING} for choice in choices]
    types = types.union(*choices)
    types |= set() if types else {kind for keyword, kind in _OF_KEYWORDS.items() if keyword in schema}
    return types | ({"null"} if types and schema.get("nullable") is True else set())


def _types_behind(reference: str, root: Mapping[str, Any], known: dict[str, set[str]], depth: int) -> set[str]:
    if reference not in known:
        known[reference] = set()  # what a reference to itself adds
        target = _target(reference, root)
        known[reference] = {_ANY} if target is None else _types(target, root, known, depth + 1)
    return known[reference]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _options(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _named(name: str) -> str:
    word = name.strip().lower()
    word = _NAMES.get(word, word)
    return word if word in _KNOWN else _ANY


def _type_of(value: Any) -> str:
    if isinstance(value, Mapping):
        return "object"
    return next((name for kind, name in _OF_VALUES if isinstance(value, kind)), "array")


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """Returns what a JSON pointer of the same document (`#/a/b`) points at; None where there is nothing."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found


def value_of(text: str, types: frozenset[str]) -> Any:
    """Reads a value. Raises ValueError or RecursionError for a text that is none of the types and no JSON either."""
    word = text.strip()
    try:
        for value in _fitting(word, types):
            return value
        if STRING not in types:
            return None if word == _NONE else json_of(word)
    except (ValueError, RecursionError):
        if types.isdisjoint((STRING, _ANY)):
            raise
    return text


def _fitting(word: str, types: frozenset[str]) -> Iterator[Any]:
    """Yields what the text is as a value of each type but string, in vLLM's order."""
    if "null" in types and (word.lower() == "null" or (word == _NONE and STRING not in types)):
        yield None
    if ("integer" in types or "number" in types) and _WHOLE.fullmatch(word):
        yield int(word)
    if "number" in types and _DECIMAL.fullmatch(word):
        yield finite(word)
    if "boolean" in types and word.lower() in ("true", "1", "false", "0"):
        yield word.lower() in ("true", "1")
    kinds = tuple(kind for name, kind in (("object", dict), ("array", list)) if name in types)
    if kinds and word[:1] in ("{", "[") and isinstance(value := json_of(word), kinds):
        yield value


def json_of(text: str) -> Any:
    """Parses JSON. Raises ValueError for numbers that JSON cannot write, and RecursionError."""
    return json.loads(text, parse_constant=_no_constant, parse_float=finite)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no value")


def finite(text: str) -> float:
    """Reads a number. Raises ValueError where it is beyond all floating-point numbers."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:60]} is no value: it is beyond all floating-point numbers")
    return value
