"""How a key of the configuration is stated: once, with meaning, limits, unit, advice,
verl's name and rule beside it.
"""

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, create_model, field_validator
from pydantic.fields import FieldInfo

from mrl.errors import UnknownValue, did_you_mean


class Section(BaseModel):
    """A mapping in the YAML file; immutable once built, unknown keys refused.

    Where the schema refuses a key, the rest of the configuration lacks it (mrl/config/schema_errors.py): reading it
    raises UnknownValue.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """One text stands for a list of one; true and false are no numbers, although Python thinks so, and no number
        and no text is beyond what files and other programs can hold. A path's `~` is the home of who starts the run.
        """
        field = cls.model_fields[info.field_name]
        annotation = field.annotation
        if annotation == tuple[str, ...] and isinstance(value, str):
            value = (value,)
        if isinstance(value, bool) and annotation in (int, float, int | None, float | None):
            raise ValueError("a number is wanted")
        if annotation in (int, int | None) and isinstance(value, int | float) and abs(value) >= 2**63:
            raise ValueError("a whole number of 64 bits is wanted")
        for text in value if isinstance(value, list | tuple) else (value,):
            if isinstance(text, str) and ("\0" in text or text != text.encode(errors="ignore").decode()):
                raise ValueError("text without zero bytes and halves of characters is wanted")
        if notes_of(field).is_path:
            return _at_home(value)
        return value

    def __getattr__(self, name: str) -> Any:
        if name in type(self).model_fields:
            raise UnknownValue(name)
        return super().__getattr__(name)


def _at_home(value: Any) -> Any:
    """A path, or each of a list of them, with the user's home in place of `~`; as it is where nobody knows the home."""
    if isinstance(value, list | tuple):
        return tuple(_at_home(each) for each in value)
    if isinstance(value, str):
        return os.path.expanduser(value)
    return value


@dataclass(frozen=True)
class KeyRule:
    """What a value must be beyond its type and limits.

    `faults` gives a text for each way in which it breaks the rule.
    """

    faults: Callable[[Any], Iterator[str]]
    why: str = ""
    allowed: tuple[Any, ...] = ()


@dataclass(frozen=True)
class KeyNotes:
    """What stands beside a key for readers. `verl`: verl's keys that mean the same and take the same values;
    `is_path`: of a file or a folder, or of several.
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
    """A key of a section; `default` ... is required. `limits`: ge, gt, le, lt."""
    notes = KeyNotes(advice, unit, (verl,) if isinstance(verl, str) else verl, rule, is_path)
    return Field(default, description=meaning, json_schema_extra={"notes": notes}, **limits)


def notes_of(field: FieldInfo) -> KeyNotes:
    """What `key` was told; of a field that holds a section, nothing."""
    if field.json_schema_extra:
        return field.json_schema_extra["notes"]
    return KeyNotes()


def section_from(keys: type) -> type[Section]:
    """A section with the keys of a dataclass of a lower floor, whose fields' metadata are arguments of `key`.

    It inherits from both, so that it is given wherever the dataclass is wanted, and has its properties.
    """
    declared = {f.name: (f.type, key(... if f.default is MISSING else f.default, **f.metadata)) for f in fields(keys)}
    return create_model(keys.__name__, __base__=(Section, keys), **declared)


def section_of(annotation: Any) -> type[Section] | None:
    """The Section class of a field that holds one (or null), else None."""
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), None)


def must_be(holds: Callable[[Any], bool], text: str, why: str, *allowed: Any) -> KeyRule:
    """The rule `text` for values that do not hold."""
    return KeyRule(lambda value: iter(() if holds(value) else (text,)), why, allowed)


def known_name(table: Collection[str], aliases: dict[str, str]) -> KeyRule:
    """The value, or each of a list, is a name in `table`; null is left alone. `aliases`: what others call the names."""

    def faults(value: Any) -> Iterator[str]:
        for name in (value,) if isinstance(value, str) else value or ():
            if name not in table:
                yield unknown_name(name, table, aliases)

    return KeyRule(faults, "", tuple(table))


PRINTABLE = must_be(
    lambda text: text is None or text.isprintable(), "must be of printable characters", "it is shown and written down"
)
PLAIN_NAME = must_be(
    lambda name: name.isprintable() and not {"", ".", ".."} & set(name.split("/")),
    "must be a name of printable characters, without a part that is empty, . or ..",
    "a folder of this name is made below others",
)


def unknown_name(name: str, table: Collection[str], aliases: dict[str, str]) -> str:
    """What to say of a name that is not in `table`."""
    alias = aliases.get(name)
    return f"unknown name; {f'it is called {alias} here' if alias in table else did_you_mean(name, table)}"
