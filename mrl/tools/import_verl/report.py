"""The result of an import: a configuration, where each value came from, and what happened to every key of verl's."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from mrl.config.schema import RunConfig
from mrl.config.yaml_tree import dump_value, nested

KINDS = ("carried", "renamed", "implied", "chosen", "not_applicable", "unsupported", "unknown")


@dataclass(frozen=True)
class KeyReport:
    """The fate of one key.

    `key` is verl's ("" for a value that no key of the script gave). `to` is mrl's ("" where it goes nowhere).
    """

    kind: str
    key: str
    to: str
    value: Any
    why: str
    line: int

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return {"key": self.key, "to": self.to, "value": self.value, "why": self.why, "line": self.line}

    def __str__(self) -> str:
        key = " -> ".join(part for part in (self.key, self.to if self.to != self.key else "") if part)
        return f"{key} = {dump_value(self.value)}" + (f": {self.why}" if self.why else "")


def _replaced(entry: KeyReport, became: str) -> KeyReport:
    """Marks an entry whose value another one replaces. An unknown value then no longer has to be given."""
    if entry.kind == "unknown":
        return replace(entry, kind="implied", why=became)
    if entry.why:
        return entry
    return replace(entry, why=became)


@dataclass
class Import:
    """The result, filled while keys are read.

    `values` maps mrl's dotted keys to values. `notes` maps them to the comments beside them.
    """

    name: str
    entries: list[KeyReport] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    faults: tuple[str, ...] = ()  # places of the script that cannot be read; with any of them the import is not valid
    names: set[str] = field(
        default_factory=set
    )  # verl's keys of names with unknown values, which do not affect training
    lacks_layout: bool = False  # neither the script nor a preset has a layout for the model

    def put(self, kind: str, key: str, to: str, value: Any, why: str = "", line: int = 0) -> None:
        """Sets mrl's key `to` and reports it. Keys that had set it to something else then say what it became."""
        if self.values.get(to, value) != value:
            became = f"becomes {dump_value(value)}" + (f": {why}" if why else "")
            before = self.entries
            self.entries = [_replaced(e, became) if e.to == to and e.key else e for e in before]
        self.values[to] = value
        self.notes[to] = kind
        if why:
            self.notes[to] = f"{kind}: {why}"
        elif line:
            self.notes[to] = f"line {line}"
        self.entries.append(KeyReport(kind, key, to, value, why, line))

    def leave(self, kind: str, key: str, value: Any, why: str, line: int = 0) -> None:
        """Reports a key that goes nowhere."""
        self.entries.append(KeyReport(kind, key, "", value, why, line))

    def drop(self, to: str, why: str) -> None:
        """Removes a value of mrl's key. The key of verl's becomes implied."""
        if to in self.values:
            del self.values[to], self.notes[to]
            self.entries = [
                e if e.to != to else KeyReport("implied", e.key, "", e.value, why, e.line) for e in self.entries
            ]

    def retract(self, key: str, why: str) -> None:
        """Makes entries of verl's `key` implied. mrl's value stays, because another key may have set it since."""
        entries = self.entries
        self.entries = [KeyReport("implied", e.key, "", e.value, why, e.line) if e.key == key else e for e in entries]

    @property
    def losses(self) -> list[KeyReport]:
        """Requests of the script that the configuration does not fulfil, or has no value for. Names do not count."""
        unknown = [entry for entry in self.of("unknown") if entry.key not in self.names]
        return [*self.of("unsupported"), *unknown]

    def of(self, kind: str) -> list[KeyReport]:
        """Returns the entries of one kind."""
        return [entry for entry in self.entries if entry.kind == kind]

    @property
    def keys(self) -> set[str]:
        """verl's keys that were read."""
        return {entry.key for entry in self.entries} - {""}

    def to_json(self) -> dict[str, Any]:
        """Returns the seven lists of entries and the warnings as plain data."""
        return {**{kind: [e.to_json() for e in self.of(kind)] for kind in KINDS}, "warnings": list(self.warnings)}

    def to_yaml(self) -> str:
        """Writes the configuration in the order of the schema, each value with its origin."""
        head = [f"# Imported from {self.name} (verl). Beside each value: the line of the script, or why it is here."]
        head += [f"# warning: {line}" for warning in self.warnings for line in warning.splitlines()]
        head += [f"# {kind}: {entry}" for kind in ("unsupported", "unknown") for entry in self.of(kind)]
        return "\n".join([*head, *self._sections(nested(self.values), ()), ""])

    def _sections(self, tree: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
        order = list(RunConfig.model_fields)
        names = sorted(tree, key=lambda n: order.index(n) if not path and n in order else 0)
        for name in names:
            here = (*path, name)
            indent = "  " * len(path)
            if isinstance(tree[name], dict) and ".".join(here) not in self.values:
                yield f"{'' if path else chr(10)}{indent}{name}:"
                yield from self._sections(tree[name], here)
            else:
                yield f"{indent}{dump_value(name)}: {dump_value(tree[name])}  # {self.notes['.'.join(here)]}"
