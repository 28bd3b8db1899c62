"""Declares keys of the configuration.

Each key is declared once, with its meaning, limits, unit, advice, verl's name and rule.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, create_model, field_validator
from pydantic.fields import FieldInfo

from mrl.errors import UnknownValue, did_you_mean


class Section(BaseModel):
    """A mapping in the YAML file. It is immutable once built and refuses unknown keys.

    A section that misses a refused key raises UnknownValue where that key is read (mrl/config/load.py).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Prepares a value as it was written, before pydantic converts it.

        A single text stands for a list of one. `~` in a path becomes the home of the user who starts the run. Raises
        ValueError for booleans in place of numbers, for numbers beyond 64 bits, and for text that files cannot hold.
        """
        takes = _takes(cls, info.field_name)
        if takes.texts and isinstance(value, str):
            value = (value,)
        for each in _each(value):
            if takes.number and isinstance(each, bool):
                raise ValueError("a number is wanted")
            if takes.whole and isinstance(each, int | float) and abs(each) >= 2**63:
                raise ValueError("a whole number of 64 bits is wanted")
            if isinstance(each, str) and ("\0" in each or each != each.encode(errors="ignore").decode()):
                raise ValueError("text without zero bytes and halves of characters is wanted")
        if takes.path:
            return _at_home(value)
        return value

    def __getattr__(self, name: str) -> Any:
        if name in type(self).model_fields:
            raise UnknownValue(name)
        return super().__getattr__(name)


@dataclass(frozen=True)
class _Takes:
    """What a key takes, as far as values are prepared for it."""

    texts: bool
    number: bool
    whole: bool
    path: bool


@cache
def _takes(section: type[Section], name: str) -> _Takes:
    """Is asked for each key of each configuration, of which a search makes thousands."""
    field = section.model_fields[name]
    annotation = field.annotation
    kinds = list(_kinds(annotation))
    whole = int in kinds
    number = (whole or float in kinds) and bool not in kinds
    return _Takes(annotation == tuple[str, ...], number, whole, notes_of(field).is_path)


def _each(value: Any) -> Iterable[Any]:
    """Returns the values of a list or a mapping, or a single value."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yields an annotation and those within it: int and str of tuple[int, ...] | str."""
    yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)


def _at_home(value: Any) -> Any:
    """Replaces `~` by the user's home in a path, or in each path of a list.

    A path stays as it is where the home is unknown.
    """
    if isinstance(value, list | tuple):
        return tuple(_at_home(each) for each in value)
    if isinstance(value, str):
        return os.path.expanduser(value)
    return value


@dataclass(frozen=True)
class KeyRule:
    """A rule for one key, beyond its type and limits.

    `faults` yields one text for each way in which a value breaks the rule. `why` is the reason, `allowed` lists values
    that are allowed.
    """

    faults: Callable[[Any], Iterator[str]]
    why: str = ""
    allowed: tuple[Any, ...] = ()


@dataclass(frozen=True)
class KeyNotes:
    """The notes on a key in the documentation, beside its meaning.

    `verl` names verl's keys that mean the same and take the same values. `is_path` marks paths of files or folders.
    """

    advice: str = ""
    unit: str = ""
    verl: tuple[str, ...] = ()
    rule: KeyRule | None = None
    is_path: bool = False


def key(
    default: Any,
    meaning: str,
    *,
    advice: str = "",
    unit: str = "",
    verl: str | tuple[str, ...] = (),
    rule: KeyRule | None = None,
    is_path: bool = False,
    **limits: float,
) -> Any:
    """Declares a key of a section. A default of `...` makes it required. `limits` are ge, gt, le and lt."""
    notes = KeyNotes(advice, unit, (verl,) if isinstance(verl, str) else verl, rule, is_path)
    return Field(default, description=meaning, json_schema_extra={"notes": notes}, **limits)


def notes_of(field: FieldInfo) -> KeyNotes:
    """Returns what `key` was given. For a field that holds a section the notes are empty."""
    if field.json_schema_extra:
        return field.json_schema_extra["notes"]
    return KeyNotes()


def section_from(keys: type) -> type[Section]:
    """Builds a section whose keys are the fields of a dataclass of a lower layer.

    Metadata of the fields are arguments of `key`. The section inherits from both classes. So it has the properties of
    the dataclass and can be passed in its place.
    """
    declared = {f.name: (f.type, key(... if f.default is MISSING else f.default, **f.metadata)) for f in fields(keys)}
    return create_model(keys.__name__, __base__=(Section, keys), **declared)


def section_of(annotation: Any) -> type[Section] | None:
    """Returns the Section class of a field that holds one (or null), else None."""
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), None)


def must_be(holds: Callable[[Any], bool], text: str, why: str, *allowed: Any) -> KeyRule:
    """Builds the rule `text`, which values break for which `holds` returns False."""
    return KeyRule(lambda value: iter(() if holds(value) else (text,)), why, allowed)


def known_name(table: Collection[str], aliases: dict[str, str]) -> KeyRule:
    """Builds the rule that a value, or each one of a list, is a name in `table`. It accepts null.

    `aliases` maps names that other projects use to names in `table`.
    """

    def faults(value: Any) -> Iterator[str]:
        for name in (value,) if isinstance(value, str) else value or ():
            if name not in table:
                yield unknown_name(name, table, aliases)

    return KeyRule(faults, "", tuple(table))


PRINTABLE = must_be(
    lambda text: text is None or text.isprintable(), "must be of printable characters", "it is shown and written down"
)
_LONGEST_NAME = 200  # bytes; file systems take 255, and names of files beside it have an ending
PLAIN_NAME = must_be(
    lambda name: (
        name.isprintable()
        and not {"", ".", ".."} & set(name.split("/"))
        and all(len(os.fsencode(part)) <= _LONGEST_NAME for part in name.split("/"))
    ),
    f"must be a name of printable characters, with parts of at most {_LONGEST_NAME} bytes, none of them empty, . or ..",
    "a folder of this name is made below others",
)


def unknown_name(name: str, table: Collection[str], aliases: dict[str, str]) -> str:
    """Returns the message for a name that is not in `table`, which the violation lists itself."""
    if (alias := aliases.get(name)) in table:
        return f"unknown name; it is called {alias} here"
    meant = did_you_mean(name, table)
    return "unknown name" + (f"; {meant}" if meant.endswith("?") else "")
