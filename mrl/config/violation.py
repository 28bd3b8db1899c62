"""What is wrong with a configuration, as data: both for a person to read and for `--json`."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from mrl.config.yaml_tree import dump_value
from mrl.errors import ConfigError


@dataclass(frozen=True)
class ConfigViolation:
    """One broken rule: the key, where its value was written, what must hold and why, and values that would hold."""

    field: str  # dotted, e.g. "actor.optim.lr"
    where: str  # "preset.yaml:12", "recipe gspo", "--set", "default"; "" for a key that stands nowhere
    value: Any
    rule: str
    why: str = ""
    allowed: tuple[Any, ...] = ()

    def __str__(self) -> str:
        value = "" if self.value is MISSING else f" = {show(self.value)}"
        where = f" ({self.where})" if self.where else ""
        why = f"; {self.why}" if self.why else ""
        allowed = f"; allowed: {', '.join(map(show, self.allowed))}" if self.allowed else ""
        return f"{self.field}{value}{where}: {self.rule}{why}{allowed}"

    def to_json(self) -> dict[str, Any]:
        """Plain data; the value of a key that is not there, or not known, is null."""
        return {
            "field": self.field,
            "where": self.where,
            "value": _plain(self.value),
            "rule": self.rule,
            "why": self.why,
            "allowed": [_plain(v) for v in self.allowed],
        }


@dataclass(frozen=True)
class Broken:
    """A broken rule as the rule sees it; where the value came from is added by the caller."""

    field: str
    rule: str
    why: str = ""
    allowed: tuple[Any, ...] = ()


class _Missing:
    """The value of a key that is not there, or that is not known."""

    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()


class InvalidConfig(ConfigError):
    """All violations of one configuration; the message lists every one of them."""

    def __init__(self, violations: Iterable[ConfigViolation]) -> None:
        self.violations = tuple(violations)
        count = len(self.violations)
        head = f"{count} problem{'s' if count > 1 else ''} in the configuration:"
        super().__init__("\n".join([head, *(f"  {v}" for v in self.violations)]))


def _plain(value: Any) -> Any:
    """What strict JSON can hold: numbers that it cannot, and everything else, become text."""
    match value:
        case _Missing():
            return None
        case dict():
            return {str(key): _plain(v) for key, v in value.items()}
        case list() | tuple():
            return [_plain(v) for v in value]
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return value
    return str(value)


def show(value: Any) -> str:
    """A value as the YAML file would say it, cut short where it is long."""
    text = dump_value(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean X?` when a known name is close, else the list of known names."""
    known = list(known)
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
