"""What a variable of a script holds: text, and what of it cannot be known without running something."""

from dataclasses import dataclass, replace


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
