"""Expands words of a script into values: variables with defaults, arrays, integer arithmetic, commands that format
text.

What cannot be known without running something is named in the value. Arithmetic such as `(a + b) * 2 / sp` is
calculated from its syntax tree. Nothing is evaluated as code.
"""

import ast
import os.path
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import PurePosixPath

from mrl.errors import ConfigError
from mrl.tools.import_verl.shell_syntax import (
    Chain,
    Command,
    CommandBlock,
    If,
    Simple,
    Word,
    WordPart,
    parse_script,
    parse_text,
)

MAX_TEXT = 1_000_000  # characters in one variable
MAX_ITEMS = 10_000  # items in one array
_NAME = re.compile(r"(#)?([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?!$])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_INDIRECT = re.compile(r"!([A-Za-z_]\w*|\d+)((?!\*$|@$|\[).*)", re.DOTALL)  # ${!x*} and ${!x[@]} list names
_OPERATION = re.compile(r"(:?[-=+?]|##?|%%?|//?|,,|\^\^|:)(.*)", re.DOTALL)
_IN_ARITHMETIC = re.compile(r"\$\{([A-Za-z_]\w*)\}|\$([A-Za-z_]\w*)")
_LIMIT = 10**18  # the shell calculates in 64 bits
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),  # the shell rounds towards zero
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    ast.Pow: lambda a, b: a**b if 0 <= b <= 63 and abs(a) <= 1_000_000 else _LIMIT,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
}


@dataclass(frozen=True)
class Value:
    """A text, and what is unknown in it.

    `missing` names unset variables and command substitutions. It is empty where the text is known.
    """

    text: str
    missing: frozenset[str] = frozenset()
    line: int = 0  # where the value comes from
    argument_line: int = 0  # where the argument stands in a command or array

    @property
    def known(self) -> bool:
        """Whether the text depends on no unset variable."""
        return not self.missing

    def __add__(self, other: "Value") -> "Value":
        if len(self.text) + len(other.text) > MAX_TEXT:
            raise ConfigError(
                f"a variable of the script grows over {MAX_TEXT} characters, which no launch script needs"
            )
        argument_line = self.argument_line or other.argument_line
        return Value(self.text + other.text, self.missing | other.missing, self.line or other.line, argument_line)

    def at(self, line: int) -> "Value":
        """Returns the value as written on this line of the script."""
        return replace(self, line=line)


EMPTY = Value("")


def unset(name: str) -> Value:
    """Returns the value of a variable that is not set."""
    return Value(f"${{{name}}}", frozenset((name,)))


Variable = Value | tuple[Value, ...]


def _words(value: Value) -> list[Value]:
    """Splits an unquoted value at blanks, except inside placeholders for something unknown."""
    texts = _cut_at_blanks(value.text)
    if len(texts) == 1:
        return [value]
    names_of = [frozenset(name for name in value.missing if name in text) for text in texts]
    # names that appear in no piece, only in a calculation: any piece with a placeholder may depend on them
    nowhere = value.missing.difference(*names_of)
    return [
        Value(text, names | nowhere if "$" in text and not names else names, value.line)
        for text, names in zip(texts, names_of, strict=True)
    ]


def _depths(text: str) -> list[int]:
    """Returns for each character how many `${...}` and `$(...)` enclose it, their own signs included; 0: known text."""
    depths = []
    depth = 0
    for i, character in enumerate(text):
        opens = character in "{(" and (depth > 0 or text[i - 1 : i] == "$")
        depth += opens
        depths.append(depth + (character == "$" and text[i + 1 : i + 2] in ("{", "(") and not depth))
        depth -= depth > 0 and character in "})"
    return depths


def _cut_at_blanks(text: str) -> list[str]:
    """Splits like `text.split()`, but keeps `${...}` and `$(...)` whole."""
    marked = (
        (character, depth or not character.isspace()) for character, depth in zip(text, _depths(text), strict=True)
    )
    pieces = []
    for inside, piece in groupby(marked, key=lambda pair: bool(pair[1])):
        if inside:
            pieces.append("".join(character for character, _ in piece))
    return pieces


def known_part(text: str) -> str:
    """Returns a text without its placeholders for something unknown."""
    return "".join(character for character, depth in zip(text, _depths(text), strict=True) if not depth)


class Expander:
    """Expands words with a mapping of variables. Only `${x:=y}` writes to the mapping."""

    def __init__(self, variables: dict[str, Variable], positional: Sequence[Value], name: str) -> None:
        self.variables = variables
        self.positional = tuple(positional)
        self.name = name
        self.folder: Value | None = None  # where the command substitution that is read has gone by `cd`
        self.counts_arguments = False  # whether $# is known; mostly not, as a script that reads it expects arguments

    def fields(self, words: Sequence[Word]) -> list[Value]:
        """Returns the arguments that words expand to, split at blanks outside quotes."""
        return [field for word in words for field in self.split(word)]

    def split(self, word: Word) -> list[Value]:
        """Expands one word, and splits it at blanks outside quotes as the shell does."""
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
        return [
            replace(field, line=field.line or word.line, argument_line=field.argument_line or word.line)
            for field in done
        ]

    def pieces(self, part: WordPart, line: int) -> list[Value]:
        """Expands one part into pieces. A new argument begins between two pieces."""
        if part.kind == "variable" and (items := self.all_items(part)) is not None:
            return [item.at(item.line or line) for item in items]
        value = self.part(part, line)
        if part.quoted or part.kind == "text":
            return [value]
        return _words(value)

    def all_items(self, part: WordPart) -> tuple[Value, ...] | None:
        """Returns the items of `$@` or `${array[@]}`. None for other variables, and for a quoted `*`, which is one
        text.
        """
        match = _NAME.fullmatch(part.text)
        if match is None or match[1] or match[4] or (part.quoted and "*" in (match[2], match[3])):
            return None
        if match[2] in ("@", "*"):
            return self.positional
        if match[3] not in ("@", "*"):
            return None
        stored = self.variables.get(match[2], ())
        if isinstance(stored, tuple):
            return stored
        return (stored,)

    def text(self, word: Word) -> Value:
        """Expands a word to one text, as in an assignment."""
        total = EMPTY
        for part in word.parts:
            total = total + self.part(part, word.line)
        return total.at(word.line)

    def part(self, part: WordPart, line: int) -> Value:
        """Expands one part of a word."""
        match part.kind:
            case "variable":
                return self.variable(part.text, line)
            case "arithmetic":
                return self.arithmetic(part.text)
            case "command":
                return self.command(part.text, line)
        return Value(part.text)

    def variable(self, text: str, line: int) -> Value:
        """Expands `${...}`, given without its braces. `${!x}` is the variable whose name `x` holds."""
        if (indirect := _INDIRECT.fullmatch(text)) is not None:
            named = self.item(indirect[1], None)
            if not named.known:
                return Value(f"${{{text}}}", named.missing)
            text = named.text + indirect[2]
        match = _NAME.fullmatch(text)
        if match is None:
            return Value(f"${{{text}}}", frozenset((text,)))
        length, name, index, rest = match.groups()
        value = self.item(name, index)
        if length:
            stored = self.variables.get(name)
            return Value(str(len(stored) if isinstance(stored, tuple) else len(value.text)), value.missing)
        if rest:
            return self.operation(name, value, rest, line)
        return value

    def item(self, name: str, index: str | None) -> Value:
        """Returns a variable, a positional argument, or an element of an array. `@` and `*` join all elements."""
        if name == "0" or (name == "BASH_SOURCE" and name not in self.variables and index in (None, "0")):
            return Value(self.name)
        if name.isdigit():
            number = int(name) - 1
            if 0 <= number < len(self.positional):
                return self.positional[number]
            return unset(name)
        if name == "#" and self.counts_arguments:
            return Value(str(len(self.positional)))
        stored = self.positional if name in ("@", "*") else self.variables.get(name)
        if stored is None:
            return unset(name)
        if isinstance(stored, Value):
            return stored
        if index in ("@", "*") or name in ("@", "*"):
            joined = EMPTY
            for i, item in enumerate(stored):
                joined = joined + Value(" " if i else "") + item
            return joined
        number = self.arithmetic(index or "0")
        if not number.known:
            return Value(f"${{{name}[{index}]}}", frozenset((f"{name}[{index}]",)))
        element = int(number.text)
        if -len(stored) <= element < len(stored):
            return stored[element]
        return unset(name)

    def operation(self, name: str, value: Value, rest: str, line: int) -> Value:
        """Expands `${name...}` with an operator behind the name: a default, a cut prefix or suffix, a replacement."""
        match = _OPERATION.fullmatch(rest)
        if match is None:
            return Value(f"${{{name}{rest}}}", frozenset((name,)))
        operator, argument = match.groups()
        is_set = value.known or name not in value.missing
        if operator in ("-", ":-", "=", ":=", "?", ":?", "+", ":+"):
            return self.default(
                name, value, operator, argument, is_set and (operator[0] != ":" or value.text != ""), line
            )
        if not value.known:
            return value
        return self.shaped(name, value.text, operator, argument, line)

    def default(self, name: str, value: Value, operator: str, argument: str, holds: bool, line: int) -> Value:
        """Expands `${name:-argument}` and similar forms. `holds` says that the variable counts as set."""
        other = self.argument(argument, line) if not operator.endswith("?") else value
        if operator.endswith("+"):
            if holds:
                return other
            return EMPTY
        if holds:
            return value
        if operator.endswith("="):
            self.variables[name] = other
        return other

    def argument(self, text: str, line: int) -> Value:
        """Expands the inside of `${x:-HERE}`. It is unknown where it cannot be parsed by itself."""
        try:
            return self.text(parse_text(text, line, self.name))
        except ConfigError:
            unread = f"${{...{text}}}"
            return Value(unread, frozenset((unread,)))

    def shaped(self, name: str, text: str, operator: str, argument: str, line: int) -> Value:
        """Expands `${x#pattern}` and similar forms of a known text. Unknown where the argument is unknown."""
        if operator in (",,", "^^"):
            return Value(text.lower() if operator == ",," else text.upper())
        if operator == ":":
            arguments = [self.arithmetic(part) for part in argument.split(":", 1)]
        else:
            parts = re.split(r"(?<!\\)/", argument, maxsplit=1) if operator in ("/", "//") else [argument]
            arguments = [self.argument(part, line) for part in parts]
        whole = f"${{{name}{operator}{argument}}}"
        if missing := frozenset().union(*(a.missing for a in arguments)):
            return Value(whole, missing)
        first = arguments[0].text
        second = ""
        if len(arguments) > 1:
            second = arguments[1].text
        if operator == ":":
            return Value(_substring(text, int(first), int(second) if second else None))
        if operator not in ("/", "//"):
            return Value(_cut(text, operator, first))
        if set(first) & set("*?["):
            return Value(whole, frozenset((whole,)))  # replacement by pattern is not implemented
        if not first:
            return Value(text)
        most = 1
        if operator == "//":
            most = -1
        return Value(text.replace(first, second, most))

    def arithmetic(self, text: str) -> Value:
        """Calculates `$((...))` with whole numbers."""
        plain = _IN_ARITHMETIC.sub(lambda m: m[1] or m[2], text)
        missing: set[str] = set()

        def value_of(name: str) -> int:
            value = self.item(name, None)
            missing.update(value.missing)
            if not value.known:
                return 1
            if not re.fullmatch(r"-?[0-9]+", value.text.strip()):
                return calculate(value.text, value_of)
            return int(value.text)

        try:
            result = str(calculate(plain, value_of))
        except (ValueError, RecursionError):
            return Value(f"$(({text}))", frozenset((f"$(({text}))",)) | missing)
        if missing:
            return Value(f"$(({text}))", frozenset(missing))
        return Value(result)

    def command(self, text: str, line: int) -> Value:
        """Returns the output of a command, for the few commands that only format their arguments."""
        unknown = Value(f"$({text})", frozenset((f"$({text.strip()})",)))
        try:
            script = parse_script(text, f"{self.name}:{line}")
        except ConfigError:
            return unknown
        if script.faults:
            return unknown
        before, self.folder = self.folder, None
        printed = self.printed(script.block)
        self.folder = before
        if printed is None:
            return unknown
        output, _ = printed
        if not output.known:
            return Value(f"$({text})", output.missing)
        return output

    def printed(self, command: Command) -> tuple[Value, bool] | None:
        """Returns (text that a command writes, whether it succeeds). None where only running it would tell."""
        match command:
            case CommandBlock(commands=(only,)):
                return self.printed(only)
            case Chain():
                return self.printed_by_chain(command)
            case If(branches=((condition, body),)):
                decided = self.printed(condition)
                if decided is None:
                    return None
                return self.printed(body if decided[1] else command.otherwise)
            case Simple():
                return self.printed_by_one(command)
        return None

    def printed_by_chain(self, chain: Chain) -> tuple[Value, bool] | None:
        total = EMPTY
        succeeds = True
        for operator, command in chain.links:
            if operator == "" or succeeds is (operator == "&&"):
                printed = self.printed(command)
                if printed is None:
                    return None
                total = total + printed[0]
                succeeds = printed[1]
        return total, succeeds

    def printed_by_one(self, command: Simple) -> tuple[Value, bool] | None:
        name, *arguments = self.fields(command.words) or [EMPTY]
        probe = probe_status([name, *arguments])
        if probe is not None:
            return EMPTY, probe  # what a probe writes goes to /dev/null
        plain = [argument for argument in arguments if not _IS_OPTION.fullmatch(argument.text)]
        if name.text == "pwd" and not plain:
            return self.folder or self.item("PWD", None), True
        if name.text == "cd" and len(plain) == 1 and plain[0].text not in ("", "-"):
            self.folder = self.absolute(plain[0])
            return EMPTY, True
        if (name.text == "realpath" or (name.text == "readlink" and len(plain) < len(arguments))) and len(plain) == 1:
            path = self.absolute(plain[0])
            return (replace(path, text=os.path.realpath(path.text)) if path.known else path), True
        shape = _TEXT_COMMANDS.get(name.text)
        if name.text in ("basename", "dirname") and arguments and arguments[0].text.startswith("-"):
            if arguments[0].text != "--":
                return None
            arguments = arguments[1:]
        if shape is None or not arguments:
            return None
        missing = frozenset().union(*(a.missing for a in arguments))
        return Value(shape([a.text for a in arguments]), missing), True

    def absolute(self, path: Value) -> Value:
        """Returns a path from the root, as `cd` goes there."""
        if os.path.isabs(path.text) or not path.known:
            whole = path
        else:
            whole = (self.folder or self.item("PWD", None)) + Value(f"/{path.text}")
        return replace(whole, text=os.path.normpath(whole.text)) if whole.known else whole


def why_unknown(text: str, missing: Iterable[str]) -> str:
    """Says what a text with placeholders depends on. `missing` are the names of what is unknown in it.

    A variable whose own sign is not in the text got the output of the command that is there.
    """
    runs = re.search(r"\$\((?!\()", text) is not None
    names = sorted(missing)
    commands = [name for name in names if name.startswith("$(")]
    given = [n for n in names if n not in commands and runs and not re.search(rf"\$\{{?{re.escape(n)}\b", text)]
    unset_ones = [name for name in names if name not in commands and name not in given]
    parts = [
        (unset_ones, "which the script does not set"),
        (given, "which is set by a command that is not run"),
        (commands, "a command that is not run"),
    ]
    return "depends on " + " and ".join(f"{', '.join(some)}, {what}" for some, what in parts if some)


def probe_status(fields: Sequence[Value]) -> bool | None:
    """Says how a command ends that asks the machine for its devices: as on a machine with NVIDIA GPUs.

    None for other commands. verl's scripts choose between `gpu` and `npu` with it (`python3 -c 'import torch_npu'`).
    """
    text = " ".join(field.text for field in fields)
    name = fields[0].text.rpartition("/")[2] if fields else ""
    if not (name.startswith("python") or name in _PROBES or (name in _LOOKS_UP and len(fields) > 1)):
        return None
    if _ASKS_FOR_NPUS.search(text):
        return False
    if "nvidia-smi" in text:
        return True
    return None


def _substring(text: str, start: int, length: int | None) -> str:
    """Expands `${x:start:length}`. Negative numbers count from the end."""
    rest = ""
    if start >= 0 or -start <= len(text):
        rest = text[start:]
    if length is None:
        return rest
    return rest[:length]


def _cut(text: str, operator: str, pattern: str) -> str:
    """Cuts the shortest (`#`, `%`) or longest (`##`, `%%`) match of the pattern off the start or end of `text`."""
    cuts = range(len(text) + 1) if operator in ("#", "%%") else range(len(text), -1, -1)
    if operator in ("#", "##"):
        return next((text[cut:] for cut in cuts if fnmatchcase(text[:cut], pattern)), text)
    return next((text[:cut] for cut in cuts if fnmatchcase(text[cut:], pattern)), text)


def _basename(arguments: list[str]) -> str:
    name = PurePosixPath(arguments[0]).name
    if len(arguments) > 1:
        return name.removesuffix(arguments[1])
    return name


_IS_OPTION = re.compile(r"-[A-Za-z]|--")
_PROBES = frozenset(("npu-smi", "nvidia-smi"))
_LOOKS_UP = frozenset(("command", "which", "type", "hash"))
_ASKS_FOR_NPUS = re.compile(r"\bnpu-smi\b|\b(import|find_spec\W+)\s*torch_npu\b")
_TEXT_COMMANDS: Mapping[str, Callable[[list[str]], str]] = {
    "basename": _basename,
    "dirname": lambda arguments: str(PurePosixPath(arguments[0]).parent),
    "echo": " ".join,
}


def calculate(text: str, value_of: Callable[[str], int]) -> int:
    """Calculates an expression. `value_of` returns variables by name and may raise.

    Raises ValueError for other expressions, for a division by zero, and for results beyond 64 bits.
    """
    if len(text) > 1000:
        raise ValueError("the expression is too long")
    try:
        python = re.sub(r"(?<!/)/(?!/)", "//", text.strip() or "0").replace("&&", " and ").replace("||", " or ")
        tree = ast.parse(re.sub(r"!(?!=)", " not ", python).strip(), mode="eval")
        return _value(tree.body, value_of)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(f"cannot be calculated: {error}") from None


def _value(node: ast.expr, value_of: Callable[[str], int]) -> int:
    result = _plain_value(node, value_of)
    if abs(result) >= _LIMIT:
        raise ValueError("a number is out of range")
    return result


def _plain_value(node: ast.expr, value_of: Callable[[str], int]) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name):
            return value_of(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, value_of)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, value_of)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _value(operand, value_of))
        case ast.BoolOp(op=op, values=parts):
            truths = [_value(part, value_of) != 0 for part in parts]
            return int(all(truths) if isinstance(op, ast.And) else any(truths))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left, value_of), _value(right, value_of))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            return int(_COMPARISONS[type(op)](_value(left, value_of), _value(right, value_of)))
    raise ValueError(f"{ast.unparse(node)} is no supported shell arithmetic")
