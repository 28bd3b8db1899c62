"""Words of a script -> texts: variables with their defaults, arrays, arithmetic, and the few commands that only shape text."""

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from mrl.errors import ConfigError
from mrl.extras.import_verl.arithmetic import calculate
from mrl.extras.import_verl.shell_lexer import Part, Word
from mrl.extras.import_verl.shell_syntax import Simple, parse_script, parse_text
from mrl.extras.import_verl.values import EMPTY, Value, unset

_NAME = re.compile(r"(#)?([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?!$])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_OPERATION = re.compile(r"(:?[-=+?]|##?|%%?|//?|,,|\^\^|:)(.*)", re.DOTALL)
_IN_ARITHMETIC = re.compile(r"\$\{([A-Za-z_]\w*)\}|\$([A-Za-z_]\w*)")
Variable = Value | tuple[Value, ...]


class Expander:
    """Expands words against a mapping of variables. `${x:=y}` writes to it, nothing else does."""

    def __init__(self, variables: dict[str, Variable], positional: Sequence[Value], name: str) -> None:
        self.variables, self.positional, self.name = variables, tuple(positional), name
        self.counts_arguments = False  # whether $# is known: a script that asks for arguments was written to get some

    def fields(self, words: Sequence[Word]) -> list[Value]:
        """The arguments that words become, split at blanks outside quotes."""
        return [field for word in words for field in self.split(word)]

    def split(self, word: Word) -> list[Value]:
        done: list[Value] = []
        current: Value | None = None
        quoted = False
        for part in word.parts:
            pieces = self.pieces(part, word.line)
            quoted = quoted or (part.quoted and bool(pieces))
            for i, piece in enumerate(pieces):
                if i:
                    done += [current] if current is not None else []
                    current = None
                current = piece if current is None else current + piece
        if current is not None and (current.text or quoted):
            done.append(current)
        return [field.at(field.line or word.line) for field in done]

    def pieces(self, part: Part, line: int) -> list[Value]:
        """One part as one or more pieces; between two pieces a new argument begins."""
        if part.kind == "variable" and (items := self.all_items(part)) is not None:
            return [item.at(item.line or line) for item in items]
        value = self.part(part, line)
        if part.quoted or part.kind == "text" or not value.known or len(value.text.split()) == 1:
            return [value]
        return [Value(text, line=value.line) for text in value.text.split()]

    def all_items(self, part: Part) -> tuple[Value, ...] | None:
        """The items of `$@` or `${array[@]}`; None of another variable, and of a quoted `*`, which is one text."""
        match = _NAME.fullmatch(part.text)
        if match is None or match[1] or match[4] or (part.quoted and "*" in (match[2], match[3])):
            return None
        if match[2] in ("@", "*"):
            return self.positional
        if match[3] not in ("@", "*"):
            return None
        held = self.variables.get(match[2], ())
        return held if isinstance(held, tuple) else (held,)

    def text(self, word: Word) -> Value:
        """A word as one text, as in an assignment."""
        total = EMPTY
        for part in word.parts:
            total = total + self.part(part, word.line)
        return total.at(word.line)

    def part(self, part: Part, line: int) -> Value:
        match part.kind:
            case "variable":
                return self.variable(part.text, line)
            case "arithmetic":
                return self.arithmetic(part.text)
            case "command":
                return self.command(part.text, line)
        return Value(part.text)

    def variable(self, text: str, line: int) -> Value:
        match = _NAME.fullmatch(text)
        if match is None:
            return Value(f"${{{text}}}", frozenset((text,)))
        length, name, index, rest = match.groups()
        value = self.item(name, index)
        if length:
            held = self.variables.get(name)
            return Value(str(len(held) if isinstance(held, tuple) else len(value.text)), value.missing)
        return self.operation(name, value, rest, line) if rest else value

    def item(self, name: str, index: str | None) -> Value:
        if name.isdigit():
            at = int(name) - 1
            return self.positional[at] if 0 <= at < len(self.positional) else unset(name)
        if name == "#" and self.counts_arguments:
            return Value(str(len(self.positional)))
        held = self.positional if name in ("@", "*") else self.variables.get(name)
        if held is None:
            return unset(name)
        if isinstance(held, Value):
            return held
        if index in ("@", "*") or name in ("@", "*"):
            joined = EMPTY
            for i, item in enumerate(held):
                joined = joined + Value(" " if i else "") + item
            return joined
        place = self.arithmetic(index or "0")
        if not place.known:
            return Value(f"${{{name}[{index}]}}", frozenset((f"{name}[{index}]",)))
        at = int(place.text)
        return held[at] if -len(held) <= at < len(held) else unset(name)

    def operation(self, name: str, value: Value, rest: str, line: int) -> Value:
        match = _OPERATION.fullmatch(rest)
        if match is None:
            return Value(f"${{{name}{rest}}}", frozenset((name,)))
        operator, argument = match.groups()
        is_set = value.known or name not in value.missing
        if operator in ("-", ":-", "=", ":=", "?", ":?", "+", ":+"):
            return self.default(name, value, operator, argument, is_set and (operator[0] != ":" or value.text != ""), line)
        return value if not value.known else Value(self.shaped(value.text, operator, argument, line))

    def default(self, name: str, value: Value, operator: str, argument: str, holds: bool, line: int) -> Value:
        other = self.text(parse_text(argument, line, self.name)) if not operator.endswith("?") else value
        if operator.endswith("+"):
            return other if holds else EMPTY
        if holds:
            return value
        if operator.endswith("="):
            self.variables[name] = other
        return other

    def shaped(self, text: str, operator: str, argument: str, line: int) -> str:
        """`${x#pattern}` and its kin."""
        if operator in ("//", "/"):
            old, _, new = argument.partition("/")
            return text.replace(old, new) if operator == "//" else text.replace(old, new, 1)
        if operator in (",,", "^^"):
            return text.lower() if operator == ",," else text.upper()
        if operator == ":":
            start, _, length = argument.partition(":")
            begin = int(start) if start.strip().lstrip("-").isdigit() else 0
            return text[begin:][: int(length) if length.isdigit() else None]
        pattern = self.text(parse_text(argument, line, self.name)).text
        cuts = range(len(text) + 1) if operator in ("#", "%%") else range(len(text), -1, -1)
        if operator in ("#", "##"):
            return next((text[cut:] for cut in cuts if fnmatchcase(text[:cut], pattern)), text)
        return next((text[:cut] for cut in cuts if fnmatchcase(text[cut:], pattern)), text)

    def arithmetic(self, text: str) -> Value:
        plain = _IN_ARITHMETIC.sub(lambda m: m[1] or m[2], text)
        missing: set[str] = set()

        def value_of(name: str) -> int:
            value = self.item(name, None)
            missing.update(value.missing)
            if not value.known:
                return 1
            return calculate(value.text, value_of) if not re.fullmatch(r"-?[0-9]+", value.text.strip()) else int(value.text)

        try:
            result = str(calculate(plain, value_of))
        except (ValueError, RecursionError):
            return Value(f"$(({text}))", frozenset((f"$(({text}))",)) | missing)
        return Value(f"$(({text}))", frozenset(missing)) if missing else Value(result)

    def command(self, text: str, line: int) -> Value:
        """What a command prints, for the few that do nothing but shape their arguments."""
        unknown = Value(f"$({text})", frozenset((f"$({text.strip()})",)))
        try:
            block, _ = parse_script(text, f"{self.name}:{line}")
        except ConfigError:
            return unknown
        if len(block.commands) != 1 or not isinstance(block.commands[0], Simple):
            return unknown
        name, *arguments = self.fields(block.commands[0].words) or [EMPTY]
        shape = _TEXT_COMMANDS.get(name.text)
        if shape is None or not arguments:
            return unknown
        missing = frozenset().union(*(a.missing for a in arguments))
        return Value(f"$({text})", missing) if missing else Value(shape([a.text for a in arguments]))


def _basename(arguments: list[str]) -> str:
    name = PurePosixPath(arguments[0]).name
    return name.removesuffix(arguments[1]) if len(arguments) > 1 else name


_TEXT_COMMANDS: Mapping[str, Callable[[list[str]], str]] = {
    "basename": _basename,
    "dirname": lambda arguments: str(PurePosixPath(arguments[0]).parent),
    "echo": " ".join,
}
