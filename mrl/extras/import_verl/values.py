"""What a variable of a script holds: text, and what of it cannot be known without running something."""

from dataclasses import dataclass, replace

from mrl.errors import ConfigError

MAX_TEXT = 1_000_000  # characters of one variable
MAX_ITEMS = 10_000  # of one array


@dataclass(frozen=True)
class Value:
    """`missing`: names of variables that nobody sets, and command substitutions; empty when the text is known."""

    text: str
    missing: frozenset[str] = frozenset()
    line: int = 0

    @property
    def known(self) -> bool:
        return not self.missing

    def __add__(self, other: "Value") -> "Value":
        if len(self.text) + len(other.text) > MAX_TEXT:
            raise ConfigError(f"a variable of the script grows over {MAX_TEXT} characters, which no launch script needs")
        return Value(self.text + other.text, self.missing | other.missing, self.line or other.line)

    def at(self, line: int) -> "Value":
        return replace(self, line=line)


EMPTY = Value("")


def unset(name: str) -> Value:
    """A variable that nobody sets."""
    return Value(f"${{{name}}}", frozenset((name,)))


@dataclass(frozen=True)
class Launch:
    """A command line with all its variables put in."""

    words: tuple[Value, ...]
    line: int
