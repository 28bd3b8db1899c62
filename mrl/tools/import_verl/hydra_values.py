"""Reads values as Hydra reads them behind `key=` on its command line.

Source: the override grammar of hydra-core 1.3 (hydra/grammar/OverrideLexer.g4 and OverrideParser.g4).
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from mrl.config.yaml_tree import parse_yaml
from mrl.errors import ConfigError

_WHOLE = r"(?:0|[1-9](?:_?[0-9])*)"
_POINT = rf"(?:{_WHOLE}\.|{_WHOLE}?\.[0-9](?:_?[0-9])*)"
_INT = re.compile(rf"[-+]?{_WHOLE}")
_FLOAT = re.compile(rf"[-+]?(?:{_POINT}|(?:{_WHOLE}|{_POINT})[eE][-+]?[0-9](?:_?[0-9])*|[Ii][Nn][Ff]|[Nn][Aa][Nn])")
_NAMED = {"true": True, "false": False, "null": None}
_QUOTED = re.compile(r"""(["'])((?:\\\\)*|.*?[^\\](?:\\\\)*)\1""", re.DOTALL)
_ESCAPED = re.compile(r"(?:\\[\\()\[\]{}:=, \t])+")
# Parts of a text without quotes: escaped characters, `${...}`, and the characters that Hydra takes unescaped.
_PART = re.compile(rf"{_ESCAPED.pattern}|\$\{{[^}}]+\}}|[\w/\-\\+.$%*@?|:]|[ \t]", re.ASCII)
_KEY_PART = re.compile(rf"{_ESCAPED.pattern}|[\w/\-\\+.$%*@?|]|[ \t]", re.ASCII)
_DEEPEST = 50  # levels of lists and mappings


def hydra_value(text: str) -> Any:
    """Parses a value as Hydra does: numbers, booleans, null, lists, mappings, quoted text, and else plain text.

    What Hydra refuses is read too: lists and mappings by YAML's rules, and else as plain text.
    """
    if text.strip() == "None":
        return None  # Python's null, which scripts pass on from a variable
    try:
        return read_value(text)
    except ConfigError:
        pass
    if not text.lstrip().startswith(("[", "{")):
        return text.strip()
    try:
        return parse_yaml(f"x: {text}", "value", with_lines=False).value["x"].plain()
    except ConfigError:
        return text.strip()


def read_value(text: str) -> Any:
    """Parses a value by Hydra's grammar. Raises ConfigError with the place where it does not fit.

    Sweeps (`a,b`) and functions (`int(3)`) are no values.
    """
    reader = _Reader(text)
    value = reader.element(0) if text.strip(" \t") else ""
    reader.blanks()
    if reader.at < len(text):
        raise reader.refusal()
    return value


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the settings of `key=value` one by one: a mapping is merged into the section `key`, so each of its entries
    is a setting of its own. One with dots in its names stays whole: they would be taken for sections.
    """
    if not isinstance(value, dict) or not value or any("." in str(name) for name in value):
        yield key, value
        return
    for name, below in value.items():
        yield from leaves(f"{key}.{name}", below)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def refusal(self) -> ConfigError:
        rest = self.text[self.at : self.at + 20]
        return ConfigError(f"Hydra does not read {rest!r} here" if rest else "Hydra misses the end of the value")

    def blanks(self) -> None:
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1

    def accepts(self, sign: str) -> bool:
        """Steps over a sign and the blanks around it, where it is next."""
        self.blanks()
        if self.text[self.at : self.at + 1] != sign:
            return False
        self.at += 1
        self.blanks()
        return True

    def element(self, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ConfigError("nested too deeply")
        if self.accepts("["):
            return self.several("]", lambda: self.element(depth + 1))
        if self.accepts("{"):
            return dict(self.several("}", lambda: self.pair(depth + 1)))
        if (quoted := _QUOTED.match(self.text, self.at)) is not None:
            self.at = quoted.end()
            # backslashes count only before a quote of this kind, the closing one included
            run = re.compile(rf"\\+(?:{quoted[1]}|$)")
            return run.sub(lambda match: match[0][1::2], quoted[2])
        return self.plain(_PART)

    def several(self, end: str, one: Callable[[], Any]) -> list[Any]:
        items: list[Any] = []
        if self.accepts(end):
            return items
        while True:
            items.append(one())
            if self.accepts(end):
                return items
            if not self.accepts(","):
                raise self.refusal()

    def pair(self, depth: int) -> tuple[Any, Any]:
        key = self.plain(_KEY_PART)
        if not self.accepts(":"):
            raise self.refusal()
        return key, self.element(depth)

    def whole_number(self, digits: str) -> int:
        """Reads an integer. Python, and so hydra, refuses thousands of digits."""
        try:
            return int(digits)
        except ValueError:
            raise self.refusal() from None

    def plain(self, part: re.Pattern[str]) -> Any:
        """Reads a number, a boolean, null or a text without quotes."""
        parts = []
        while (match := part.match(self.text, self.at)) is not None:
            parts.append(match[0])
            self.at = match.end()
        while parts and parts[-1] in (" ", "\t"):
            parts.pop()
        if not parts:
            raise self.refusal()
        whole = "".join(parts)
        if whole.lower() in _NAMED:
            return _NAMED[whole.lower()]
        if _INT.fullmatch(whole):
            return self.whole_number(whole)
        if _FLOAT.fullmatch(whole):
            return float(whole)
        return "".join(part[1::2] if _ESCAPED.fullmatch(part) else part for part in parts)
